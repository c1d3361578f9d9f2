"""Which row of the screen shows which part of which line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from rich.cells import cell_len, chop_cells

from dflash_tui.fleet.logline import Line


def drawn_text(line: Line) -> str:
    """A line as it is drawn: with a mark where it was cut."""
    return f"{line.text} … {line.cut:,} more characters" if line.cut else line.text


def cells(text: str) -> int:
    """Columns that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def pieces(text: str, width: int | None) -> list[str]:
    """The rows of a line on `width` columns; None: it is not wrapped."""
    if width is None or cells(text) <= width:
        return [text]
    if text.isascii():
        return [text[start : start + width] for start in range(0, len(text), width)]
    # Two columns are the least that every character fits into.
    return chop_cells(text, max(2, width))


class RowIndex:
    """Heights of lines, so that a row is found among them without counting. Not wrapped, every line has one row."""

    def __init__(self) -> None:
        self.width: int | None = None
        self._count = 0
        self._ends: list[int] = []  # rows of all lines up to this one, `_base` included
        self._base = 0
        self._open: list[int] = []  # rows of the lines after those, which may change

    def rebuild(self, texts: Iterable[str], count: int, width: int | None) -> None:
        """Forgets all and measures anew."""
        self.width, self._count, self._ends, self._base, self._open = width, 0, [], 0, []
        if width is None:
            self._count = count
        else:
            self.append(texts)

    def append(self, texts: Iterable[str]) -> None:
        """Adds lines at the end."""
        end = self._finished + self._base
        for text in texts:
            self._count += 1
            if self.width is not None:
                end += len(pieces(text, self.width))
                self._ends.append(end)

    def cut(self, count: int) -> None:
        """Keeps the first `count` lines."""
        self._count = count
        del self._ends[count:]

    def set_open(self, texts: Iterable[str]) -> None:
        """The lines after all others, which may change."""
        self._open = [len(pieces(text, self.width)) for text in texts]

    def drop(self, count: int) -> int:
        """Takes lines away at the top; returns how many rows these were."""
        rows = self.first_row(count)
        self._count -= count
        if self.width is not None and count:
            self._base = self._ends[count - 1]
            del self._ends[:count]
        return rows

    @property
    def rows(self) -> int:
        return self._finished + sum(self._open)

    @property
    def _finished(self) -> int:
        if self.width is None:
            return self._count
        return self._ends[-1] - self._base if self._ends else 0

    def first_row(self, line: int) -> int:
        """The first row of a line; the number of all rows where `line` is one past the last."""
        if self.width is None:
            return line
        if line > self._count:
            return self._finished + sum(self._open[: line - self._count])
        return self._ends[line - 1] - self._base if line else 0

    def locate(self, row: int) -> tuple[int, int]:
        """The line that a row belongs to, and which of its rows it is."""
        if self.width is None:
            return row, 0
        line = bisect_right(self._ends, row + self._base)
        while line - self._count < len(self._open) - 1 and row >= self.first_row(line + 1):
            line += 1
        return line, row - self.first_row(line)
