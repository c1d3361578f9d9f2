"""Frames on their way out: answers and beats before metrics and jobs, and those before the bytes of files."""

import collections
import os
import selectors
import time
from typing import Callable, Deque, Dict, Optional

from dflash_tui.node import protocol
from dflash_tui.node.loop import Loop

URGENT, STATUS, BULK = 0, 1, 2
# So many frames of bulk may wait here; the rest waits in its file.
_BULK_WAITING = 2
# A console that took nothing for so long is gone, though its connection may not know it.
_STALLED_S = 120.0


class Outgoing:
    """Writes to a descriptor that does not block; only what is being written cannot be overtaken.

    on_broken: called once when nobody reads any more. on_empty: called some time after all was written.
    """

    def __init__(self, loop: Loop, fd: int, on_broken: Callable[[], None], on_empty: Callable[[], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._on_broken = on_broken
        self._on_empty = on_empty
        self._told_empty = True
        self._waiting: Dict[int, Deque[bytes]] = {rank: collections.deque() for rank in (URGENT, STATUS, BULK)}
        self._current: Optional[memoryview] = None
        self._progress = time.monotonic()
        self._broken = False
        os.set_blocking(fd, False)

    def send(self, header: protocol.Header, payload: bytes = b"", rank: int = URGENT) -> None:
        if not self._broken:
            self._waiting[rank].append(protocol.encode(header, payload))
            self._write()

    def raw(self, data: bytes) -> None:
        """Bytes that are no frame, ahead of all frames."""
        self._waiting[URGENT].append(data)
        self._write()

    def idle(self, rank: int) -> bool:
        """Whether nothing of this rank waits: then a newer reading need not queue behind an older one."""
        return not self._waiting[rank] and not self._broken

    def room_for_bulk(self) -> bool:
        return len(self._waiting[BULK]) < _BULK_WAITING and not self._broken

    def check_stalled(self) -> None:
        """Gives up where the other side has taken nothing for long."""
        if self._current is not None and time.monotonic() - self._progress > _STALLED_S:
            self._break()

    def _write(self) -> None:
        while not self._broken:
            if self._current is None:
                rank = next((rank for rank in (URGENT, STATUS, BULK) if self._waiting[rank]), None)
                if rank is None:
                    self._loop.unwatch(self._fd)
                    self._tell_empty()
                    return
                self._told_empty = False
                self._current = memoryview(self._waiting[rank].popleft())
                self._progress = time.monotonic()
            try:
                written = os.write(self._fd, self._current)
            except BlockingIOError:
                self._loop.watch(self._fd, selectors.EVENT_WRITE, self._write)
                return
            except OSError:
                self._break()
                return
            self._progress = time.monotonic()
            self._current = self._current[written:] if written < len(self._current) else None

    def _tell_empty(self) -> None:
        # Later, for whoever is told sends again, from within a send.
        if not self._told_empty:
            self._told_empty = True
            self._loop.later(0.0, self._on_empty)

    def _break(self) -> None:
        self._broken = True
        self._loop.unwatch(self._fd)
        self._on_broken()
