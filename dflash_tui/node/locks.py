"""Locks by flock: one a job, held by its supervisor for life, and one a GPU that a job uses.

flock belongs to the open file, not to the process: the agent takes a lock and the supervisor inherits it, so there is
no moment between in which it is free. A lock ends with the last process that has it open, whatever killed that.
"""

import fcntl
import os
import re
import time
from typing import Dict, List, Optional

from dflash_tui.node import paths

_RETRIES = 10
_RETRY_S = 0.01


def take(path: str, shared: bool = False) -> Optional[int]:
    """The descriptor of the locked file (made if missing, CLOEXEC), or None where another holds it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def is_held(path: str) -> bool:
    """Whether somebody holds the lock exclusively. False where the file is missing.

    Where it cannot be told (no more descriptors, a stale mount) it counts as held: no job is gone by that.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        # Shared, so that two who only look never take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class GpuLocked(Exception):
    """A GPU is in use by a job of ours."""

    def __init__(self, uuid: str, job: str) -> None:
        super().__init__("GPU %s is locked by job %s" % (uuid, job))
        self.uuid = uuid
        self.job = job


def gpu_path(root: str, uuid: str) -> str:
    return os.path.join(paths.gpus_dir(root), re.sub(r"[^A-Za-z0-9._-]", "_", uuid) + ".lock")


def gpu_holder(root: str, uuid: str, shared: bool = False) -> Optional[str]:
    """The id of the job that keeps others off the GPU (jobs that share keep off only those that do not), or None."""
    path = gpu_path(root, uuid)
    if not os.path.exists(path):
        return None
    fd = _patiently(path, shared)
    if fd is None:
        return _name_in(path)
    os.close(fd)
    return None


def take_gpus(root: str, uuids: List[str], job: str, shared: bool = False) -> Dict[str, int]:
    """A descriptor for each UUID, all locked, or none of them: raises GpuLocked, or OSError."""
    os.makedirs(paths.gpus_dir(root), 0o700, exist_ok=True)
    taken: Dict[str, int] = {}
    try:
        for uuid in uuids:
            path = gpu_path(root, uuid)
            fd = _patiently(path, shared)
            if fd is None:
                raise GpuLocked(uuid, _name_in(path))
            taken[uuid] = fd
            os.ftruncate(fd, 0)
            os.pwrite(fd, job.encode() + b"\n", 0)
    except BaseException:
        for fd in taken.values():
            os.close(fd)
        raise
    return taken


def _patiently(path: str, shared: bool) -> Optional[int]:
    # Somebody who only looks holds the lock for microseconds: that is no holder.
    for _ in range(_RETRIES):
        fd = take(path, shared)
        if fd is not None:
            return fd
        time.sleep(_RETRY_S)
    return None


def _name_in(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(200).strip() or "(unnamed)"
    except OSError:
        return "(unnamed)"
