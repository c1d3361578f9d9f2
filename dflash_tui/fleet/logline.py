"""One line of a log as a terminal would show it: text and colours, no escape sequence, no control character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

LINE_LIMIT = 8192  # characters of one line that are kept
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
HAS_CONTROL = re.compile(f"[{_CONTROL}]")
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

_MAY_GO_UP = re.compile(r"\x1b(?:\[[0-9]{0,3})?")


class OpenLine:
    """The line that is being written: a row of characters and a cursor, as in a terminal."""

    def __init__(self, offset: int, limit: int) -> None:
        self.offset = offset
        self._limit = limit
        self._characters: list[str] = []
        self._styles: list[Style] = []
        self.column = 0
        self._extent = 0
        self._waiting = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def again(cls, line: Line, column: int, limit: int) -> OpenLine:
        """A line that the cursor comes back to, in `column`."""
        opened = cls(line.offset, limit)
        opened._characters = list(line.text)
        opened._styles = [PLAIN] * len(line.text)
        for start, end, style in line.spans:
            opened._styles[start:end] = [style] * (end - start)
        opened._extent = len(line.text) + line.cut
        opened.column = column
        return opened

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

    def take_escape(self) -> bytes:
        """The beginning of an escape sequence that waits for its rest, which may move the cursor to another line."""
        if not _MAY_GO_UP.fullmatch(self._waiting):
            return b""
        waiting, self._waiting = self._waiting, ""
        return waiting.encode()

    def _put(self, text: str, style: Style) -> None:
        start = self.column
        self.column += len(text)
        self._extent = max(self._extent, self.column)
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
            self.column = 0
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\t":
            self._put(" " * (TAB - self.column % TAB), style)

    def _control_sequence(self, parameters: str, final: str, style: Style) -> Style:
        if final == "m":
            return _sgr(style, parameters)
        if final == "K":
            self._erase(parameters)
        elif final in "CDG":
            amount = min(int(parameters), self._limit) if parameters.isdecimal() else 1
            column = {"C": self.column + max(amount, 1), "D": self.column - max(amount, 1), "G": amount - 1}[final]
            self.column = max(0, column)
        return style

    def _erase(self, parameters: str) -> None:
        if parameters in ("", "0"):
            del self._characters[self.column :], self._styles[self.column :]
            self._extent = min(self._extent, self.column)
        elif parameters == "2":
            self._characters, self._styles, self._extent = [], [], 0
        elif parameters == "1":
            end = min(self.column + 1, len(self._characters))
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
