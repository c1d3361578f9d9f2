"""Three calls of Linux that the standard library of Python 3.8 lacks or hides: subreaper, hole punching, data seeking."""

import errno
import os
from typing import Optional, Tuple

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_FALLOC_FL_KEEP_SIZE = 1  # fallocate(2)
_FALLOC_FL_PUNCH_HOLE = 2


def become_subreaper() -> bool:
    """Orphans below this process become its children; False where the system does not offer it."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Gives the bytes back to the disk; the file's size stays. Raises OSError (EOPNOTSUPP on some file systems)."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(
            ctypes.c_int(fd),
            ctypes.c_int(_FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE),
            ctypes.c_int64(offset),
            ctypes.c_int64(length),
        )
    except (ImportError, AttributeError):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from None
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def data_range(fd: int, offset: int, size: int) -> Optional[Tuple[int, int]]:
    """The next bytes [start, stop) at or after `offset` that are no hole, or None where only a hole is left.

    The position of `fd` is moved. Where the file system knows of no holes all is data.
    """
    try:
        start = os.lseek(fd, offset, os.SEEK_DATA)
        stop = os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        return offset, size
    return min(start, size), min(stop, size)
