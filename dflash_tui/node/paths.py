"""Where the node keeps its state, and how a file is written so that nobody ever sees half of it."""

import errno
import json
import os
import re
import stat
import tempfile
from typing import Any, Dict, List, Optional

from dflash_tui.node import protocol

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def state_dir() -> str:
    """The folder of this user's state, made if missing: $XDG_STATE_HOME or ~/.local/state, else /tmp/dflash-tui-<uid>.

    Raises OSError where neither can be written or the one in /tmp belongs to somebody else.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".local", "state")
    wanted = os.path.join(base, "dflash-tui")
    if os.path.isabs(wanted) and _usable(wanted):
        return wanted
    fallback = "/tmp/dflash-tui-%d" % os.getuid()
    try:
        os.mkdir(fallback, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(fallback)
    # /tmp is everybody's: a folder or a link that another user put there must not get our jobs.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            "neither %s nor %s can hold the node's state: set XDG_STATE_HOME to a folder of your own"
            % (wanted, fallback)
        )
    if not _usable(fallback):
        raise PermissionError("cannot write to %s: set XDG_STATE_HOME to a folder of your own" % fallback)
    return fallback


def _usable(path: str) -> bool:
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        # os.access says yes on a read-only mount for root; only writing proves it.
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError as error:
        # A disk that is full today is still where yesterday's jobs are.
        return error.errno in (errno.ENOSPC, errno.EDQUOT) and os.path.isdir(path)


def jobs_dir(root: str) -> str:
    return os.path.join(root, "jobs")


def gpus_dir(root: str) -> str:
    return os.path.join(root, "gpus")


def check_job_id(job: object) -> str:
    """`job` where it is a safe name for a folder. Raises protocol.Refused."""
    if not isinstance(job, str) or not _JOB_ID.match(job):
        raise protocol.Refused(
            protocol.BAD_REQUEST,
            "%r is not a job id" % (job,),
            "use letters, digits, '.', '_' and '-', at most 100, the first a letter or digit",
        )
    return job


def job_dir(root: str, job: object) -> str:
    """The folder of a job, there or not. Raises protocol.Refused where the id is no safe name."""
    return os.path.join(jobs_dir(root), check_job_id(job))


def write_json(path: str, data: Any) -> None:
    """Replaces the file as a whole, on the disk before its name changes; mode 0600. Raises OSError."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(data, indent=1).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in the file, or None where it is missing or not a JSON object."""
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def job_ids(root: str) -> List[str]:
    """Every job's id, the oldest first where ids are sortable; folders that are being made start with a dot."""
    try:
        return sorted(name for name in os.listdir(jobs_dir(root)) if _JOB_ID.match(name))
    except OSError:
        return []
