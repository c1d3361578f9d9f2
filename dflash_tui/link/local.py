"""The node that the console itself runs on: the same script, agent and protocol over pipes, without SSH."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from dflash_tui.link.connection import Stderr, words
from dflash_tui.link.errors import LinkError

_END_S = 3.0


class LocalConnection:
    """`script` run by /bin/sh in a session of its own, so that ctrl+c on the console's terminal does not reach it."""

    advice = "run the console with another Python, or look at ~/.cache/dflash-tui"

    def __init__(self, script: str) -> None:
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LinkError("bootstrap-failed", f"/bin/sh cannot be started: {error}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = (
            stream.fileno() for stream in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        self._stderr = Stderr()
        self._stderr_open = True

    def read_fds(self) -> tuple[int, ...]:
        return (self._out, self._err) if self._stderr_open else (self._out,)

    def write_fd(self) -> int | None:
        return self._in

    def receive(self) -> bytes | None:
        if self._stderr_open:
            self._stderr_open = self._stderr.drain(self._err)
        try:
            return os.read(self._out, 65536)
        except BlockingIOError:
            return None

    def send(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return os.write(self._in, data)
        except BlockingIOError:
            return 0

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        self._stderr.drain(self._err)
        return words(self._process.returncode, self._stderr.last_line())

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._process.stdin.close()
        # The agent ends when its stdin does; its pipe must not be full meanwhile.
        deadline = time.monotonic() + _END_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.receive()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.02)
        if self._process.poll() is None:
            # Jobs have sessions of their own: this reaches the agent and its reader only.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
