"""Disks: free space, inodes, the kind of file system, how fast it takes bytes, and whether flock works on it.

Runs in a process of its own for each file system: one that is dead hangs that process and nothing else.
"""

import errno
import fcntl
import os
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from dflash_tui.node import disks
from dflash_tui.node.doctor.checks import OK, PROBLEM, UNKNOWN, WARNING, Check, size

GIB = 1 << 30
MIB = 1 << 20
_MOST_BYTES = 256 * MIB
_MOST_S = 2.0
_CHUNK = 8 * MIB
_KEPT_FREE = 0.05  # of the file system: where less is free nothing is written to try it
_SLOW = 100e6  # bytes/s: less than one GPU of extraction writes
_SHARED_LEAST, _SHARED_ENOUGH = 256 * MIB, 2 * GIB
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class Folder(NamedTuple):
    """role: "state", "home", "temporary", "shared" (memory) or "wanted" (the user named it)."""

    role: str
    path: str

    @property
    def name(self) -> str:
        names = {"state": "state folder", "home": "home folder", "shared": "shared memory"}
        return names.get(self.role, "disk " + self.path)


def group(folders: Iterable[Folder], mounts: List[disks.Mount]) -> List[List[Folder]]:
    """The folders by file system, as far as their names tell: nothing is touched, so nothing can hang.

    The home folder is named apart from the state folder only where it is another file system.
    """
    groups: Dict[str, List[Folder]] = {}
    for folder in folders:
        mount = mount_of(folder.path, mounts)
        of_same = groups.setdefault(mount.device if mount else folder.path, [])
        if folder.role != "home" or not of_same:
            of_same.append(folder)
    return list(groups.values())


def mount_of(path: str, mounts: List[disks.Mount]) -> Optional[disks.Mount]:
    over = [mount for mount in mounts if path == mount.path or path.startswith(mount.path.rstrip("/") + "/")]
    return max(over, key=lambda mount: len(mount.path)) if over else None


def look(folders: List[Folder], write: bool, say: Callable[[Check], None]) -> None:
    """Says a check for each folder as soon as it is known; the speed of a file system is measured once."""
    speeds: Dict[int, Any] = {}
    for folder in folders:
        say(_look(folder, write, speeds))
        if folder.role == "state" and write:
            say(flock(folder.path))


def _look(folder: Folder, write: bool, speeds: Dict[int, Any]) -> Check:
    try:
        where, note = _existing(folder.path)
        space = os.statvfs(where)
        device = os.stat(where).st_dev
    except OSError as error:
        return Check(folder.name, PROBLEM, "%s: %s" % (folder.path, error.strerror), "name a folder that can be read")
    mount = mount_of(os.path.realpath(where), disks.mounts())
    kind = mount.kind if mount else "an unknown file system"
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    found = "%s (%s)%s: %s free of %s" % (folder.path, kind, note, size(free), size(total))
    faults = [_space(free, total), _inodes(space)]
    if folder.role == "shared":
        return _worst(folder.name, found, [_shared(total), *faults[:1]])
    if kind == "overlay" and folder.role == "wanted":
        faults.append(
            Check("", WARNING, "it goes with the container", "mount a volume there, or name a folder that lasts")
        )
    if folder.role == "state" and folder.path.startswith("/tmp/"):
        ours = folder.path.startswith("/tmp/dflash-tui-")  # taken because the usual one cannot be written
        mends = "make ~/.local/state writable" if ours else "set XDG_STATE_HOME to a folder that lasts"
        faults.append(Check("", WARNING, "jobs are forgotten when /tmp is emptied", mends))
    if write and kind not in IN_MEMORY:
        if device not in speeds:
            speeds[device] = measure(where, free - int(total * _KEPT_FREE))
        speed = speeds[device]
        if isinstance(speed, OSError):
            faults.append(_unwritable(where, speed))
        elif speed is None:
            found += ", speed not measured: too little is free"
        else:
            found += ", writes %.0f MB/s" % (speed / 1e6)
            if speed < _SLOW:
                faults.append(Check("", WARNING, "that is slow: one GPU may write 1,500 MB/s", "write to a local disk"))
    elif not os.access(where, os.W_OK):
        faults.append(_unwritable(where, OSError(errno.EACCES, os.strerror(errno.EACCES))))
    return _worst(folder.name, found, faults)


def _worst(name: str, found: str, faults: Iterable[Optional[Check]]) -> Check:
    """What was found with every fault after it, the status of the worst, and their remedies."""
    told = [fault for fault in faults if fault is not None]
    status = min([fault.status for fault in told] or [OK], key=(PROBLEM, WARNING, UNKNOWN, OK).index)
    texts = [found] + [fault.found for fault in told]
    return Check(name, status, "; ".join(texts), "; ".join(dict.fromkeys(fault.remedy for fault in told)))


def _existing(path: str) -> Any:
    """The folder, or the nearest one above it that is there, and a word about that. Raises OSError."""
    where = path
    while not os.path.lexists(where) and os.path.dirname(where) != where:
        where = os.path.dirname(where)
    if not os.path.isdir(where):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return where, "" if where == path else ", not there yet"


def _space(free: int, total: int) -> Optional[Check]:
    if total <= 0:
        return None
    share = "%.0f %%" % (100.0 * free / total)
    if free < min(GIB, total // 20):
        return Check("", PROBLEM, "%s free is as good as full" % share, "make room there")
    if free < min(20 * GIB, total // 20):
        return Check("", WARNING, "only %s is free" % share, "make room there")
    return None


def _inodes(space: os.statvfs_result) -> Optional[Check]:
    if space.f_files <= 0:
        return None  # a file system that makes them as it needs them
    share = space.f_favail / float(space.f_files)
    if share > 0.05:
        return None
    status = PROBLEM if space.f_favail < 1000 else WARNING
    return Check("", status, "%d inodes free of %d" % (space.f_favail, space.f_files), "remove small files there")


def _shared(total: int) -> Optional[Check]:
    if total >= _SHARED_ENOUGH:
        return None
    status = PROBLEM if total < _SHARED_LEAST else WARNING
    return Check(
        "", status, "too small for workers that share tensors", "start the container with --shm-size=16g or --ipc=host"
    )


def _unwritable(where: str, error: OSError) -> Check:
    remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give your user the right to write"
    return Check("", PROBLEM, "cannot write to %s: %s" % (where, error.strerror), remedy)


def measure(folder: str, room: int) -> Any:
    """Bytes/s with fsync after each chunk, the OSError that stopped it, or None where `room` is too small.

    The file has no name where the system knows such files, and is removed again in any case.
    """
    most = min(_MOST_BYTES, room)
    if most < _CHUNK:
        return None
    data = os.urandom(MIB) * (_CHUNK // MIB)  # one that compresses would measure the processor
    try:
        with tempfile.TemporaryFile(prefix=".dflash-tui-doctor-", dir=folder, buffering=0) as file:
            written, started = 0, time.monotonic()
            while written + len(data) <= most and time.monotonic() - started < _MOST_S:
                written += _write(file.fileno(), data)
                os.fsync(file.fileno())
            return written / max(time.monotonic() - started, 1e-6)
    except OSError as error:
        return error


def _write(fd: int, data: bytes) -> int:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(data)


def flock(folder: str, lock: Callable[[int, int], None] = fcntl.flock) -> Check:
    """Whether a lock that is held keeps a second one out: jobs and GPUs are guarded by such locks."""
    name, remedy = "file locks", "set XDG_STATE_HOME to a folder on a local disk"
    try:
        first, path = tempfile.mkstemp(prefix=".dflash-tui-doctor-", dir=folder)
        with os.fdopen(first, "r+b"):
            try:
                second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.unlink(path)  # a network disk may hang in the lock until we are killed
            with os.fdopen(second, "r+b"):
                lock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    lock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        return Check(name, OK, "flock works in %s" % folder)
                    raise
    except OSError as error:
        return Check(name, PROBLEM, "flock in %s: %s" % (folder, error.strerror), remedy)
    return Check(name, PROBLEM, "flock in %s does not keep a second holder out" % folder, remedy)
