"""The way through a ProxyJump or ProxyCommand: a process with one end of a socket pair as its stdin and stdout."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from typing import IO

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
        self._stop_read, self._stop_write = os.pipe()
        self._drain = threading.Thread(target=self._read_stderr, name="proxy stderr", daemon=True)
        self._drain.start()

    def _read_stderr(self) -> None:
        # What the proxy left behind may hold the pipe open for hours: the end of reading is told, not waited for.
        fd = self._error.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        while all(ready != self._stop_read for ready, _ in poll.poll()):
            data = os.read(fd, 4096)
            if not data:
                return
            self._stderr.add(data)

    @property
    def _error(self) -> IO[bytes]:
        assert self._process.stderr
        return self._process.stderr

    def last_line(self) -> str:
        """The last line of its stderr, waited for shortly where it is ending."""
        self._drain.join(0.5)
        return self._stderr.last_line()

    def close(self) -> None:
        self.socket.close()
        # Reaped last: until then no other process can get its number. Also what it started ends here.
        self._signal(signal.SIGTERM)
        self._drain.join(1.0)
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._stop_write)
        self._drain.join()
        os.close(self._stop_read)
        self._error.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that ended
            os.killpg(self._process.pid, number)
