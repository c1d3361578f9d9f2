"""A window on a log: its bytes become lines that are safe to draw, and no more is kept than the limit allows.

Why our own: `rich.ansi` forgets its state between chunks, knows no carriage return and lets control characters through; a
terminal emulator (pyte) keeps a screen, not a log. Here a line is what a terminal would show of it, with its colours, and
every other escape sequence and control character is gone. The same bytes give the same lines, however they are cut.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dflash_tui.fleet.format import size

LINE_LIMIT = 8192  # characters of one line that are kept
TEXT_LIMIT = 16 * 1024 * 1024  # bytes kept by one window
LINE_COST = 100  # bytes of a line beside its text
SLACK = 8  # a window grows by 1/SLACK before it is trimmed, so that trimming costs nothing per line
STRING_LIMIT = 4096  # characters of an escape sequence that carries a text
TAB = 8

Colour = int | tuple[int, int, int]
Kind = Literal["text", "gap", "note"]


@dataclass(frozen=True, slots=True)
class Style:
    """Colours are indices of the 256-colour palette (0 to 15 are the terminal's own) or red, green and blue; None is the default."""

    colour: Colour | None = None
    background: Colour | None = None
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underline: bool = False
    reverse: bool = False
    strike: bool = False


PLAIN = Style()


class Span(NamedTuple):
    """Characters [start, end) of a line and how they look."""

    start: int
    end: int
    style: Style


class Line(NamedTuple):
    """One line. offset: its first byte in the file; cut: characters beyond `LINE_LIMIT` that were left off."""

    text: str
    offset: int
    spans: tuple[Span, ...] = ()
    cut: int = 0
    kind: Kind = "text"


# Besides C0 and C1, what turns the direction of text round or breaks a line.
_CONTROL = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
_HAS_CONTROL = re.compile(f"[{_CONTROL}]")
_STRING = rf"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]{{0,{STRING_LIMIT}}}"
_TOKEN = re.compile(
    rf"(?P<text>[^{_CONTROL}]+)"
    r"|(?:\x1b\[|\x9b)(?P<csi>[0-?]{0,256})[ -/]{0,8}(?P<final>[@-~])"
    rf"|(?P<string>{_STRING}(?:\x07|\x1b\\|\x9c))"
    r"|(?P<escape>\x1b[ -/]{0,8}[0-~])"
    r"|(?P<control>.)",
    re.DOTALL,
)
# The beginning of an escape sequence at the end of what has arrived.
_UNFINISHED = re.compile(rf"(?:(?:\x1b\[|\x9b)[0-?]{{0,256}}[ -/]{{0,8}}|{_STRING}\x1b?|\x1b[ -/]{{0,8}})\Z")


class _OpenLine:
    """The line that is being written: a row of characters and a cursor, as in a terminal."""

    def __init__(self, offset: int, limit: int) -> None:
        self.offset = offset
        self._limit = limit
        self._characters: list[str] = []
        self._styles: list[Style] = []
        self._column = 0
        self._extent = 0
        self._waiting = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, style: Style, *, last: bool = False) -> Style:
        """Writes `data`, which holds no newline; returns the style at its end."""
        text = self._waiting + self._decoder.decode(data, last)
        self._waiting = ""
        if not last and (unfinished := _UNFINISHED.search(text)):
            self._waiting = unfinished[0]
            text = text[: unfinished.start()]
        for token in _TOKEN.finditer(text):
            kind = token.lastgroup
            if kind == "text":
                self._put(token[0], style)
            elif kind == "final":
                style = self._control_sequence(token["csi"], token["final"], style)
            elif kind == "control":
                self._control_character(token[0], style)
        return style

    def _put(self, text: str, style: Style) -> None:
        start = self._column
        self._column += len(text)
        self._extent = max(self._extent, self._column)
        if start >= self._limit:
            return
        text = text[: self._limit - start]
        missing = start - len(self._characters)
        if missing > 0:
            self._characters.extend(" " * missing)
            self._styles.extend([PLAIN] * missing)
        end = start + len(text)
        self._characters[start:end] = text
        self._styles[start:end] = [style] * len(text)

    def _control_character(self, character: str, style: Style) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\t":
            self._put(" " * (TAB - self._column % TAB), style)

    def _control_sequence(self, parameters: str, final: str, style: Style) -> Style:
        if final == "m":
            return _sgr(style, parameters)
        if final == "K":
            self._erase(parameters)
        elif final in "CDG":
            amount = min(int(parameters), self._limit) if parameters.isdecimal() else 1
            column = {"C": self._column + max(amount, 1), "D": self._column - max(amount, 1), "G": amount - 1}[final]
            self._column = max(0, column)
        return style

    def _erase(self, parameters: str) -> None:
        if parameters in ("", "0"):
            del self._characters[self._column :], self._styles[self._column :]
            self._extent = min(self._extent, self._column)
        elif parameters == "2":
            self._characters, self._styles, self._extent = [], [], 0
        elif parameters == "1":
            end = min(self._column + 1, len(self._characters))
            self._characters[:end] = " " * end
            self._styles[:end] = [PLAIN] * end

    def line(self) -> Line:
        spans: list[Span] = []
        start = 0
        for index in range(1, len(self._styles) + 1):
            style = self._styles[start]
            if index == len(self._styles) or self._styles[index] is not style:
                if style is not PLAIN:
                    spans.append(Span(start, index, style))
                start = index
        cut = max(0, self._extent - self._limit)
        return Line("".join(self._characters), self.offset, tuple(spans), cut)


_FLAGS = {1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "reverse", 9: "strike"}
_FLAGS_OFF = {
    21: ("bold",),
    22: ("bold", "dim"),
    23: ("italic",),
    24: ("underline",),
    27: ("reverse",),
    29: ("strike",),
}


def _sgr(style: Style, parameters: str) -> Style:
    """The style after "select graphic rendition" (ECMA-48, 8.3.117); what is not known changes nothing."""
    rest = iter(parameters.split(";"))
    for part in rest:
        code, *details = map(_number, part.split(":"))
        if code == 0 and not details:
            style = PLAIN
        elif code in _FLAGS:
            style = replace(style, **{_FLAGS[code]: details[:1] != [0]})
        elif code in _FLAGS_OFF:
            style = replace(style, **dict.fromkeys(_FLAGS_OFF[code], False))
        elif code in (38, 48):
            colour = _colour(iter(details)) if details else _colour(map(_number, rest))
            if len(details) > 4 and details[0] == 2:  # ISO 8613-6: a colour space stands before the red
                colour = _colour(iter([2, *details[2:]]))
            if colour is not None:
                style = replace(style, colour=colour) if code == 38 else replace(style, background=colour)
        elif 30 <= code <= 39 or 90 <= code <= 97:
            style = replace(style, colour=None if code == 39 else code - 30 if code < 90 else code - 82)
        elif 40 <= code <= 49 or 100 <= code <= 107:
            style = replace(style, background=None if code == 49 else code - 40 if code < 100 else code - 92)
    return PLAIN if style == PLAIN else style


def _number(part: str) -> int:
    return int(part) if part.isdecimal() and len(part) < 5 else 0


def _colour(rest: Iterator[int]) -> Colour | None:
    mode = next(rest, 0)
    if mode == 5:
        return min(next(rest, 0), 255)
    if mode == 2:
        return min(next(rest, 0), 255), min(next(rest, 0), 255), min(next(rest, 0), 255)
    return None


class Change(NamedTuple):
    """What an update did: lines that came or went at the top, and whether the bottom was cut off."""

    top: int = 0  # lines added at the top; negative: taken away there
    bottom_cut: bool = False


class LogText:
    """The bytes [start, end) of a file as lines.

    limit: bytes that the lines may take, as `LINE_COST` counts them; a window that is over it loses lines at the end that is
    away from where it grows. The last line may still be open: it has no newline yet and can change.
    """

    def __init__(self, limit: int = TEXT_LIMIT, line_limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._line_limit = line_limit
        self.clear(0)

    def clear(self, offset: int) -> None:
        """Empties the window; the file goes on at `offset`."""
        self._lines: list[Line] = []
        self._open: _OpenLine | None = None
        self._style = PLAIN
        self._cost = 0
        self._first_is_partial = False
        self.start = self.end = offset

    def __len__(self) -> int:
        return len(self._lines) + (self._open is not None)

    def __getitem__(self, index: int) -> Line:
        """The line of an index from 0 on. Raises IndexError."""
        if index == len(self._lines) and self._open is not None:
            return self._open.line()
        return self._lines[index]

    @property
    def finished(self) -> int:
        """How many lines can change no more."""
        return len(self._lines)

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
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._finish(part)
            self.end += len(part) + 1
        if rest:
            if self._open is None:
                self._open = _OpenLine(self.end, self._line_limit)
            self._style = self._open.feed(rest, self._style)
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
            if text.isprintable() or not _HAS_CONTROL.search(text):
                kept = text[: self._line_limit]
                spans = (Span(0, len(kept), self._style),) if kept and self._style is not PLAIN else ()
                self._add(Line(kept, self.end, spans, len(text) - len(kept)))
                return
            self._open = _OpenLine(self.end, self._line_limit)
        self._style = self._open.feed(part, self._style, last=True)
        self._add(self._open.line())
        self._open = None

    def _close_open(self) -> None:
        if self._open is not None:
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
        self._style = PLAIN
        return True


def _cost(line: Line) -> int:
    width = 1 if line.text.isascii() else 4
    return len(line.text) * width + LINE_COST * (1 + len(line.spans))
