"""XIDs: the faults that NVIDIA's driver reports of a card, by a number. Two sources, and either may be closed to us.

NVML's events tell of those that come while we listen, to any user. The kernel's log also holds those from before, with the
driver's own words, but on many machines only root may read it and in most containers nobody.
"""

import errno
import os
import re
import time
from typing import Any, Callable, Dict, List, Optional

from dflash_tui.node.nvmlask import TIMEOUT

XID_EVENT = 8  # nvmlEventTypeXidCriticalError, nvml.h
MOST_EVENTS = 64  # in one look: a storm of them must not keep us
NVML, KERNEL_LOG = "nvml", "kernel log"

# "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python3, Ch 00000008, …"
XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})[.0-9]*\): (\d+)(?:, ?(.*))?")
LOADED = re.compile(r"NVRM: loading NVIDIA UNIX ")
# XID 154 tells each change of what the driver wants done, the last one too: "changed from 0x1 (…) to 0x0 (None)".
RECOVERY, RECOVERED = 154, re.compile(r"\bto 0x0\b")
LONGEST_DETAIL = 160
RECORD_BYTES = 8192
SAME_S = 5.0  # both sources tell of one fault within so long

# Faults of programs. Most also follow a fault of the card, whose own XID they must not hide.
OF_PROGRAMS = frozenset((8, 13, 31, 32, 43, 45, 68, 69))
HIDES_NOTHING_S = 86400.0


def last(before: Optional[Dict[str, Any]], new: Dict[str, Any]) -> Dict[str, Any]:
    """Which of a card's XIDs is told: the newer one, unless a program's follows one of the card itself."""
    if before is None or new["code"] not in OF_PROGRAMS or before["code"] in OF_PROGRAMS:
        return new
    return before if new["time"] - before["time"] < HIDES_NOTHING_S else new


class XidEvents:
    """XIDs from NVML, without waiting. A card that cannot be listened to has no `xid_source`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._broken = False
        self._watched: Dict[Any, int] = {}
        self._heard: Dict[int, Dict[str, Any]] = {}

    def watch(self, index: int, handle: Any) -> None:
        """Listens to a card from now on; asked again for the same one it does nothing."""
        address = _address(handle)
        if self._broken or address in self._watched:
            return
        try:
            if self._events is None:
                self._events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        except (self._nvml.NVMLError, AttributeError, *self._mismatch()):
            self._broken = self._events is None
            self._watched[address] = -1
            return
        self._watched[address] = index

    def describe(self, cards: List[Dict[str, Any]]) -> None:
        """Takes what came meanwhile and adds the last XID of each card."""
        self._look()
        listened = set(self._watched.values())
        for card in cards:
            index = card["index"]
            if index in listened:
                card["xid_source"] = NVML
            if index in self._heard:
                card["xid"] = dict(self._heard[index])

    def close(self) -> None:
        if self._events is None:
            return
        try:
            self._nvml.nvmlEventSetFree(self._events)
        except (self._nvml.NVMLError, *self._mismatch()):
            pass  # NVML is being shut anyway
        self._events, self._broken = None, True

    def _look(self) -> None:
        if self._events is None:
            return
        for _ in range(MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if error.value != TIMEOUT:
                    self._broken = True
                return
            except (AttributeError, *self._mismatch()):
                self._events, self._broken = None, True
                self._watched = {}
                return
            index = self._watched.get(_address(event.device), -1)
            if event.eventType & XID_EVENT and index >= 0:
                xid = {"code": int(event.eventData), "time": time.time(), "source": NVML, "detail": None}
                self._heard[index] = last(self._heard.get(index), xid)

    def _mismatch(self) -> Any:
        kind = getattr(self._nvml, "NVMLLibraryMismatchError", None)
        return () if kind is None else (kind,)


def _address(handle: Any) -> Any:
    """NVML gives the same card the same pointer, but ctypes a new object each time."""
    try:
        import ctypes

        return ctypes.cast(handle, ctypes.c_void_p).value
    except (ImportError, TypeError, ctypes.ArgumentError):
        return handle


class KernelLog:
    """The driver's lines of the kernel's log, read on from where the last look ended."""

    def __init__(self, path: str = "/dev/kmsg", booted: Optional[Callable[[], float]] = None) -> None:
        self._path = path
        self._booted = booted if booted is not None else lambda: time.time() - time.monotonic()
        self._file: Optional[int] = None
        self._closed_to_us = False
        self._heard: Dict[str, Dict[str, Any]] = {}
        self._loaded = 0.0  # when the driver was loaded, and when a card recovered: what came before is over
        self._recovered: Dict[str, float] = {}

    def describe(self, cards: List[Dict[str, Any]]) -> None:
        """Adds the log as a source to each card whose bus id is known, and its last XID by both sources."""
        if not self._read():
            return
        for card in cards:
            bus = bus_key(card.get("pci_bus_id"))
            if bus is None:
                continue
            card["xid_source"] = KERNEL_LOG if card.get("xid_source") is None else "%s and %s" % (NVML, KERNEL_LOG)
            card["xid"] = self._told(bus, card.get("xid"))

    def _told(self, bus: str, other: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
        """A card's last XID by the log and by NVML; of the same one the log knows more."""
        over = max(self._loaded, self._recovered.get(bus, 0.0))
        if other is not None and other["time"] < over + SAME_S:
            other = None
        found = self._heard.get(bus)
        if found is None or other is None:
            return other if found is None else dict(found)
        if found["code"] == other["code"] and abs(found["time"] - other["time"]) <= SAME_S:
            return dict(found)
        older, newer = sorted((found, other), key=lambda xid: float(xid["time"]))
        return dict(last(older, newer))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> bool:
        if self._closed_to_us:
            return False
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            while True:
                try:
                    record = os.read(self._file, RECORD_BYTES)
                except BrokenPipeError:
                    continue  # records were overwritten before we read them
                if not record:
                    return True
                self._take(record.decode("utf-8", "replace"))
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno == errno.EINVAL:  # a record longer than our buffer
                return True
            self._closed_to_us = True
            self.close()
            return False

    def _take(self, record: str) -> None:
        """One or more lines "priority,number,microseconds since boot,flags;text"."""
        for line in record.splitlines():
            head = line.split(";", 1)[0].split(",")
            if len(head) < 3 or not head[2].isdigit():
                continue
            when = self._booted() + int(head[2]) / 1e6
            match = XID_LINE.search(line)
            if match is not None:
                self._hear(match, when)
            elif LOADED.search(line):
                self._loaded = when
                self._heard.clear()

    def _hear(self, match: Any, when: float) -> None:
        bus = "%04x:%s" % (int(match.group(1), 16), match.group(2).lower())
        code, detail = int(match.group(3)), (match.group(4) or "").strip()[:LONGEST_DETAIL]
        if code == RECOVERY and RECOVERED.search(detail):
            self._recovered[bus] = when
            self._heard.pop(bus, None)
            return
        xid = {"code": code, "time": when, "source": KERNEL_LOG, "detail": detail or None}
        self._heard[bus] = last(self._heard.get(bus), xid)


def bus_key(bus_id: Any) -> Optional[str]:
    """A bus id as NVML or nvidia-smi write it, without its function and with four digits of domain: "0000:3b:00"."""
    match = re.match(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})", str(bus_id or ""))
    return None if match is None else "%04x:%s" % (int(match.group(1), 16), match.group(2).lower())
