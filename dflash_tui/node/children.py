"""Programs that the agent runs beside its loop: short ones to their end, and the reader of metrics for ever."""

import functools
import json
import os
import selectors
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from dflash_tui.node.loop import Loop

_POLL_S = 0.05
_KEPT_OUTPUT = 4 << 20


class Ended(NamedTuple):
    """How a program ended. code: None where it ran into its time limit."""

    code: Optional[int]
    output: bytes
    errors: bytes


class Program:
    """A program with input, its output kept, and a time limit; `done` is called once. Raises OSError at the start."""

    def __init__(
        self,
        loop: Loop,
        argv: List[str],
        done: Callable[[Ended], None],
        timeout_s: float,
        data: bytes = b"",
        env: Optional[Dict[str, str]] = None,
        pass_fds: Any = (),
    ) -> None:
        self._loop = loop
        self._done: Optional[Callable[[Ended], None]] = done
        self._kept: Dict[int, bytearray] = {}
        self._deadline = time.monotonic() + timeout_s
        self._data = memoryview(data)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input = self._process.stdin.fileno()
        self._output = self._process.stdout.fileno()
        self._errors = self._process.stderr.fileno()
        for fd in (self._output, self._errors):
            os.set_blocking(fd, False)
            self._kept[fd] = bytearray()
            loop.watch(fd, selectors.EVENT_READ, functools.partial(self._read, fd))
        os.set_blocking(self._input, False)
        loop.watch(self._input, selectors.EVENT_WRITE, self._feed)
        self._timer = loop.later(_POLL_S, self._poll)

    def running(self) -> bool:
        return self._done is not None

    def lives(self) -> bool:
        """Whether the process is there, maybe killed and not dead yet."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the program and everything of its session; `done` is not called any more."""
        self._done = None
        if self._process.poll() is None:
            self._kill_group()

    def _feed(self) -> None:
        try:
            if self._data:
                self._data = self._data[os.write(self._input, self._data) :]
        except BlockingIOError:
            return
        except OSError:
            self._data = memoryview(b"")
        if not self._data:
            self._loop.unwatch(self._input)
            if self._process.stdin:
                self._process.stdin.close()

    def _read(self, fd: int) -> bool:
        """Takes what is there; False at the end."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if not data:
            self._loop.unwatch(fd)
            return False
        kept = self._kept[fd]
        kept += data
        del kept[: max(len(kept) - _KEPT_OUTPUT, 0)]
        return True

    def _poll(self) -> None:
        late = time.monotonic() >= self._deadline
        if self._process.poll() is None and not late:
            self._timer = self._loop.later(_POLL_S, self._poll)
            return
        code = self._process.poll()
        if code is None:
            self._kill_group()
        else:
            self._rest(self._output)
            self._rest(self._errors)
        self._close()
        if self._done is not None:
            done, self._done = self._done, None
            done(Ended(code, bytes(self._kept[self._output]), bytes(self._kept[self._errors])))

    def _rest(self, fd: int) -> None:
        # What the program wrote before it ended; a process that it left behind may keep the pipe open.
        while True:
            before = len(self._kept[fd])
            if not self._read(fd) or len(self._kept[fd]) in (before, _KEPT_OUTPUT):
                return

    def _kill_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _close(self) -> None:
        for fd, stream in (
            (self._input, self._process.stdin),
            (self._output, self._process.stdout),
            (self._errors, self._process.stderr),
        ):
            if stream is not None and not stream.closed:
                self._loop.unwatch(fd)
                try:
                    stream.close()
                except OSError:
                    continue


class MetricsChild:
    """The process that reads the metrics, so that a driver that hangs hangs that and not the beats.

    reading: the last one, None before the first. received: when it came (monotonic). on_reading: called at each.
    """

    STALE_AFTER_S = 3.0
    REPLACE_AFTER_S = 30.0

    def __init__(self, loop: Loop, argv: List[str], on_reading: Callable[[], None]) -> None:
        self._loop = loop
        self._argv = argv
        self._on_reading = on_reading
        self._process: Optional["subprocess.Popen[bytes]"] = None
        self._abandoned: List["subprocess.Popen[bytes]"] = []
        self._buffer = bytearray()
        self._restart_at = 0.0
        self._pause = 1.0
        self.reading: Optional[Dict[str, Any]] = None
        self.received = time.monotonic()
        self._heard = self.received
        self.problem = "the first reading is on its way"

    def age(self) -> float:
        """Seconds since the last reading came, or since the start where none did."""
        return time.monotonic() - self.received

    def stale(self) -> bool:
        return self.reading is None or self.age() > self.STALE_AFTER_S

    def tick(self) -> None:
        """Starts, replaces and reaps; once a second."""
        now = time.monotonic()
        self._abandoned = [process for process in self._abandoned if process.poll() is None]
        if self._process is None:
            if now >= self._restart_at:
                self._start()
            return
        if self._process.poll() is not None:
            self.problem = "the reader of metrics ended with status %s and is started again" % self._process.returncode
            self._drop()
        elif now - self._heard > self.REPLACE_AFTER_S:
            self.problem = "the reader of metrics hangs (does the driver answer?) and is started again"
            self._process.kill()
            self._drop()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._drop()

    def _start(self) -> None:
        self._heard = time.monotonic()
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            self.problem = "the reader of metrics cannot be started: %s" % error
            self._wait()
            return
        assert self._process.stdout
        fd = self._process.stdout.fileno()
        os.set_blocking(fd, False)
        self._buffer.clear()
        self._loop.watch(fd, selectors.EVENT_READ, self._read)

    def _drop(self) -> None:
        assert self._process is not None and self._process.stdout
        self._loop.unwatch(self._process.stdout.fileno())
        self._process.stdout.close()
        # A process that hangs in the driver cannot be killed: it is never waited for.
        self._abandoned.append(self._process)
        self._process = None
        self._wait()

    def _wait(self) -> None:
        self._restart_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, 30.0)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout
        fd = self._process.stdout.fileno()
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(fd)
            return
        self._buffer += data
        end = self._buffer.rfind(b"\n") + 1
        lines = bytes(self._buffer[:end]).splitlines()
        del self._buffer[: max(end, len(self._buffer) - _KEPT_OUTPUT)]
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            reading = json.loads(line.decode("utf-8"))
        except ValueError:
            return
        if isinstance(reading, dict):
            self.reading = reading
            self.received = self._heard = time.monotonic()
            self._pause = 1.0
            self._on_reading()
