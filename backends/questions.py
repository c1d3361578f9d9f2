"""What a node is asked that starts nothing: the specs of questions, answered as plans are (`backends plan -`). Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from backends.spec import DEVICES, DTYPES, Spec, SpecError, need_one_of, need_text, need_whole


@dataclass(frozen=True, slots=True)
class CapabilitiesSpec(Spec):
    """What the backends of this node can do with a model: hf, and every vLLM that is found.

    model: folder, or name on the hub; only its config.json is read.
    dtype, tensor_parallel, device: as of an extraction. device "auto": the GPUs where there are any.
    gpus: indices in the order of the bus, or UUIDs; empty means all.
    vllm_pythons: Pythons with a vLLM, beside the environments of setup and this Python.
    """

    verb: ClassVar[str] = "capabilities"

    model: str
    dtype: str = "bfloat16"
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    tensor_parallel: int = 1
    vllm_pythons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_text(self, "model")
        need_one_of(self, "dtype", DTYPES)
        need_one_of(self, "device", DEVICES)
        need_whole(self, "tensor_parallel", 1)
        for name in ("gpus", "vllm_pythons"):
            values: Any = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
                raise SpecError(f"capabilities: {name} must be a list of texts that are not empty, not {values!r}")
        if self.device == "cpu" and self.gpus:
            raise SpecError("capabilities: device is cpu but GPUs were chosen; leave one of the two out")


@dataclass(frozen=True, slots=True)
class VllmOptionsSpec(Spec):
    """The options that a `vllm serve` of this node accepts, as it says itself.

    vllm_python: as of an extraction. words: only options whose name or help has all of these words, in any case of letters.
    limit_s: how long it may take: it imports vLLM.
    """

    verb: ClassVar[str] = "vllm-options"

    vllm_python: str = ""
    words: tuple[str, ...] = ()
    limit_s: int = 300

    def __post_init__(self) -> None:
        if not isinstance(self.vllm_python, str):
            raise SpecError(f"vllm-options: vllm_python must be a text, not {self.vllm_python!r}")
        words: Any = self.words
        if not isinstance(words, tuple) or not all(isinstance(word, str) and word for word in words):
            raise SpecError(f"vllm-options: words must be a list of texts that are not empty, not {words!r}")
        need_whole(self, "limit_s", 1)


QUESTIONS: dict[str, type[Spec]] = {spec.verb: spec for spec in (CapabilitiesSpec, VllmOptionsSpec)}
