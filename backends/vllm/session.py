"""The processes of one session, found in /proc: a server's engine and workers outlive a server that was killed. Linux alone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_S = 0.02
# So long the rest of a session may take to go by itself once its first process is gone.
_REST_S = 3.0
# Python's resource tracker removes shared memory that killed processes left, and then ends by itself; if it does not, it is ended.
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_S = 10.0
# What the kernel needs at most to take a killed process off a device.
_KILL_S = 60.0


def members(session: int) -> list[int]:
    """Process ids that live in a session; a zombie does not."""
    found = []
    for folder in Path("/proc").glob("[1-9]*"):
        try:
            state, _, _, its, *_ = stat_of(int(folder.name))
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if int(its) == session and state not in b"ZX":
            found.append(int(folder.name))
    return found


def stat_of(pid: int) -> list[bytes]:
    """The fields of a process's /proc/PID/stat after its name, which may hold anything: state, parent, group, session, ...

    Raises OSError.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def end_session(session: int, *, grace_s: float) -> bool:
    """SIGTERM to the session's first process, SIGKILL to all that is left after `grace_s`. Whether nothing is left.

    Resource trackers come last: hundreds of megabytes in /dev/shm would outlive a server whose tracker was killed with it.
    A session's id is its own while its first process was not waited for, or while one of it is known to live (`sessions_in`).
    """
    if not members(session):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(session, signal.SIGTERM)
    _until_gone(session, grace_s, first=True)
    _until_gone(session, min(_REST_S, grace_s))
    began = time.monotonic()
    # A process may start another one between the look and the signal.
    while left := members(session):
        elapsed = time.monotonic() - began
        for pid in left:
            if elapsed < _TRACKER_S and is_tracker(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if elapsed > _KILL_S:
            return False
        time.sleep(_POLL_S)
    return True


def sessions_in(folder: Path, known: int = 0) -> set[int]:
    """The sessions of servers that were started in a folder of ours, whoever started them, by a process of theirs that is there.

    known: the session that was told. Its number alone is not trusted, for it may be another's by now; nor is one that only is in
    that folder (a shell): it is a server's that names what is beside it in its command line.
    """
    found = set()
    real = os.path.realpath(folder)
    beside = os.fsencode(folder.parent)
    for process in Path("/proc").glob("[1-9]*"):
        try:
            if str((process / "cwd").readlink()).removesuffix(" (deleted)") != real:
                continue
            session = os.getsid(int(process.name))
            if session == known or beside in (process / "cmdline").read_bytes():
                found.add(session)
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found - {os.getsid(0)}


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker of Python's."""
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return False


def _until_gone(session: int, limit_s: float, *, first: bool = False) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        left = members(session)
        if not left or (first and session not in left):
            return
        time.sleep(_POLL_S)
