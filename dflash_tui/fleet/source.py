"""Files of a node as lines: what names a place in one, and text that is safe to draw and still shows what is in the file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

# A frame of a traceback, as Python prints it, on whatever line of a log.
FRAME = r'\bFile "(?P<file>[^"\n]+)", line (?P<line>[0-9]{1,9})'
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>[0-9]{1,9})", re.DOTALL)
_TAB = 8
# What would steer a terminal, turn the direction of text round or cannot be seen.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class Place(NamedTuple):
    """A line of a file as somebody wrote it; None: no line is named."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class SourceText:
    """Bytes of a text file around a line of it. first_line: the number of the line that begins at `offset`.

    gap_bytes: in a hole of the file, and not in `data`. `data` is what the node wrote: never markup. dev, ino: which file it is.
    """

    path: str
    line: int
    first_line: int
    offset: int
    size: int
    data: bytes = field(repr=False)
    gap_bytes: int = 0
    dev: int = 0
    ino: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.gap_bytes + len(self.data)

    @property
    def left_off(self) -> int:
        """Bytes after these."""
        return max(0, self.size - self.end)


def place_of(text: str) -> Place:
    """FILE, or FILE:LINE. A line 0 is none of a file."""
    found = _PLACE.fullmatch(text)
    if found is None or int(found["line"]) == 0:
        return Place(text)
    return Place(found["file"], int(found["line"]))


def lines_of(data: bytes) -> list[str]:
    """The lines of a text as Python counts them, safe to draw."""
    lines = data.decode("utf-8", "replace").split("\n")
    if lines[-1] == "" and len(lines) > 1:
        lines.pop()
    return [safe(line.removesuffix("\r")) for line in lines]


def safe(line: str) -> str:
    """A line as it is drawn: tabs as blanks, and a sign in the place of each character that would not be seen as one.

    A source that hides something (an escape sequence, text that runs backwards) is shown with what it hides.
    """
    if line.isprintable():
        return line
    return _UNSAFE.sub(_sign, line.expandtabs(_TAB))


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)  # its picture: U+241B is ESC's
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"<U+{code:04X}>"
