"""The colours that a log asks for, as the theme has them: readable on its background, and apart for colour-blind eyes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache

from rich.color import Color as RichColour
from rich.segment import Segment
from rich.style import Style as RichStyle
from rich.text import Text
from textual.color import Color, ColorParseError
from textual.strip import Strip

from dflash_tui.app.widgets.log_rows import cells, drawn_text
from dflash_tui.app.widgets.log_search import Match
from dflash_tui.fleet.logline import Colour, Line, Style

# The sixteen colours of a terminal by the theme's variables: black to white, then the bright ones.
_TEXT = (
    "text-muted",
    "text-error",
    "text-success",
    "text-warning",
    "text-primary",
    "text-secondary",
    "text-accent",
    "foreground",
)
_GROUND = (
    "background",
    "error-muted",
    "success-muted",
    "warning-muted",
    "primary-muted",
    "secondary-muted",
    "accent-muted",
    "panel",
)


PARTS = ("match", "match-current", "gap", "note", "cut")


class Palette:
    """Paints lines under one theme; another theme needs another palette.

    variables: the theme's; parts: the styles of `PARTS`.
    """

    def __init__(self, variables: dict[str, str], parts: dict[str, RichStyle]) -> None:
        self._variables = variables
        self._parts = parts
        self.style = lru_cache(maxsize=4096)(self._style)

    def paint(self, line: Line, matches: Iterable[Match] = (), current: Match | None = None) -> Text:
        """A line with its colours, what is looked for in it, and what was cut off of it."""
        text = Text(drawn_text(line), no_wrap=True, end="")
        if line.kind != "text":
            text.stylize(self._parts[line.kind])
        for start, end, style in line.spans:
            text.stylize(self.style(style), start, end)
        if line.cut:
            text.stylize(self._parts["cut"], len(line.text))
        for match in matches:
            text.stylize(self._parts["match-current" if match == current else "match"], match.start, match.end)
        return text

    def _style(self, style: Style) -> RichStyle:
        return RichStyle(
            color=self._colour(style.colour, _TEXT),
            bgcolor=self._colour(style.background, _GROUND),
            bold=style.bold or None,
            dim=style.dim or None,
            italic=style.italic or None,
            underline=style.underline or None,
            reverse=style.reverse or None,
            strike=style.strike or None,
        )

    def _colour(self, colour: Colour | None, names: tuple[str, ...]) -> RichColour | None:
        if colour is None:
            return None
        if isinstance(colour, tuple):
            return RichColour.from_rgb(*colour)
        if colour >= 16:
            return RichColour.from_rgb(*RichColour.from_ansi(colour).get_truecolor())
        try:
            return Color.parse(self._variables[names[colour % 8]]).rich_color
        except (KeyError, ColorParseError):
            return None  # "auto" and themes without that variable: the text's own colour


def strip_of(text: Text, plain: RichStyle, left: int, width: int, row: int) -> Strip:
    """Columns [left, left + width) of a text as a row of the screen; `row` in the log is what a selection goes by."""
    ascii_only = text.plain.isascii()
    if ascii_only and not text.spans:  # most lines of most logs
        part = text.plain[left : left + width].ljust(width)
        return Strip([Segment(part, plain + RichStyle.from_meta({"offset": (left, row)}))], width)
    text.stylize_before(plain)
    if ascii_only:
        text = text[left : left + width]
    pieces = _segments(text)
    if not ascii_only:
        pieces = [
            (part, style) for part, style, _ in Strip([Segment(*piece) for piece in pieces]).crop(left, left + width)
        ]
    segments, x, used = [], left, 0
    for part, style in pieces:
        segments.append(Segment(part, (style or plain) + RichStyle.from_meta({"offset": (x, row)})))
        x += len(part)
        used += cells(part)
    if used < width:
        # One strip of the right width costs half of what cutting and padding it step by step does.
        segments.append(Segment(" " * (width - used), plain + RichStyle.from_meta({"offset": (x, row)})))
    return Strip(segments, width)


def _segments(text: Text) -> list[tuple[str, RichStyle | None]]:
    """The text in parts of one style each, in order."""
    spans = [span for span in text.spans if span.end > span.start]
    cuts = sorted({0, len(text.plain), *(span.start for span in spans), *(span.end for span in spans)})
    found: list[tuple[str, RichStyle | None]] = []
    for start, end in itertools.pairwise(cuts):
        styles = [span.style for span in spans if span.start <= start and span.end >= end]
        found.append(
            (text.plain[start:end], RichStyle.combine([style for style in styles if isinstance(style, RichStyle)]))
        )
    return found
