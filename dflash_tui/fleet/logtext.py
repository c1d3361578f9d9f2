"""A window on a log: its bytes become lines that are safe to draw, and no more is kept than the limit allows.

Why our own: `rich.ansi` forgets its state between chunks, knows no carriage return and lets control characters through; a
terminal emulator (pyte) keeps a screen, not a log. Here a line is what a terminal would show of it, with its colours, and
every other escape sequence and control character is gone. The same bytes give the same lines, however they are cut.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dflash_tui.fleet.format import size
from dflash_tui.fleet.logline import HAS_CONTROL, LINE_LIMIT, PLAIN, Line, OpenLine, Span

TEXT_LIMIT = 16 * 1024 * 1024  # bytes kept by one window
LINE_COST = 100  # bytes of a line beside its text
SLACK = 8  # a window grows by 1/SLACK before it is trimmed, so that trimming costs nothing per line
MOST_UP = 64  # lines that a cursor may go up: no progress display is higher

# Cursor up (CUU), and up to the first column (CPL): how bars that stand one under the other are drawn.
_UP = re.compile(rb"\x1b\[([0-9]{0,3})([AF])")


class Change(NamedTuple):
    """What an update did: lines that came or went at the top, and whether the bottom was cut off."""

    top: int = 0  # lines added at the top; negative: taken away there
    bottom_cut: bool = False


class LogText:
    """The bytes [start, end) of a file as lines.

    limit: bytes that the lines may take, as `LINE_COST` counts them; a window that is over it loses lines at the end that is
    away from where it grows. The last lines may still be open: one that has no newline yet, and those that the cursor went up
    over (bars that stand one under the other).
    """

    def __init__(self, limit: int = TEXT_LIMIT, line_limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._line_limit = line_limit
        self.clear(0)

    def clear(self, offset: int) -> None:
        """Empties the window; the file goes on at `offset`."""
        self._lines: list[Line] = []
        self._open: OpenLine | None = None  # where the cursor is
        self._below: list[OpenLine] = []  # lines under the cursor; none where no line is open
        self._lowest = self._dropped = 0
        self._style = PLAIN
        self._cost = 0
        self._first_is_partial = False
        self.start = self.end = offset

    def __len__(self) -> int:
        return len(self._lines) + (self._open is not None) + len(self._below)

    def __getitem__(self, index: int) -> Line:
        """The line of an index from 0 on. Raises IndexError."""
        below = index - len(self._lines)
        if below == 0 and self._open is not None:
            return self._open.line()
        return self._below[below - 1].line() if below > 0 else self._lines[index]

    @property
    def finished(self) -> int:
        """How many lines are not open: they change no more unless the cursor goes up into them."""
        return len(self._lines)

    def mark(self) -> None:
        """From here on `kept` is counted."""
        self._lowest, self._dropped = len(self._lines), 0

    @property
    def kept(self) -> int:
        """Of the lines that were finished at the mark: how many, from the first on, the cursor did not go up into."""
        return self._lowest

    @property
    def end_of_finished(self) -> int:
        """Where the open line begins, or the window ends."""
        return self.end if self._open is None else self._open.offset

    @property
    def room(self) -> int:
        """Bytes that can be fed and surely cost no line at the other end."""
        return max(0, (self._limit - self._cost) // (LINE_COST + 1))

    @property
    def older_end(self) -> int:
        """Bytes that are to be put before the window must end here: its start, or the end of a first line that began before it."""
        if not self._first_is_partial or len(self) < 2:
            return self.start
        return self._lines[1].offset if len(self._lines) > 1 else self.end_of_finished

    def feed(self, data: bytes, offset: int | None = None) -> Change:
        """Puts the bytes that stand at `offset` (None: at the end) after the window.

        What overlaps the window is not taken twice; what is missing between is told by a line.
        """
        offset = self.end if offset is None else offset
        if offset > self.end and len(self):
            self.gap(offset - self.end, "not shown")
        elif offset < self.end and len(self):
            data = data[self.end - offset :]
            offset = self.end
        if not len(self):
            self.start = self.end = offset
            self._first_is_partial = offset > 0
        if self._open is not None and (begun := self._open.take_escape()):
            data = begun + data
            self.end -= len(begun)
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._finish(part)
            self.end += len(part) + 1
        if rest:
            self._write(rest)
            self.end += len(rest)
        return Change(top=-self._trim_top())

    def gap(self, length: int, why: str = "given back to the disk") -> Change:
        """Tells that `length` bytes after the window are not there."""
        if not len(self):
            self.start = self.end
        self._close_open()
        self._add(Line(f"… {size(length)} {why} …", self.end, kind="gap"))
        self.end += length
        return Change(top=-self._trim_top())

    def note(self, text: str) -> Change:
        """Puts a line of the console's own after the window."""
        self._close_open()
        self._add(Line(text, self.end, kind="note"))
        return Change(top=-self._trim_top())

    def prepend(self, data: bytes, offset: int) -> Change:
        """Puts older bytes, which end at `older_end`, before the window. Raises ValueError where they do not."""
        if offset + len(data) != self.older_end:
            raise ValueError(f"bytes {offset} to {offset + len(data)} do not end at {self.older_end}")
        older = LogText(limit=1 << 62, line_limit=self._line_limit)
        older.feed(data, offset)
        older._close_open()
        replaced = 1 if self.older_end != self.start else 0
        self._cost += older._cost - sum(map(_cost, self._lines[:replaced]))
        self._lines[:replaced] = older._lines
        self.start = offset
        self._first_is_partial = offset > 0
        return Change(top=len(older._lines) - replaced, bottom_cut=self._trim_bottom())

    def _finish(self, part: bytes) -> None:
        """Ends a line with `part`, the bytes before a newline."""
        if self._open is None:
            text = part.decode("utf-8", "replace").rstrip("\r")
            if text.isprintable() or not HAS_CONTROL.search(text):
                kept = text[: self._line_limit]
                spans = (Span(0, len(kept), self._style),) if kept and self._style is not PLAIN else ()
                self._add(Line(kept, self.end, spans, len(text) - len(kept)))
                return
        opened = self._write(part, last=True)
        self._add(opened.line())
        self._open = self._below.pop(0) if self._below else None
        if self._open is not None:
            self._open.column = 0

    def _write(self, part: bytes, *, last: bool = False) -> OpenLine:
        """Writes `part`, which holds no newline; returns the line where the cursor is then."""
        start = 0
        if b"\x1b[" in part:
            for up in _UP.finditer(part):
                opened = self._put(part[start : up.start()], last=True)
                self._go_up(opened, int(up[1] or b"1"), 0 if up[2] == b"F" else opened.column)
                start = up.end()
        return self._put(part[start:], last=last)

    def _put(self, part: bytes, *, last: bool) -> OpenLine:
        if self._open is None:
            self._open = OpenLine(self.end, self._line_limit)
        self._style = self._open.feed(part, self._style, last=last)
        return self._open

    def _go_up(self, opened: OpenLine, count: int, column: int) -> None:
        for _ in range(max(1, count)):
            # A first line of which the window has only a part stays as it is: older bytes will take its place.
            if (
                len(self._lines) <= self._first_is_partial
                or len(self._below) >= MOST_UP
                or self._lines[-1].kind != "text"
            ):
                break
            line = self._lines.pop()
            self._cost -= _cost(line)
            self._below.insert(0, opened)
            self._open = opened = OpenLine.again(line, column, self._line_limit)
        opened.column = column
        self._lowest = min(self._lowest, self._dropped + len(self._lines))

    def _close_open(self) -> None:
        while self._open is not None:
            self._finish(b"")

    def _add(self, line: Line) -> None:
        self._lines.append(line)
        self._cost += _cost(line)

    def _trim_top(self) -> int:
        if self._cost <= self._limit + self._limit // SLACK:
            return 0
        count = 0
        while self._cost > self._limit and count < len(self._lines) - 1:
            self._cost -= _cost(self._lines[count])
            count += 1
        del self._lines[:count]
        self._dropped += count
        self.start = self._lines[0].offset
        self._first_is_partial = self._first_is_partial and not count
        return count

    def _trim_bottom(self) -> bool:
        if self._cost <= self._limit + self._limit // SLACK:
            return False
        count = len(self._lines)
        while self._cost > self._limit and count > 1:
            count -= 1
            self._cost -= _cost(self._lines[count])
        if count == len(self._lines):
            return False
        self.end = self._lines[count].offset
        del self._lines[count:]
        self._open = None
        self._below.clear()
        self._style = PLAIN
        return True


def _cost(line: Line) -> int:
    width = 1 if line.text.isascii() else 4
    return len(line.text) * width + LINE_COST * (1 + len(line.spans))
