"""A log in lines, however large it is, however long its lines are."""

import errno
import os
import stat
from typing import Iterator, NamedTuple, Optional, Tuple

HEAD_BYTES = 32 << 20  # root causes stand near the beginning
TAIL_BYTES = 16 << 20
LONGEST = 8 << 10
_CHUNK = 1 << 20


class Raw(NamedTuple):
    """number: of the line, from 1. data: without its end; None where bytes before this line were not read."""

    number: int
    data: Optional[bytes]


class Log:
    """A file as lines: its first and its last part; between them newlines are counted. Raises OSError.

    lines: how many were met. skipped_bytes: not looked at, holes included.
    """

    def __init__(self, path: str, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        # Without O_NONBLOCK the open of a pipe waits for somebody who writes to it.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "is not a regular file", path)
        self._size = found.st_size
        self._head = head
        self._tail_from = max(self._size - tail, head)
        self.lines = 0
        self.skipped_bytes = 0

    def close(self) -> None:
        os.close(self._fd)

    def __iter__(self) -> Iterator[Raw]:
        pending = bytearray()
        begun = False
        after = 0
        for offset, chunk in self._chunks():
            skipped = offset > after
            after = offset + len(chunk)
            unread = offset >= self._head and after <= self._tail_from
            if skipped or unread:
                if begun:
                    self.lines += 1
                    yield Raw(self.lines, _shown(pending))
                    self.lines -= 1 if unread else 0
                    pending, begun = bytearray(), False
                yield Raw(self.lines, None)
            if unread:
                self.skipped_bytes += len(chunk)
                self.lines += chunk.count(b"\n")
                continue
            first, *rest = chunk.split(b"\n")
            _add(pending, first)
            begun = begun or bool(first)
            for part in rest:
                self.lines += 1
                yield Raw(self.lines, _shown(pending))
                pending = bytearray(part)
                begun = bool(part)
        if begun:
            self.lines += 1
            yield Raw(self.lines, _shown(pending))

    def _chunks(self) -> Iterator[Tuple[int, bytes]]:
        """(offset, bytes) of what the file holds; what was given back to the disk is passed over."""
        offset = 0
        while offset < self._size:
            start = self._data_from(offset)
            self.skipped_bytes += start - offset
            offset = start
            # No chunk reaches over the edge of a part.
            edges = (edge for edge in (self._head, self._tail_from, self._size) if edge > offset)
            chunk = os.pread(self._fd, min(_CHUNK, min(edges, default=offset) - offset), offset)
            if not chunk:
                return  # it became shorter meanwhile
            yield offset, chunk
            offset += len(chunk)

    def _data_from(self, offset: int) -> int:
        try:
            return min(os.lseek(self._fd, offset, os.SEEK_DATA), self._size)
        except OSError as error:
            return self._size if error.errno == errno.ENXIO else offset  # ENXIO: nothing but a hole to the end


def _add(pending: bytearray, part: bytes) -> None:
    pending += part
    if len(pending) > _CHUNK:
        redrawn = pending.rfind(b"\r")
        if redrawn > 0:
            del pending[:redrawn]
        del pending[LONGEST:]


def _shown(line: bytearray) -> bytes:
    """What a terminal would show of it: after a carriage return a line is written anew."""
    text = bytes(line).strip(b"\0").rstrip(b"\r")
    return text[text.rfind(b"\r") + 1 :][:LONGEST]
