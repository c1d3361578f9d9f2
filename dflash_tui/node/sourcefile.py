"""A text file at one of its lines: where that line is, without sending what stands before it.

Lines are counted as Python counts them in a traceback, by their newlines. Only what stands before the line is read, and
holes of a sparse file are not, so that the line of a large file costs what its offset costs.
"""

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from dflash_tui.node import linux, paths, protocol, tails
from dflash_tui.node.protocol import Refused

LIMIT_S = 60.0  # of counting lines
MOST_BEFORE = 1 << 20
_CHUNK = 1 << 20
_HEAD = 8192  # bytes by which a binary file shows itself


def resolve(path: Any, folder: Optional[str] = None) -> str:
    """The absolute path of what a request or a traceback names. Raises Refused.

    folder: of the job that named it: a relative path is looked for where the job was started, and then in this folder.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise Refused(protocol.BAD_REQUEST, "a request for a file must name a job or a path, not %r" % (path,))
    expanded = os.path.expanduser(path)
    if folder is None or os.path.isabs(expanded):
        found = os.path.abspath(expanded)
        if not os.path.isabs(expanded):
            _refuse_unwritten(path, found)
        return found
    places = [place for place in (_started_in(folder), folder) if place]
    candidates = [os.path.normpath(os.path.join(place, expanded)) for place in places]
    for candidate in candidates:
        if os.path.lexists(candidate):
            return candidate
    _refuse_unwritten(path, candidates[0])
    raise Refused(
        protocol.NOT_FOUND,
        "%s is a relative path, and neither %s has it" % (path, " nor ".join(places)),
        "find out in which folder its process ran, and give the whole path",
    )


def _refuse_unwritten(path: str, found: str) -> None:
    """Python calls code that it read from no file "<string>", "<stdin>" or "<frozen …>"."""
    if path.startswith("<") and path.endswith(">") and not os.path.lexists(found):
        raise Refused(
            protocol.NOT_FOUND,
            "%s is code that was read from no file" % path,
            "look at the frame before it: that is where the code was made",
        )


def _started_in(folder: str) -> str:
    launch = paths.read_json(os.path.join(folder, "launch.json")) or {}
    return str(launch.get("cwd") or "")


def locate(path: str, line: int, before: int, limit_s: float = LIMIT_S) -> Tuple[Dict[str, Any], bytes]:
    """Where a line of a text file is, and the first bytes of its surroundings. Raises Refused and OSError.

    line: from 1. before: so many bytes before the line are wanted, less what belongs to a line that begins earlier.
    The fields: `path`, `dev`, `ino`, `size`; `line` and `line_offset`; `first_line`, the line that begins at `offset`, where
    the bytes begin too (after a hole of `gap` bytes).
    """
    fd = tails.open_regular(path)
    if fd is None:
        raise Refused(protocol.NOT_FOUND, "there is no file %s" % path, "check the path")
    try:
        found = os.fstat(fd)
        size = found.st_size or _size_unknown(fd, path)
        _check_text(path, 0, _data(fd, 0, min(size, _HEAD))[1])
        at = _offset_of(fd, path, size, line, time.monotonic() + limit_s)
        start, first = _surroundings(fd, at, line, before)
        offset, data = _data(fd, start, min(size, start + protocol.MAX_PAYLOAD))
        _check_text(path, offset, data)
    finally:
        os.close(fd)
    fields = {"path": path, "dev": found.st_dev, "ino": found.st_ino, "size": size, "line": line, "line_offset": at}
    return dict(fields, first_line=first, offset=start, gap=offset - start), data


def _size_unknown(fd: int, path: str) -> int:
    """The size of an empty file, or of one of /proc, which says 0."""
    size = len(os.pread(fd, protocol.MAX_PAYLOAD, 0))
    if size == protocol.MAX_PAYLOAD:
        raise Refused(
            protocol.BAD_REQUEST,
            "%s does not say how long it is" % path,
            "copy it into a file on the node, and read that",
        )
    return size


def _data(fd: int, offset: int, stop: int) -> Tuple[int, bytes]:
    """Where the first bytes in [offset, stop) are that are no hole, and they."""
    while offset < stop:
        start, end = linux.data_range(fd, offset, stop) or (stop, stop)
        data = os.pread(fd, min(end - start, _CHUNK), start)
        # A hole may have been punched while we read: then these may be zeros that nobody wrote.
        if not data or linux.data_range(fd, start, start + len(data)) == (start, start + len(data)):
            return start, data
    return offset, b""


def _check_text(path: str, offset: int, data: bytes) -> None:
    zero = data.find(b"\0")
    if zero >= 0:
        raise Refused(
            protocol.BAD_REQUEST,
            "%s is no text: byte %d of it is 0" % (path, offset + zero),
            "give the path of a text file",
        )


def _offset_of(fd: int, path: str, size: int, line: int, deadline: float) -> int:
    """Where a line begins. Raises Refused where the file has fewer, or they are not counted in time."""
    needed, offset, last = line - 1, 0, b""
    while needed and offset < size:
        start, data = _data(fd, offset, size)
        if not data:
            break
        here = data.count(b"\n")
        if here >= needed:
            rest = data.split(b"\n", needed)[-1]
            offset = start + len(data) - len(rest)
            needed, last = 0, b"\n"
            break
        needed, offset, last = needed - here, start + len(data), data[-1:]
        if time.monotonic() > deadline:
            raise Refused(
                protocol.TIMED_OUT,
                "line %d of %s was not reached within %g s: line %d is at byte %d of %d"
                % (line, path, LIMIT_S, line - needed, offset, size),
                "name a line before that one",
            )
    if needed == 0 and (line == 1 or offset < size):
        return offset
    # A newline at the end begins no line.
    lines = line - needed - (1 if last == b"\n" else 0)
    raise Refused(
        protocol.BAD_REQUEST,
        "%s has no line %d: it has %s" % (path, line, "1 line" if lines == 1 else "%d lines" % lines),
        "name one from 1 to %d" % max(lines, 1),
    )


def _surroundings(fd: int, at: int, line: int, before: int) -> Tuple[int, int]:
    """The offset and the number of the first line that begins at most `before` bytes before `at`."""
    low = max(at - before, 0)
    pieces: List[bytes] = []
    while low + sum(map(len, pieces)) < at:
        data = os.pread(fd, at - low - sum(map(len, pieces)), low + sum(map(len, pieces)))
        if not data:
            return at, line
        pieces.append(data)
    data = b"".join(pieces)
    if low > 0:
        newline = data.find(b"\n")
        if newline < 0:
            return at, line
        low, data = low + newline + 1, data[newline + 1 :]
    return low, line - data.count(b"\n")
