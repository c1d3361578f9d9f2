"""Processes below this one: found, asked to end, and killed where they do not, so that a comparison leaves none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backends.vllm.session import is_tracker, stat_of

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_END_S = 5.0


def end_with(parent: int) -> None:
    """Has the kernel send SIGTERM to this process once `parent`, which started it, is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it went before we asked
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def heir() -> Iterator[None]:
    """In here, what loses its parent below this process becomes its child, so that `descendants` finds it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """All living processes below `root`; zombies are not among them."""
    parents: dict[int, int] = {}
    zombies = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            state, parent, *_ = stat_of(int(folder.name))
        except (OSError, ValueError):
            continue  # it ended meanwhile
        parents[int(folder.name)] = int(parent)
        if state in b"ZX":
            zombies.add(int(folder.name))
    found: set[int] = set()
    below = {root}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below and pid not in found}
        found |= below
    return found - zombies


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of ending processes. signalled: those that did not end by themselves; alive: those that did not end at all."""

    signalled: int
    alive: tuple[int, ...]


def end_all_below(known: Sequence[subprocess.Popen[bytes]], patience_s: float = _END_S) -> Ended:
    """Ends every process below this one. known: ours, whose status others want.

    First they may end by themselves, then comes SIGTERM, then SIGKILL, each for `patience_s` at most; resource trackers are killed
    late, for they remove the shared memory of those that were killed.
    """
    signalled: set[int] = set()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience_s
        while left := _below(known):
            if number is not None:
                # SIGTERM once each: a second one means "at once" to some.
                victims = left if number == signal.SIGKILL else left - signalled
                if number == signal.SIGKILL and time.monotonic() < deadline - patience_s / 2:
                    victims = {pid for pid in left if not is_tracker(pid)}
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                signalled |= left
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        else:
            break
    return Ended(len(signalled), tuple(sorted(_below(known))))


def _below(known: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """What lives below this process; what has died here and is nobody else's to bury is buried."""
    for process in known:
        process.poll()
    me, ours = os.getpid(), {process.pid for process in known}
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        for pid in {int(child) for child in children} - ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return descendants(me)
