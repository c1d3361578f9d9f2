"""How full the file systems are, each asked in a thread of its own: a network mount that hangs hides no other."""

import os
import stat
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

WAIT_S = 0.5
INTERVAL_S = 5.0
KEPT_S = 30.0  # an answer older than this is none
MOST = 32  # nodes of a cluster can have thousands of mounts

NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "wekafs",
    "9p",
    "virtiofs",
    "zfs",
)
NOT_FOR_DATA = ("squashfs", "iso9660", "erofs", "fuse.gvfsd-fuse", "fuse.lxcfs", "fuse.portal", "fuse.snapfuse")

Sizes = Tuple[int, int]  # free for a user who is not root, total


class Mount(NamedTuple):
    path: str
    device: str  # major:minor
    kind: str


def mounts(root: str = "/") -> List[Mount]:
    """What is mounted, the later of two on one path; nothing is touched, so nothing can hang. Format: proc(5), mountinfo."""
    found: Dict[str, Mount] = {}
    try:
        with open(os.path.join(root, "proc/self/mountinfo"), "rb") as file:
            lines = file.read().decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields or len(fields) < fields.index("-") + 2:
            continue
        path = _unescape(fields[4])
        found[path] = Mount(path, fields[2], fields[fields.index("-") + 1])
    return list(found.values())


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def real_kinds(root: str = "/") -> List[str]:
    """The kinds of file system that this kernel keeps on a device."""
    try:
        with open(os.path.join(root, "proc/filesystems"), encoding="ascii", errors="replace") as file:
            return [line.strip() for line in file if not line.startswith("nodev")]
    except OSError:
        return []


def choose(known: List[Mount], wanted: List[str], kinds: List[str]) -> List[str]:
    """Mount points to show: those of the wanted paths first, then every real one; one for each device."""
    chosen: List[Mount] = []
    for path in wanted:
        over = [mount for mount in known if path == mount.path or path.startswith(mount.path.rstrip("/") + "/")]
        if over:
            chosen.append(max(over, key=lambda mount: len(mount.path)))
    for mount in sorted(known, key=lambda mount: len(mount.path)):
        network = mount.kind in NETWORK or mount.kind.startswith("fuse.")
        if (mount.kind in kinds or network) and mount.kind not in NOT_FOR_DATA:
            chosen.append(mount)
    seen: Dict[str, str] = {}
    for mount in chosen:
        seen.setdefault(mount.device, mount.path)
    return list(seen.values())[:MOST]


def sizes(path: str) -> Optional[Sizes]:
    """(free, total) in bytes. None where the path is no folder: containers mount single files. Raises OSError."""
    if not stat.S_ISDIR(os.stat(path).st_mode):
        return None
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class _Probe:
    """Asks one file system again and again, never twice at once."""

    def __init__(self, path: str, ask: Callable[[str], Optional[Sizes]]) -> None:
        self.path = path
        self.no_folder = False
        self._ask = ask
        self._thread: Optional[threading.Thread] = None
        self._answer: Optional[Tuple[float, Sizes]] = None

    def start(self) -> Optional[threading.Thread]:
        """The thread that asks; None where the last one has not come back."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread = threading.Thread(target=self._run, name="statvfs " + self.path, daemon=True)
        self._thread.start()
        return self._thread

    def _run(self) -> None:
        try:
            found = self._ask(self.path)
        except OSError:
            return  # a stale handle, no permission: the last answer grows old
        self.no_folder = found is None
        if found is not None:
            self._answer = (time.monotonic(), found)

    def disk(self) -> Dict[str, Any]:
        """The fields of `fleet.facts.Disk`; an old answer still tells the size, never what is free."""
        if self._answer is None:
            return {"path": self.path, "free_bytes": None, "total_bytes": None}
        fresh = time.monotonic() - self._answer[0] < KEPT_S
        free, total = self._answer[1]
        return {"path": self.path, "free_bytes": free if fresh else None, "total_bytes": total}


class Disks:
    """The file systems that matter here: of home, /tmp, /dev/shm, `extra`, and every real mount."""

    def __init__(
        self,
        root: str = "/",
        extra: Tuple[str, ...] = (),
        ask: Callable[[str], Optional[Sizes]] = sizes,
        wait_s: float = WAIT_S,
    ) -> None:
        self._root = root
        self._wanted = [os.path.expanduser("~"), "/tmp", "/dev/shm", *extra]
        self._ask = ask
        self._wait_s = wait_s
        self._probes: Dict[str, _Probe] = {}
        self._asked: Optional[float] = None

    def read(self) -> List[Dict[str, Any]]:
        """One record a file system; waits `wait_s` at most for those that are slow."""
        now = time.monotonic()
        if self._asked is None or now - self._asked >= INTERVAL_S:
            self._asked = now
            self._ask_all(now + self._wait_s)
        return [probe.disk() for probe in self._probes.values() if not probe.no_folder]

    def _ask_all(self, deadline: float) -> None:
        chosen = choose(mounts(self._root), self._wanted, real_kinds(self._root))
        self._probes = {path: self._probes.get(path) or _Probe(path, self._ask) for path in chosen}
        started = [probe.start() for probe in self._probes.values()]
        for thread in started:
            if thread is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
