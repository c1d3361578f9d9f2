"""Whether an ended job gave the memory of its GPUs back, and who has it where it did not.

Only cards that were read after the end prove anything. A line of the metrics does not say when its cards were read, and
beside a slow driver they may be old; so a reader is started anew for a job that has just ended: all it says is younger.
"""

import os
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from dflash_tui.node import owners, processes

TOLERANCE_BYTES = 64 << 20
KEPT_S = 3600.0
# Cards in a line without an error were asked for at most metrics.OVERDUE_S before it, after a reading as slow as that.
LAG_S = 25.0
# A dead process' memory comes back when the driver has taken its context apart.
SETTLE_S = 3.0
ASK_EVERY_S = 3.0
SCAN_EVERY_S = 3.0
OUTSIDE = "held by a process outside this container"
_NAMED = 8
_DRIVER_CARDS = "/proc/driver/nvidia/gpus"

Entry = Dict[str, Any]
Record = Dict[str, Any]


class GpuMemory:
    """Compares readings of the cards with what was in use before a job. `state`: the folder that holds `jobs/`."""

    def __init__(self, state: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._owners = owners.Owners(state)
        self._clock = clock
        self._readings: Dict[bool, Tuple[float, Dict[str, Any]]] = {}
        self._problem = ""
        self._wanted = False
        self._ask_at = clock()
        self._scan_at = clock()
        self._scanned: List[Tuple[processes.Stat, Set[str]]] = []

    def take(self, reading: Dict[str, Any], asked: Optional[float] = None) -> None:
        """A reading of the metrics; `asked`: when the reader was started, where it was started for this one."""
        moment = reading.get("time")
        if reading.get("gpu_error") or not reading.get("gpus") or not isinstance(moment, (int, float)):
            if asked is not None:
                self._problem = str(reading.get("gpu_error") or "")
            return
        self._readings[asked is None] = (moment - LAG_S if asked is None else asked, reading)

    def wants_reading(self) -> bool:
        """Whether a reader should be started now; True at most once in `ASK_EVERY_S`."""
        if not self._wanted or self._clock() < self._ask_at:
            return False
        self._wanted = False
        self._ask_at = self._clock() + ASK_EVERY_S
        return True

    def entries(self, record: Record, written: float, uses: Callable[[str, str], bool]) -> List[Entry]:
        """`gpu_memory` of an ended job's record, as `protocol` describes it.

        written: when the end was written down, which is never before it. uses: whether a job (id) has a card (UUID).
        """
        since = max(record.get("ended") or 0.0, written)
        good = [kept for kept in self._readings.values() if kept[0] >= since]
        read_after, reading = max(good, key=lambda kept: kept[0]) if good else (0.0, None)
        settled = read_after >= since + SETTLE_S
        found = [self._entry(record, gpu, reading, settled, uses) for gpu in record.get("gpus") or ()]
        stream = self._readings.get(True)
        if any(entry["freed"] is not True for entry in found) and (stream is None or stream[0] < since + SETTLE_S):
            self._wanted = True
        return found

    def _entry(
        self,
        record: Record,
        gpu: Dict[str, Any],
        reading: Optional[Dict[str, Any]],
        settled: bool,
        uses: Callable[[str, str], bool],
    ) -> Entry:
        baseline = gpu.get("baseline_bytes")
        entry: Entry = {
            "uuid": gpu.get("uuid"),
            "index": gpu.get("index"),
            "used_bytes": None,
            "baseline_bytes": baseline,
            "freed": None,
            "holders": [],
            "note": "",
        }
        if reading is None:
            entry["note"] = self._problem or "no reading since the end yet"
            return entry
        card = _card_of(reading, gpu)
        used = card.get("memory_used_bytes") if card else None
        if card is None or used is None:
            entry["note"] = "the driver does not say how much of it is in use"
            if card is None:
                entry["note"] = "the node does not show this card any more"
            elif card.get("error"):
                entry["note"] = "the card cannot be read: %s" % card["error"]
            return entry
        entry["used_bytes"] = used
        strays = record.get("strays") or []
        if baseline is None and not strays:
            entry["note"] = "what was in use before the job is not known"
            return entry
        if baseline is not None and used <= baseline + TOLERANCE_BYTES:
            entry["freed"] = not strays
            entry["note"] = _live_on(strays)
            return entry
        return self._held(entry, record, card, settled, uses)

    def _held(
        self, entry: Entry, record: Record, card: Dict[str, Any], settled: bool, uses: Callable[[str, str], bool]
    ) -> Entry:
        job = record.get("job")
        shown = [process for process in card.get("processes") or () if process.get("command") or process.get("user")]
        alive = [process for process in shown if _lives(process["pid"])]
        holders = [
            {
                "pid": process["pid"],
                "command": process.get("command"),
                "bytes": process.get("memory_bytes"),
                "job": process.get("job"),
            }
            for process in alive
        ]
        if shown and not alive:
            entry["note"] = "process %d has just ended; the next reading tells" % shown[0]["pid"]
            return entry
        strays = record.get("strays") or []
        holders = holders or self._with_device_open(str(entry["uuid"]), uses)
        if not holders and not strays and not settled:
            entry["note"] = "the driver is still giving it back"
            return entry
        # What is the job's own first, then whoever has most.
        holders.sort(key=lambda holder: (holder["job"] != job, -(holder["bytes"] or 0)))
        entry.update(freed=False, holders=holders[:_NAMED])
        if not holders:
            entry["note"] = _live_on(strays) or OUTSIDE
        return entry

    def _with_device_open(self, uuid: str, uses: Callable[[str, str], bool]) -> List[Dict[str, Any]]:
        """Processes that compute on a card and may do so on this one, where the driver names none that we see."""
        if self._clock() >= self._scan_at:
            self._scan_at = self._clock() + SCAN_EVERY_S
            self._scanned = computing()
        device = device_of(uuid)
        found = []
        for stat, devices in self._scanned:
            if not processes.alive(stat.identity) or (device is not None and device not in devices):
                continue
            job = self._owners.job_of(stat.pid)
            if job is None or uses(job, uuid):
                found.append({"pid": stat.pid, "command": processes.command(stat.pid), "bytes": None, "job": job})
        return found


def undecided(record: Record) -> bool:
    """Whether what the record says of its GPUs' memory may still change."""
    return any(entry["freed"] is not True for entry in record.get("gpu_memory") or ())


def computing() -> List[Tuple[processes.Stat, Set[str]]]:
    """Living processes with a device of GPU computing open, and the GPU devices that each has open.

    Whoever only reads the cards, as we do, opens them too, but not the device of unified memory.
    """
    found = []
    for stat in processes.snapshot().values():
        devices = owners.open_devices(stat.pid)
        if devices and any(device.startswith(owners.COMPUTE) for device in devices):
            found.append((stat, devices))
    return found


def device_of(uuid: str) -> Optional[str]:
    """The device file of the card, or None where the kernel's driver does not tell."""
    try:
        names = os.listdir(_DRIVER_CARDS)
    except OSError:
        return None
    for name in names:
        try:
            with open(os.path.join(_DRIVER_CARDS, name, "information"), encoding="utf-8", errors="replace") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:
            continue
        minor = fields.get("Device Minor", "").strip()
        if fields.get("GPU UUID", "").strip().lower() == uuid.lower() and minor.isdigit():
            return owners.DEVICES[0] + minor
    return None


def _card_of(reading: Dict[str, Any], gpu: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    cards = reading.get("gpus") or []
    for card in cards:
        if card.get("uuid") and card["uuid"] == gpu.get("uuid"):
            return dict(card)
    for card in cards:
        # A lost card may have no UUID any more.
        if not card.get("uuid") and card.get("index") == gpu.get("index"):
            return dict(card)
    return None


def _lives(pid: int) -> bool:
    found = processes.stat_of(pid)
    return found is not None and not found.dead


def _live_on(strays: List[Any]) -> str:
    if not strays:
        return ""
    return "1 of its processes lives on" if len(strays) == 1 else "%d of its processes live on" % len(strays)
