"""The log of a job: the job's processes append to it themselves; past its limit the middle goes back to the disk."""

import os

from dflash_tui.node import linux

HEAD_BYTES = 64 << 20  # root causes stand at the beginning of a log
_BLOCK = 4096


class JobLog:
    """The file that a job's processes have as standard output and error.

    limit: at most so many bytes on the disk. head: kept from the beginning, at most a quarter of the limit.
    """

    def __init__(self, path: str, limit: int, head: int = HEAD_BYTES) -> None:
        # O_APPEND, so that writers that do not know of each other lose nothing.
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._limit = limit
        self._hole_start = _down(min(head, limit // 4)) if limit >= 4 * _BLOCK else _BLOCK
        self._hole_stop = self._hole_start
        self._refused = False

    def keep_within_limit(self) -> None:
        """Punches the hole further where the file holds more than its limit."""
        if self._refused:
            return
        size = os.fstat(self.fd).st_size
        last = max(self._limit - self._hole_start, _BLOCK)
        if size - self._hole_stop <= last:
            return
        # A quarter more than needed, so that a busy log is not punched at every look.
        stop = _down(size - last * 3 // 4)
        if stop <= self._hole_stop:
            return
        try:
            linux.punch_hole(self.fd, self._hole_start, stop - self._hole_start)
        except OSError as error:
            self._refused = True
            self.write(
                "the middle of this log cannot be given back to the disk here (%s): it grows past its limit" % error
            )
            return
        self._hole_stop = stop

    def write(self, line: str) -> None:
        try:
            os.write(self.fd, ("[supervisor] %s\n" % line).encode("utf-8", "replace"))
        except OSError:
            # A full disk: the state file says what is needed.
            return


def _down(offset: int) -> int:
    return offset - offset % _BLOCK
