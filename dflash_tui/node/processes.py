"""Processes by /proc: who is alive, who descends from whom, who writes to a job's log.

A process is known by (boot id, pid, start ticks), for a pid alone is given to others later. A zombie counts as dead,
unless it is the first thread of a process whose others still run.
Formats: proc(5).
"""

import errno
import os
import signal
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set

_COMMAND_LENGTH = 300
# In the environment of a job's processes: the job's folder. (DFLASH_TUI_JOB is its id, which two nodes' states may share.)
MARK = "DFLASH_TUI_JOB_DIR"


class Identity(NamedTuple):
    """One process of this boot; `ticks` since boot when it started."""

    pid: int
    ticks: int

    def to_json(self) -> Dict[str, int]:
        return {"pid": self.pid, "ticks": self.ticks}


class Stat(NamedTuple):
    pid: int
    parent: int
    state: str
    ticks: int
    name: str
    threads: int = 1

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.ticks)

    @property
    def dead(self) -> bool:
        # A process that ends has its first thread a zombie before the others are gone: it holds its memory until then.
        return self.state in ("Z", "X", "x") and self.threads <= 1


def identity_of(record: Any) -> Optional[Identity]:
    """The identity in a job's record, or None where it holds none."""
    if isinstance(record, dict) and isinstance(record.get("pid"), int) and isinstance(record.get("ticks"), int):
        return Identity(record["pid"], record["ticks"])
    return None


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def stat_of(pid: int) -> Optional[Stat]:
    """What /proc says of the process, or None where there is none."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    # The name may hold spaces and brackets: the fields start after the last bracket.
    start, end = text.find("("), text.rfind(")")
    fields = text[end + 2 :].split()
    if start < 0 or end < 0 or len(fields) < 20:
        return None
    return Stat(pid, int(fields[1]), fields[0], int(fields[19]), text[start + 1 : end], int(fields[17]))


def me() -> Identity:
    found = stat_of(os.getpid())
    return Identity(os.getpid(), found.ticks if found else 0)


def alive(identity: Optional[Identity]) -> bool:
    """Whether this very process still runs."""
    if identity is None:
        return False
    found = stat_of(identity.pid)
    return found is not None and found.ticks == identity.ticks and not found.dead


def snapshot() -> Dict[int, Stat]:
    """Every living process that can be seen, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = stat_of(int(name))
            if stat is not None and not stat.dead:
                found[stat.pid] = stat
    return found


def descendants(roots: Iterable[int], stats: Dict[int, Stat]) -> Set[int]:
    """Pids below `roots`, the roots not among them."""
    children: Dict[int, List[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: Set[int] = set()
    queue = list(roots)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found


def writers(dev: int, ino: int, stats: Dict[int, Stat]) -> Set[int]:
    """Pids whose standard output or error is the file; processes of other users cannot be looked into."""
    found = set()
    for pid in stats:
        for fd in (1, 2):
            try:
                target = os.stat("/proc/%d/fd/%d" % (pid, fd))
            except OSError:
                continue
            if (target.st_dev, target.st_ino) == (dev, ino):
                found.add(pid)
                break
    return found


def with_variable(name: str, value: str, stats: Dict[int, Stat]) -> Set[int]:
    """Pids whose environment holds the variable: finds those that sent their output elsewhere."""
    wanted = ("%s=%s" % (name, value)).encode()
    found = set()
    for pid in stats:
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.add(pid)
        except OSError:
            continue
    return found


def of_job(
    folder: str,
    log: Any,
    roots: Iterable[Identity] = (),
    stats: Optional[Dict[int, Stat]] = None,
) -> List[Stat]:
    """Living processes of the job in `folder`: what descends from `roots`, writes to its log or carries its mark, and
    what descends from those.

    `log` is the record's {"dev", "ino"}. Roots are counted themselves, except the caller.
    """
    if stats is None:
        stats = snapshot()
    start = {root.pid for root in roots if root.pid in stats and stats[root.pid].ticks == root.ticks}
    if isinstance(log, dict) and isinstance(log.get("dev"), int) and isinstance(log.get("ino"), int):
        start |= writers(log["dev"], log["ino"], stats)
    start |= with_variable(MARK, folder, stats)
    every = start | descendants(start, stats)
    every.discard(os.getpid())
    return sorted(stats[pid] for pid in every)


def command(pid: int) -> str:
    """The command line as one line, or its name in brackets where there is none; "" where the process is gone."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read(4 * _COMMAND_LENGTH).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
    text = " ".join(words.split())[:_COMMAND_LENGTH]
    if text:
        return text
    found = stat_of(pid)
    return "[%s]" % found.name if found else ""


def is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's own, which removes the shared memory that killed processes left, and then ends by itself."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read(4 * _COMMAND_LENGTH)
    except OSError:
        return False


def resident_bytes(pid: int) -> Optional[int]:
    """What the process holds of the machine's memory, by whole MiB; None where it is gone. Shared pages count for each."""
    try:
        with open("/proc/%d/statm" % pid) as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # By whole MiB: a record that changed with every page would be told with every page.
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20 << 20


def send(identity: Identity, number: int) -> bool:
    """Signals this very process; False where it is gone. Raises PermissionError where it is somebody else's."""
    open_pidfd = getattr(os, "pidfd_open", None)
    send_pidfd = getattr(signal, "pidfd_send_signal", None)
    fd = None
    if open_pidfd is not None and send_pidfd is not None:
        try:
            fd = open_pidfd(identity.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            # Old kernels and some sandboxes have no pidfd: then the check just before the signal must do.
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EMFILE):
                raise
    try:
        if not alive(identity):
            return False
        if fd is not None and send_pidfd is not None:
            send_pidfd(fd, number)
        else:
            os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True
