"""Joules by the cards' own counters, read while the sides run; None with a reason where they cannot be had. Loads no torch."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = "NVML total energy counter"
_EVERY_S = 0.2
_OPEN_S = 20.0
_END_S = 2.0
# Where containers of some clouds keep the library, out of the loader's sight.
_LIBRARY = "libnvidia-ml.so.1"
_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib64-nvidia", "/usr/lib/wsl/lib")


@dataclass(frozen=True, slots=True)
class Energy:
    """joules, or None and `note`: why not."""

    joules: float | None
    note: str = ""


@dataclass(slots=True)
class _Card:
    index: int | None = None
    name: str | None = None
    note: str = ""
    readings: list[tuple[float, float]] = field(default_factory=list)


class Meter:
    """Reads the counters in a thread of its own: a driver that hangs must hold up no comparison.

    gpus: UUIDs. nvml: `pynvml` or something that answers like it; None imports it.
    """

    def __init__(self, gpus: Sequence[str], nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cards = {uuid: _Card() for uuid in gpus}
        self._nvml = nvml
        self._clock = clock
        self._note = "the driver has not answered"
        self._opened = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="energy")

    def __enter__(self) -> Meter:
        if self._cards:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._cards:
            self._thread.join(_END_S)

    def gpus(self) -> list[dict[str, Any]]:
        """The cards as {index, uuid, name}, the first two null where the driver does not say."""
        if self._cards:
            self._opened.wait(_OPEN_S)
        return [{"index": card.index, "uuid": uuid, "name": card.name} for uuid, card in self._cards.items()]

    def used(self, gpus: Sequence[str], begin: float, end: float) -> Energy:
        """What these cards used between two moments of the monotonic clock."""
        if not gpus:
            return Energy(None, "no GPU was chosen, and a CPU has no counter of energy that every user may read")
        total = 0.0
        for uuid in gpus:
            card = self._cards[uuid]
            readings = card.readings[:]
            if card.note or len(readings) < 2 or readings[0][0] > begin or readings[-1][0] < end:
                return Energy(None, card.note or self._note or "the cards did not answer all the time")
            times, values = (np.array(column) for column in zip(*readings, strict=True))
            if (np.diff(values) < 0).any():
                return Energy(None, f"the energy counter of GPU {uuid} went back: the driver was loaded anew")
            first, last = np.interp([begin, end], times, values)
            total += float(last - first)
        return Energy(total)

    def _run(self) -> None:
        try:
            nvml = self._open()
        except ImportError as error:
            self._note = f"pynvml cannot be imported: {error}"
        except Exception as error:  # pynvml's own errors, known only once it is there
            self._note = f"NVML: {error}"
        else:
            self._note = ""
            self._opened.set()
            self._read(nvml)
        finally:
            self._opened.set()

    def _open(self) -> Any:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            for folder in _FOLDERS:
                if Path(folder, _LIBRARY).exists():
                    ctypes.CDLL(f"{folder}/{_LIBRARY}")
                    break
            nvml.nvmlInit()
        self._known(nvml)
        return nvml

    def _known(self, nvml: Any) -> None:
        """Index and name of the cards, found by going through all: a bus order that the UUIDs do not tell."""
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                card = self._cards.get(_text(nvml.nvmlDeviceGetUUID(handle)))
                if card is not None:
                    card.index, card.name = index, _text(nvml.nvmlDeviceGetName(handle))
            except nvml.NVMLError:
                continue  # a lost card: another one's names are still wanted

    def _read(self, nvml: Any) -> None:
        while True:
            for uuid, card in self._cards.items():
                if card.note:
                    continue
                try:
                    # The index may name another card once one is lost; the counter is asked by what the card is.
                    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                    millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                except nvml.NVMLError as error:
                    card.note = f"GPU {uuid} tells no energy: {error}"
                else:
                    card.readings.append((self._clock(), millijoules / 1000))
            if self._stop.wait(_EVERY_S):
                return


def _text(value: Any) -> str:
    """Old pynvml gives bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
