"""Answers as `pynvml` does, from a recording that `tests/gpu/record.py` made on a real card.

Constants, error classes and the shapes of answers are those of the real `pynvml`; only the driver's part is replayed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

FOLDER = Path(__file__).resolve().parent
RECORDING = FOLDER.parent / "data" / "gpu" / "h200.json"
SMI = FOLDER / "nvidia-smi"


def recording() -> dict[str, Any]:
    return json.loads(RECORDING.read_text(encoding="utf-8"))


class ReplayedNvml:
    """The module object for `dflash_tui.node.nvml.Nvml`.

    cards: how many; the first recorded card stands for each, with a UUID of its own.
    errors: (card, name of a function or "*") -> NVML error code that it raises instead.
    processes: (card, function) -> what is answered instead of the recorded list, as dicts of its fields.
    `asked` lists every call by its name in the recording; a call that was not recorded raises KeyError.
    """

    def __init__(
        self,
        phase: str = "busy",
        cards: int = 1,
        errors: dict[tuple[int, str], int] | None = None,
        processes: dict[tuple[int, str], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._answers = recording()["phases"][phase]["nvml"]["devices"][0]
        self._cards = cards
        self.errors = errors or {}
        self._processes = processes or {}
        self.init_error: int | None = None
        self.count_error: int | None = None
        self.asked: list[str] = []
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.count_error is not None:
            raise pynvml.NVMLError(self.count_error)
        return self._cards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._raise(index, "nvmlDeviceGetHandleByIndex")
        return index

    def _raise(self, card: int, name: str) -> None:
        code = self.errors.get((card, name), self.errors.get((card, "*")))
        if code is not None:
            raise pynvml.NVMLError(code)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            return getattr(pynvml, name)
        return self._function(name)

    def _function(self, name: str) -> Callable[..., Any]:
        def call(card: int, *arguments: Any) -> Any:
            key = f"{name}({', '.join(map(str, arguments))})"
            self.asked.append(key)
            self._raise(card, name)
            if (card, name) in self._processes:
                return [SimpleNamespace(**fields) for fields in self._processes[card, name]]
            answer = self._answers[key]
            if "error" in answer:
                raise pynvml.NVMLError(answer["error"])
            if name == "nvmlDeviceGetUUID":
                return f"GPU-00000000-0000-4000-8000-{card:012d}"
            return _object(answer["value"])

        return call


def _object(value: Any) -> Any:
    if isinstance(value, list):
        return [_object(item) for item in value]
    return SimpleNamespace(**value) if isinstance(value, dict) else value
