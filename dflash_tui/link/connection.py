"""What the link's thread needs of a connection to a node, whatever carries it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from dflash_tui.link.errors import LinkError

STDERR_KEPT = 4096


class Connection(Protocol):
    """A byte stream to the process that becomes the agent. Only the two calls at its end may wait, for seconds at most.

    advice: what a person can do where the process ends before it says anything.
    """

    advice: str

    def read_fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when there is something to receive."""

    def write_fd(self) -> int | None:
        """The descriptor that becomes writable, or None where `send` must simply be tried again."""

    def receive(self) -> bytes | None:
        """Bytes; None where there are none now; empty at the end. Raises OSError."""

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """How many bytes were taken; 0 where none can be now. Raises OSError."""

    def last_words(self) -> str:
        """One line on why it ended: the status and the last line of stderr; "" where nothing is known."""

    def close(self) -> None:
        """Ends the connection and whatever carried it; leaves no process and no socket."""


class Cancel:
    """Lets another thread end a connect: set once, it runs what was registered, which must not block."""

    def __init__(self) -> None:
        self._closers: list[Callable[[], None]] = []
        self.is_set = False

    def on_set(self, closer: Callable[[], None]) -> None:
        self._closers.append(closer)
        if self.is_set:
            closer()

    def forget(self) -> None:
        """The connect is over: what was registered for it must not run any more."""
        self._closers.clear()

    def set(self) -> None:
        self.is_set = True
        for closer in tuple(self._closers):
            closer()


class Slots:
    """At most `count` at once on each way; a way that hangs holds up no other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._ways: dict[str, threading.BoundedSemaphore] = {}

    @contextlib.contextmanager
    def held(self, way: str, cancel: Cancel) -> Iterator[None]:
        """Waits for its turn. Raises LinkError ("closed") where `cancel` comes first."""
        with self._lock:
            slot = self._ways.setdefault(way, threading.BoundedSemaphore(self._count))
        while not slot.acquire(timeout=0.2):
            if cancel.is_set:
                raise LinkError("closed", "closed while it waited for its turn to connect")
        try:
            yield
        finally:
            slot.release()


class Stderr:
    """The last bytes of a stderr."""

    def __init__(self) -> None:
        self._kept = b""

    def add(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-STDERR_KEPT:]

    def drain(self, fd: int) -> bool:
        """Takes what a non-blocking descriptor has; False at its end."""
        while True:
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.add(data)

    def last_line(self) -> str:
        lines = [line.strip() for line in self._kept.decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""


def words(status: int | None, stderr: str) -> str:
    """The line that `last_words` gives."""
    how = "" if status is None else f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return ": ".join(part for part in (how, stderr) if part)
