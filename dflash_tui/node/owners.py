"""Whose a process on a GPU is: its command, its user and which of our jobs it belongs to, where our /proc shows it.

In a container the driver may give the pids of the host. Such a pid is not in our /proc, or, worse, is there and means
another process: then it has no GPU device open, and nothing is said of it.
"""

import os
import pwd
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from dflash_tui.node import paths, processes

REMEMBERED_S = 10.0  # a process may change its title, never its job
DEVICES = ("/dev/nvidia", "/dev/dxg")
COMPUTE = ("/dev/nvidia-uvm", "/dev/dxg")  # what computes has one of them open too
_MARK = processes.MARK.encode() + b"="


class Owners:
    """Adds `command`, `user` and `job` to records of processes; answers are kept for some seconds.

    state: the folder that holds `jobs/`, or None where there is none.
    holds: whether a pid of our /proc has a GPU open; None where we may not look.
    """

    def __init__(
        self,
        state: Optional[str] = None,
        holds: Optional[Callable[[int], Optional[bool]]] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._holds = holds if holds is not None else holds_gpu
        self._clock = clock
        self._known: Dict[processes.Identity, Tuple[float, Dict[str, Any]]] = {}

    def describe(self, cards: List[Dict[str, Any]]) -> None:
        """Fills in every process of every card."""
        now = self._clock()
        self._known = {who: kept for who, kept in self._known.items() if now - kept[0] < REMEMBERED_S}
        for card in cards:
            for process in card["processes"] or ():
                process.update(self._of(process["pid"], now))

    def _of(self, pid: int, now: float) -> Dict[str, Any]:
        nobody: Dict[str, Any] = {"command": None, "user": None, "job": None}
        found = processes.stat_of(pid)
        if found is None:
            return nobody
        kept = self._known.get(found.identity)
        if kept is None:
            kept = (now, nobody if self._holds(pid) is False else self._look(pid))
            self._known[found.identity] = kept
        return kept[1]

    def _look(self, pid: int) -> Dict[str, Any]:
        return {"command": processes.command(pid) or None, "user": user_of(pid), "job": self.job_of(pid)}

    def job_of(self, pid: int) -> Optional[str]:
        """The job whose folder the environment names, else the one whose log is its output (a new title wipes the first).

        A job of another state folder is none of ours: its locks are not seen here.
        """
        if self._state is None:
            return None
        jobs = paths.jobs_dir(self._state)
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                for entry in file.read().split(b"\0"):
                    folder, job = os.path.split(os.fsdecode(entry[len(_MARK) :]))
                    if entry.startswith(_MARK) and job and os.path.realpath(folder) == os.path.realpath(jobs):
                        return job
        except OSError:
            pass  # somebody else's process; its output may still be ours to see
        outputs = {_file(os.path.join("/proc", str(pid), "fd", fd)) for fd in ("1", "2")} - {None}
        if not outputs:
            return None
        for job in reversed(paths.job_ids(self._state)):
            if _file(os.path.join(jobs, job, "log")) in outputs:
                return job
        return None


def _file(path: str) -> Optional[Tuple[int, int]]:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def user_of(pid: int) -> Optional[str]:
    """The name of the process' user, or the number of one without a name."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def holds_gpu(pid: int) -> Optional[bool]:
    """Whether the process has a GPU device open, or None where we may not look."""
    found = open_devices(pid)
    return None if found is None else bool(found)


def open_devices(pid: int) -> Optional[Set[str]]:
    """The GPU devices that the process has open, or None where we may not look."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    found = set()
    for name in names:
        try:
            target = os.readlink(os.path.join(folder, name))
        except OSError:
            continue  # closed meanwhile
        if target.startswith(DEVICES):
            found.add(target)
    return found
