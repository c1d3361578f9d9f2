"""Files followed for a console, by (device, inode, offset) and with credit: it says how many bytes may come.

A file that shrank is told of as "truncated", another file under the same name as "rotated" (after the rest of the old
one); a hole in it (the middle of a log that was given back to the disk) is told of as a gap and never sent as zeros.
"""

import os
import stat
from typing import Any, Callable, Dict, List, Optional, Tuple

from dflash_tui.node import linux, protocol
from dflash_tui.node.protocol import Refused

Push = Callable[[Dict[str, Any], bytes], None]


_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


def open_regular(path: str) -> Optional[int]:
    """A descriptor of the file, or None where there is none. Raises Refused where it is no file or may not be read."""
    try:
        # Looked at first: opening is enough to start some devices.
        _check_regular(path, os.stat(path).st_mode)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Refused(protocol.IO_ERROR, "%s: %s" % (path, error.strerror), "check the path and its rights") from None
    try:
        _check_regular(path, os.fstat(fd).st_mode)
    except Refused:
        os.close(fd)
        raise
    return fd


def _check_regular(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for test, words in _KINDS if test(mode)), "is something else")
        raise Refused(protocol.IO_ERROR, "%s %s, not a regular file" % (path, kind), "give the path of a file")


def resolve_offset(offset: int, size: int) -> int:
    """A negative offset counts from the end."""
    return offset if offset >= 0 else max(size + offset, 0)


def read_at(path: str, offset: int, length: int) -> Tuple[Dict[str, Any], bytes]:
    """The position {dev, ino, offset, size, gap} and the bytes there, of one stretch without a hole. Raises Refused.

    gap: so many bytes of what was asked for are a hole before `offset`.
    """
    fd = open_regular(path)
    if fd is None:
        raise Refused(protocol.NOT_FOUND, "there is no file %s" % path)
    try:
        found = os.fstat(fd)
        offset = resolve_offset(offset, found.st_size)
        start, data = _read_data(fd, offset, min(offset + min(length, protocol.MAX_PAYLOAD), found.st_size))
    except OSError as error:
        raise Refused(protocol.IO_ERROR, "%s: %s" % (path, error.strerror)) from None
    finally:
        os.close(fd)
    position = {"dev": found.st_dev, "ino": found.st_ino, "offset": start, "size": found.st_size}
    return dict(position, gap=start - offset), data


def _read_data(fd: int, offset: int, stop: int) -> Tuple[int, bytes]:
    """Where the first bytes in [offset, stop) are that are no hole, and they."""
    while offset < stop:
        start, end = linux.data_range(fd, offset, stop) or (stop, stop)
        data = os.pread(fd, end - start, start)
        # A hole may have been punched while we read: then these may be zeros that nobody wrote.
        if not data or linux.data_range(fd, start, start + len(data)) == (start, start + len(data)):
            return start, data
    return offset, b""


class Tail:
    """One followed file. `must_exist` False waits for a file that is not there yet. Raises Refused."""

    def __init__(
        self,
        number: int,
        path: str,
        offset: int,
        credit: int,
        belongs_to: Optional[Tuple[int, int]] = None,
        must_exist: bool = True,
    ) -> None:
        self.number = number
        self.credit = credit
        self.dead = False
        self._path = path
        self._resets: List[Dict[str, Any]] = []
        self._fd = open_regular(path)
        self._file: Tuple[int, int] = (0, 0)
        self.size = 0
        # A position in a file that is away just now: another one that comes under its name is told of as such.
        self._left: Optional[Tuple[Tuple[int, int], int]] = None
        if belongs_to == (0, 0):
            belongs_to = None
        if self._fd is None:
            if must_exist:
                raise Refused(protocol.NOT_FOUND, "there is no file %s" % path, "check the path")
            self.offset = 0
            self._left = (belongs_to, offset) if belongs_to is not None else None
            return
        found = os.fstat(self._fd)
        self._file, self.size = (found.st_dev, found.st_ino), found.st_size
        self.offset = resolve_offset(offset, self.size)
        if belongs_to is not None and belongs_to != self._file:
            self.offset = 0
            self._reset("rotated")
        elif self.offset > self.size:
            self.offset = 0
            self._reset("truncated")

    def position(self) -> Dict[str, Any]:
        return {"dev": self._file[0], "ino": self._file[1], "offset": self.offset, "size": self.size}

    def pump(self, push: Push, room: Callable[[], bool]) -> None:
        """Pushes what there is, as far as there is credit and room. Never waits."""
        if self.dead:
            return
        try:
            while self._resets and room():
                push(self._resets.pop(0), b"")
            while self.credit > 0 and room() and self._advance(push):
                continue
        except OSError as error:
            self._fail(push, error.strerror or str(error))
        except Refused as refused:
            self._fail(push, refused.message)

    def close(self) -> None:
        self.dead = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _fail(self, push: Push, why: str) -> None:
        push(self._header(error="%s can no longer be read: %s" % (self._path, why)), b"")
        self.close()

    def _header(self, **more: Any) -> Dict[str, Any]:
        head = {"ev": "tail", "tail": self.number, "dev": self._file[0], "ino": self._file[1], "offset": self.offset}
        return dict(head, **more)

    def _reset(self, why: str) -> None:
        self._resets.append(self._header(reset=why))

    def _advance(self, push: Push) -> bool:
        """Sends one chunk, or finds out why there is none; False where there is nothing to do now."""
        if self._fd is None:
            return self._reopen(push)
        self.size = os.fstat(self._fd).st_size
        if self.size < self.offset:
            self.offset = 0
            push(self._header(reset="truncated"), b"")
            return True
        if self.size == self.offset:
            return self._reopen(push)
        start, stop = self._data()
        stop = min(stop, start + self.credit, start + protocol.MAX_PAYLOAD)
        data = os.pread(self._fd, stop - start, start)
        # A hole may have been punched while we read: then these may be zeros that nobody wrote.
        after = self._data()
        if data and (after[0] != start or after[1] < start + len(data)):
            return True
        gap = start - self.offset
        self.offset = start
        if data or gap:
            push(self._header(gap=gap) if gap else self._header(), data)
        self.offset += len(data)
        self.credit -= len(data)
        return bool(data or gap)

    def _data(self) -> Tuple[int, int]:
        assert self._fd is not None
        found = linux.data_range(self._fd, self.offset, self.size)
        return found if found is not None else (self.size, self.size)

    def _reopen(self, push: Push) -> bool:
        """At the end of what is open: whether the name means another file by now."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        if (found.st_dev, found.st_ino) == self._file:
            return False
        fd = open_regular(self._path)
        if fd is None:
            return False
        known = self._fd is not None or self._left is not None
        if self._fd is not None:
            # What was written to the old file between our look at its size and the new name.
            if os.fstat(self._fd).st_size > self.offset:
                os.close(fd)
                return True
            os.close(self._fd)
        self._fd = fd
        now = os.fstat(fd)
        self._file, self.offset = (now.st_dev, now.st_ino), 0
        left, self._left = self._left, None
        if left is not None and left[0] == self._file:
            self.offset = left[1]  # it came back; a size below that is told of as truncated
        elif known:
            push(self._header(reset="rotated"), b"")
        return True
