"""What a setup is asked for: JSON in, JSON out."""

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Dict, List, Mapping

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!_-]*\Z")
_REQUIREMENT = re.compile(r"[A-Za-z0-9]\S*(?: ?[^\r\n]*\S)?\Z")
NAMES = ("worker", "trainer")


class Refusal(Exception):
    """A setup that cannot be, or cannot go on: one line, and what mends it."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True)
class SetupSpec:
    """The environments to make: the worker's always, and what else is named.

    vllm: a version; makes the environment vllm-<version>. trainer: makes the trainer's too.
    torch: a version or a requirement ("torch==2.12.0") in place of the pinned one, for the worker and the trainer.
    python: the base Python, a path or a name on the node's PATH; "" looks for one.
    wheels: a folder on the node with wheels; then no index is asked.
    pins: environment -> its requirements, in place of ours.
    """

    vllm: str = ""
    trainer: bool = False
    torch: str = ""
    python: str = ""
    wheels: str = ""
    pins: Dict[str, List[str]] = field(default_factory=dict)

    @property
    def verb(self) -> str:
        return "setup"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SetupSpec":
        """The spec of a JSON object. Raises Refusal."""
        known = [item.name for item in fields(cls)]
        for name in data:
            if name not in known:
                raise Refusal("setup: no field is called %r; the fields are %s" % (name, ", ".join(known)))
        spec = cls(**data)
        spec.check()
        return spec

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    @property
    def names(self) -> List[str]:
        """The environments that it makes, in their order."""
        return ["worker"] + (["vllm-%s" % self.vllm] if self.vllm else []) + (["trainer"] if self.trainer else [])

    def check(self) -> None:
        """Raises Refusal."""
        for name in ("vllm", "torch", "python", "wheels"):
            if not isinstance(getattr(self, name), str):
                raise Refusal("setup: %s must be a text, not %r" % (name, getattr(self, name)))
        if not isinstance(self.trainer, bool):
            raise Refusal("setup: trainer must be true or false, not %r" % (self.trainer,))
        if self.vllm and not _VERSION.match(self.vllm):
            raise Refusal("setup: vllm must be a version, as 0.26.0, not %r" % self.vllm)
        if self.torch and not (_VERSION.match(self.torch) or re.match(r"torch\b(?!-)", self.torch)):
            raise Refusal("setup: torch must be a version or a requirement, as torch==2.12.0, not %r" % self.torch)
        if not isinstance(self.pins, dict):
            raise Refusal("setup: pins must give a list of requirements for each environment, not %r" % (self.pins,))
        for name, pins in self.pins.items():
            if name not in self.names:
                raise Refusal(
                    "setup: pins names %r, which is not made here; the environments are %s"
                    % (name, ", ".join(self.names))
                )
            if not isinstance(pins, list) or not pins:
                raise Refusal("setup: the pins of %s must be a list of requirements, not %r" % (name, pins))
            for pin in pins:
                if not isinstance(pin, str) or not _REQUIREMENT.match(pin):
                    raise Refusal("setup: the pins of %s hold %r, which is no requirement" % (name, pin))
