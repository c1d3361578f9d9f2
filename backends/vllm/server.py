"""The process of one vLLM server: started in an empty folder and a session of its own, ended with all that it started."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.vllm.command import HOST
from backends.vllm.filing import TEMPORARY, TEMPORARY_PREFIX, drop_temporary
from backends.vllm.session import end_session

# Beside what a server writes: the empty folder that it is started in, by which its processes are found.
START_IN = "empty"
CANNOT_BE_KILLED = "processes of the vLLM server {} cannot be killed"


def free_port() -> int:
    """A port of this machine's own address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_taken(port: int) -> bool:
    """Whether somebody holds a port."""
    with socket.socket() as probe:
        # As servers do: a port whose old connections still fade is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


class Server:
    """A server of ours. folder: an empty one, for `python -m` sees the modules of the folder that it is started in.

    It never removes its sockets and other temporary files: they get a folder of their own, with a short name, for a socket's
    path has but 107 bytes. A link beside `folder` leads there (`TEMPORARY`), so that whoever sweeps finds it.

    Its output goes straight to this process's stderr, which is the job's log: by that file's inode it is found should all of
    ours be killed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            cwd=folder,
            env={**environment, "TMPDIR": str(_temporary(folder.parent / TEMPORARY))},
            start_new_session=True,
        )
        self.pid = self._process.pid

    def status(self) -> int | None:
        """Exit status, -signal for a killed one, None while it runs. It stays a zombie, so that its session's id stays its own."""
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def end(self, *, grace_s: float) -> bool:
        """Ends the server and its whole session. Whether nothing of it is left."""
        gone = end_session(self.pid, grace_s=grace_s)
        if gone:
            self._process.wait()
        return gone


def _temporary(link: Path) -> Path:
    drop_temporary(link)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
    try:
        link.symlink_to(folder)
    except OSError:  # a disk without links
        folder.rmdir()
        raise
    return folder


def how_ended(status: int) -> str:
    """A status in words."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
