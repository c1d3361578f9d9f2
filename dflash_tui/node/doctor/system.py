"""The machine's own limits, its locale, its clock's keeper and its /proc: asked at once, for none of it can hang."""

import locale
import os
import platform
import resource
import sys
from typing import Any, Dict, List, Optional

from dflash_tui.node.doctor.checks import OK, PROBLEM, UNKNOWN, WARNING, Check, size
from dflash_tui.node.host import Host

_GIB = 1 << 30
_ADJTIMEX_BYTES = 512  # struct timex is 208 on 64-bit Linux
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def look(root: str = "/") -> List[Check]:
    """Every check of this file; `root` holds the proc and sys folders that are read."""
    return [machine(), agent_python(), memory(root), open_files(), processes(root), process_list(root), text()]


def machine() -> Check:
    kernel = "%s %s, %s" % (platform.system(), platform.release(), platform.machine())
    name, version = platform.libc_ver()
    found = "%s, %s, %s cores" % (kernel, ("%s %s" % (name, version)).strip() or "another libc", os.cpu_count() or "?")
    if name != "glibc":
        return Check("system", WARNING, found, "torch has wheels for glibc only: use a Debian or Ubuntu image")
    return Check("system", OK, found)


def agent_python() -> Check:
    found = "%s (%s)" % (platform.python_version(), sys.executable)
    try:
        import ctypes  # noqa: F401 - asked whether it is there
    except ImportError:
        remedy = "install a Python with libffi; without it neither NVML nor a job's orphans can be seen"
        return Check("agent's Python", WARNING, "%s, built without ctypes" % found, remedy)
    return Check("agent's Python", OK, found)


class _NoDisks:
    def read(self) -> List[Dict[str, Any]]:
        return []


def memory(root: str = "/") -> Check:
    reading = Host(root, disks=_NoDisks()).read()  # type: ignore[arg-type]  # no more of disks is asked
    used, total = reading["memory_used_bytes"], reading["memory_total_bytes"]
    if used is None or total is None:
        return Check("memory", UNKNOWN, "/proc/meminfo cannot be read")
    free = total - used
    limited = _meminfo_total(root)
    limit = "" if limited is None or total >= limited else ", limited by the container (%s in all)" % size(limited)
    found = "%s free of %s%s" % (size(free), size(total), limit)
    if free < 4 * _GIB:
        return Check("memory", WARNING, found, "a model is loaded through it: end other programs or take a larger node")
    return Check("memory", OK, found)


def _meminfo_total(root: str) -> Optional[int]:
    for row in _text(root, "proc/meminfo").splitlines():
        words = row.split()
        if len(words) >= 2 and words[0] == "MemTotal:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "%s open files a process (at most %s)" % (_limit(soft), _limit(hard))
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        return Check("open files", OK, found)
    remedy = "raise it: `ulimit -n 65536` in ~/.profile, or nofile in /etc/security/limits.conf"
    return Check("open files", PROBLEM if soft < 256 else WARNING, found, remedy)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def processes(root: str = "/") -> Check:
    """The room for more processes and threads: of the container, and of the user."""
    rooms = [room for room in (_group_room(root), _user_room(root)) if room is not None]
    if not rooms:
        return Check("processes", OK, "no limit on processes and threads")
    left, found = min(rooms)
    if left >= 1000:
        return Check("processes", OK, found)
    remedy = "start the container with --pids-limit=-1, or raise `ulimit -u`"
    return Check("processes", PROBLEM if left < 100 else WARNING, found, remedy)


def _group_room(root: str) -> Any:
    lowest = None
    for row in _text(root, "proc/self/cgroup").splitlines():
        number, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = "sys/fs/cgroup"
        elif "pids" in controllers.split(","):
            base = "sys/fs/cgroup/pids"
        else:
            continue
        # In a container the path may be the host's: what is missing is passed over, the top is always asked.
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            folder = os.path.join(base, *parts[:length])
            most, now = (_text(root, os.path.join(folder, name)).strip() for name in ("pids.max", "pids.current"))
            if most.isdigit() and now.isdigit():
                found = int(most) - int(now), "%s of %s processes and threads of the container in use" % (now, most)
                lowest = found if lowest is None else min(lowest, found)
    return lowest


def _user_room(root: str) -> Any:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:
        return None  # the kernel does not hold root to it
    used = 0
    for name in os.listdir(os.path.join(root, "proc")):
        if name.isdigit():
            try:
                if os.stat(os.path.join(root, "proc", name)).st_uid == os.getuid():
                    used += len(os.listdir(os.path.join(root, "proc", name, "task")))
            except OSError:
                continue
    return soft - used, "%d of %d processes and threads of this user in use" % (used, soft)


def process_list(root: str = "/") -> Check:
    """Whether other users' processes can be seen (proc(5), hidepid): who uses a GPU is known only then."""
    for row in _text(root, "proc/self/mountinfo").splitlines():
        fields = row.split(" ")
        if len(fields) > 5 and fields[4] == "/proc":
            options = ",".join((fields[5], fields[-1])).split(",")
            hidden = [option for option in options if option.startswith("hidepid=")]
            value = hidden[-1].partition("=")[2] if hidden else "0"
            if value not in ("0", "off") and os.getuid() != 0:
                remedy = "ask the administrator for the gid= group of that mount, if you must see who uses a GPU"
                return Check("process list", WARNING, "/proc hides other users' processes (hidepid=%s)" % value, remedy)
    return Check("process list", OK, "every process can be seen")


def text() -> Check:
    """Whether the programs started here read and write UTF-8."""
    name = next((os.environ[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(key)), "")
    remedy = "set LANG=C.UTF-8 for logins without a terminal, in ~/.profile or /etc/environment"
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name or "C")
        code = locale.nl_langinfo(locale.CODESET)
    except locale.Error:
        return Check("locale", WARNING, "%s is set, and this node does not have it" % name, remedy)
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    if code.upper().replace("-", "") == "UTF8":
        return Check("locale", OK, name)
    if name in ("", "C", "POSIX"):
        return Check("locale", OK, "%s: Python takes UTF-8 there" % (name or "not set"))
    return Check("locale", WARNING, "%s writes %s, not UTF-8" % (name, code), remedy)


def ntp() -> Optional[bool]:
    """Whether the kernel's clock is kept by NTP (adjtimex(2)); None where it cannot be asked."""
    try:
        import ctypes

        answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES))
    except (ImportError, OSError, AttributeError):
        return None
    return None if answer < 0 else bool(answer != _TIME_ERROR)


def _text(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
