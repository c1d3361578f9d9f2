"""Where environments lie, which of them are whole, and the lock under which they are made.

`<data>/dflash-tui/envs/<name>` is a link to `.built/<name>-<digest>`, the folder in which an environment was built: a
Python environment cannot be moved. It counts only when `env.json` is in it, which is written last:

    name          worker, trainer or vllm-<version>
    python        version of its Python, as 3.11.7
    base          path of the Python that it was made with
    requirements  what was asked for
    versions      distribution -> version of what was asked for, found there by the check at the end; `cuda`: what torch
                  was built for, null for a CPU build
    created       seconds since 1970
    bytes         size of the folder
"""

import hashlib
import json
import os
import shutil
from typing import Any, Dict, List, Optional, Sequence

from dflash_tui.node import locks, paths

RECORD = "env.json"


def root() -> str:
    """The folder of this user's environments, there or not: $XDG_DATA_HOME or ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(base, "dflash-tui", "envs")


def built() -> str:
    """Where they are built, whole or not."""
    return os.path.join(root(), ".built")


def folder_of(name: str, requirements: Sequence[str], base: str) -> str:
    """The folder that an environment is built in; the same wishes give the same folder, so that work goes on there."""
    text = json.dumps([list(requirements), os.path.realpath(base)])
    return os.path.join(built(), "%s-%s" % (name, hashlib.sha256(text.encode()).hexdigest()[:10]))


def python_in(folder: str) -> str:
    return os.path.join(folder, "bin", "python")


def record_of(folder: str) -> Optional[Dict[str, Any]]:
    """env.json of an environment that is whole and whose Python can be run, else None."""
    record = paths.read_json(os.path.join(folder, RECORD))
    return record if record is not None and os.access(python_in(folder), os.X_OK) else None


def current(name: str) -> Optional[str]:
    """The folder of the whole environment of that name, None where there is none."""
    folder = os.path.realpath(os.path.join(root(), name))
    return folder if record_of(folder) is not None else None


def worker_python() -> str:
    """The Python of the whole worker environment, "" where there is none; the folder's own path, which no swap changes."""
    folder = current("worker")
    return python_in(folder) if folder is not None else ""


def whole() -> List[Dict[str, Any]]:
    """The records of all whole environments, with `path` and the `executable`; in the order of their names."""
    try:
        names = sorted(name for name in os.listdir(root()) if os.path.islink(os.path.join(root(), name)))
    except OSError:
        return []
    found = []
    for name in names:
        folder = current(name)
        record = record_of(folder) if folder is not None else None
        if folder is not None and record is not None:
            found.append(dict(record, path=folder, executable=python_in(folder)))
    return found


def make_current(name: str, folder: str) -> None:
    """Lets the name lead to the folder, from one moment to the next. Raises OSError."""
    link = os.path.join(root(), name)
    temporary = os.path.join(root(), ".%s.%d" % (name, os.getpid()))
    paths.remove(temporary)
    os.symlink(os.path.relpath(folder, root()), temporary)
    os.replace(temporary, link)


def sweep(name: str) -> List[str]:
    """Removes what is not current of that name and used by no process; what stays because it is used."""
    used = []
    keep = os.path.realpath(os.path.join(root(), name))
    for entry in os.listdir(built()):
        folder = os.path.join(built(), entry)
        if entry.rpartition("-")[0] != name or os.path.realpath(folder) == keep:
            continue
        if _used(folder):
            used.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return used


def _used(folder: str) -> bool:
    """Whether a process of ours runs out of the folder."""
    needle = (folder + os.sep).encode()
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        for name in ("cmdline", "maps"):
            try:
                with open("/proc/%s/%s" % (pid, name), "rb") as file:
                    if needle in file.read():
                        return True
            except OSError:
                continue
    return False


def lock() -> Optional[int]:
    """The lock of all environments, which pip inherits; None where another setup has it. Raises OSError."""
    os.makedirs(built(), 0o700, exist_ok=True)
    fd = locks.take(os.path.join(root(), ".lock"))
    if fd is not None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, os.environ.get("DFLASH_TUI_JOB", "").encode(), 0)
    return fd


def lock_holder() -> Optional[str]:
    """The job that holds the lock ("" where it has no name), None where nobody does."""
    path = os.path.join(root(), ".lock")
    if not locks.is_held(path):
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(200).strip()
    except OSError:
        return ""


def free_bytes() -> Optional[int]:
    """What the disk of the environments has left for this user, None where it cannot be told."""
    folder = root()
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def size_of(folder: str) -> int:
    """Bytes on the disk of everything in a folder; 0 where it is missing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total
