"""From the fields of the launch form to what is asked of a node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.hubname import SCHEME, dataset_name, model_name
from backends.spec import SPECS, SpecError
from dflash_tui.app.fields import BESIDE, WITH_GPUS, fields_of
from dflash_tui.config import LOCAL
from dflash_tui.node.protocol import Launch

PATHS = ("dataset", "output", "reference")
NUMBERS = (
    *("first", "last", "max_tokens", "limit", "recompute", "samples"),
    *("tensor_parallel", "concurrency"),
)


@dataclass(frozen=True, slots=True)
class Order:
    """What the form asks for; two orders are equal where a plan for one is a plan for the other."""

    host: str
    verb: str
    spec: Mapping[str, Any]
    python: str = ""
    gpus: tuple[str, ...] = ()
    share: bool = False
    name: str = field(default="", compare=False)

    @property
    def launch(self) -> Launch:
        return Launch(self.name, self.verb, self.python, dict(self.spec), self.gpus, self.share)


def make_order(
    host: str, verb: str, texts: Mapping[str, str], *, gpus: tuple[str, ...] = (), share: bool = False
) -> Order:
    """The order of what was typed; `texts` by the names of `fields_of`, and "name" and "python". Raises SpecError.

    A field of another verb or backend may be among them: it is passed over.
    """
    data: dict[str, Any] = {}
    for name in fields_of(verb, texts.get("backend", "")):
        text = texts.get(name, "").strip()
        if not text:
            continue
        if name in NUMBERS:
            data[name] = _whole(verb, name, text)
        elif name == "model":
            data[name] = _model(verb, text, host)
        elif name in PATHS:
            data[name] = _path(verb, name, text, host)
        elif name == "inputs":
            parts = _parts(verb, name, text)
            data[name] = tuple(part if dataset_name(part) else _path(verb, name, part, host) for part in parts)
        elif name == "vllm_python":
            # A bare name is looked for on the node's PATH.
            data[name] = _path(verb, name, text, host) if "/" in text and host == LOCAL else text
        elif name == "extra_args":
            data[name] = tuple(_parts(verb, name, text))
        elif name == "together":
            data[name] = text == BESIDE[1]
        elif name == "layers":
            data[name] = _layers(verb, text)
        else:
            data[name] = text
    spec = SPECS[verb].from_json(data).to_json()
    taken = gpus if verb in WITH_GPUS else ()
    title = texts.get("name", "").strip() or Path(str(data.get("output") or verb)).name
    return Order(host, verb, spec, texts.get("python", "").strip(), taken, share and bool(taken), title)


def _whole(verb: str, name: str, text: str) -> int:
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise SpecError(f"{verb}: {name} must be a whole number, not {text!r}") from None


def model_on(host: str, text: str) -> str:
    """A model that is asked about, as the node must see it. Raises SpecError."""
    return _model("doctor", text, host)


def _model(verb: str, text: str, host: str) -> str:
    """A folder, or a name on the hub; on this machine a folder that is there wins."""
    if model_name(text) is None or (host == LOCAL and not text.startswith(SCHEME) and Path(text).exists()):
        return _path(verb, "model", text, host)
    return text


def _path(verb: str, name: str, text: str, host: str) -> str:
    if text.startswith("/"):
        return text
    if host == LOCAL:
        return str(Path(os.path.expanduser(text)).absolute())
    raise SpecError(f"{verb}: {name} must be an absolute path on {host}, not {text!r}; begin it with /")


def _parts(verb: str, name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        what = "quote what has blanks in it" if name == "extra_args" else "quote names with blanks"
        raise SpecError(f"{verb}: {name} {text!r} cannot be read: {error}; {what}") from None


def _layers(verb: str, text: str) -> str | tuple[int, ...]:
    """A preset, or ids with commas or blanks between them."""
    parts = text.replace(",", " ").split()
    if all(part.isdecimal() for part in parts):
        return tuple(int(part) for part in parts)
    return text
