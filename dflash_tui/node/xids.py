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
LONGEST_DETAIL = 160
RECORD_BYTES = 8192


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
                self._heard[index] = {"code": int(event.eventData), "time": time.time(), "source": NVML, "detail": None}

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

    def describe(self, cards: List[Dict[str, Any]]) -> None:
        """Adds the log as a source to each card whose bus id is known, and its last XID where it is the newer one."""
        if not self._read():
            return
        for card in cards:
            bus = bus_key(card.get("pci_bus_id"))
            if bus is None:
                continue
            card["xid_source"] = KERNEL_LOG if card.get("xid_source") is None else "%s and %s" % (NVML, KERNEL_LOG)
            found, other = self._heard.get(bus), card.get("xid")
            # Of the same one the log knows more.
            if found is not None and (other is None or found["time"] >= other["time"] - 5.0):
                card["xid"] = dict(found)

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
            match = XID_LINE.search(line)
            head = line.split(";", 1)[0].split(",")
            if match is None or len(head) < 3 or not head[2].isdigit():
                continue
            detail = (match.group(4) or "").strip()[:LONGEST_DETAIL]
            self._heard["%04x:%s" % (int(match.group(1), 16), match.group(2).lower())] = {
                "code": int(match.group(3)),
                "time": self._booted() + int(head[2]) / 1e6,
                "source": KERNEL_LOG,
                "detail": detail or None,
            }


def bus_key(bus_id: Any) -> Optional[str]:
    """A bus id as NVML or nvidia-smi write it, without its function and with four digits of domain: "0000:3b:00"."""
    match = re.match(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})", str(bus_id or ""))
    return None if match is None else "%04x:%s" % (int(match.group(1), 16), match.group(2).lower())
