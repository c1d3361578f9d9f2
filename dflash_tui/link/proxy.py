"""The way through a ProxyJump or ProxyCommand: a process with one end of a socket pair as its stdin and stdout."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading

from dflash_tui.link.connection import Stderr
from dflash_tui.link.errors import LinkError


class Proxy:
    """Runs `command`; `socket` is the other end. Raises LinkError ("proxy-failed")."""

    def __init__(self, command: list[str]) -> None:
        self.socket, theirs = socket.socketpair()
        self._stderr = Stderr()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            raise LinkError("proxy-failed", f"{command[0]} cannot be started: {error}", "install it") from error
        finally:
            theirs.close()
        self._drain = threading.Thread(target=self._read_stderr, name="proxy stderr", daemon=True)
        self._drain.start()

    def _read_stderr(self) -> None:
        assert self._process.stderr
        with contextlib.suppress(OSError):
            while data := os.read(self._process.stderr.fileno(), 4096):
                self._stderr.add(data)

    def last_line(self) -> str:
        """The last line of its stderr, waited for shortly where it is ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        return self._stderr.last_line()

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._drain.join(1.0)
        assert self._process.stderr
        self._process.stderr.close()
