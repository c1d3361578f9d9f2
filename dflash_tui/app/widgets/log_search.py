"""Looking for a regular expression in the lines of a log or a source."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from dflash_tui.fleet.format import size
from dflash_tui.fleet.logline import Line


class Lines(Protocol):
    """What can be looked through."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Line: ...


class Match(NamedTuple):
    """Characters [start, end) of a line, which is told by its number from the top."""

    line: int
    start: int
    end: int


class LogSearch:
    """What is looked for, where it was last found, and in `message` what there is to say about it."""

    def __init__(self, text: Lines) -> None:
        self._text = text
        self._pattern: re.Pattern[str] | None = None
        self.match: Match | None = None
        self.message = ""

    def set(self, pattern: str) -> bool:
        """Takes a regular expression; without a capital it matches both cases. False, and a message, where it is none."""
        self._pattern = self.match = None
        self.message = ""
        if not pattern:
            return False
        try:
            self._pattern = re.compile(pattern, 0 if any(map(str.isupper, pattern)) else re.IGNORECASE)
        except re.error as error:
            self.message = f"not a regular expression: {error}"
            return False
        return True

    @property
    def active(self) -> bool:
        """Whether anything is looked for."""
        return self._pattern is not None

    def matches(self, line: int) -> list[Match]:
        """All that match in a line. What matches nothing but an empty text is passed over."""
        if self._pattern is None:
            return []
        spans = (found.span() for found in self._pattern.finditer(self._text[line].text))
        return [Match(line, start, end) for start, end in spans if end > start]

    def find(self, direction: int, line: int, *, unseen: int = 0) -> Match | None:
        """The next match (1), or the one before (-1), from the last one or from `line` on; goes on from the other end.

        unseen: bytes of the file that are not among the lines; whoever finds nothing is told of them.
        """
        if self._pattern is None:
            self.message = self.message or "nothing is looked for yet: press / first"
            return None
        count = len(self._text)
        here = self.match.line if self.match else line
        for step in range(count + 1 if count else 0):
            place = here + direction * step
            found = self.matches(place % count)
            if self.match and step == 0:
                found = [match for match in found if (match.start - self.match.start) * direction > 0]
            if found:
                self.match = found[0 if direction > 0 else -1]
                self.message = "" if place == place % count else "went on from the other end"
                return self.match
        self.match = None
        self.message = "not found"
        if unseen:
            self.message += f" in the lines loaded; {size(unseen)} of the file were not searched"
        return None

    def shift(self, lines: int) -> None:
        """Lines came (or, negative, went) at the top."""
        if self.match is not None:
            index = self.match.line + lines
            self.match = self.match._replace(line=index) if index >= 0 else None

    def forget_place(self) -> None:
        """The lines are others now; what is looked for stays."""
        self.match = None
