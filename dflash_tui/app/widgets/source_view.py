"""A text with line numbers, of which one line is marked. Read-only; only the rows that can be seen are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from dflash_tui.app.widgets.highlight import Spans
from dflash_tui.app.widgets.log_palette import PARTS, Palette, strip_of
from dflash_tui.app.widgets.log_rows import cells, drawn_text
from dflash_tui.app.widgets.log_search import LogSearch, Match
from dflash_tui.fleet.logline import LINE_LIMIT, Line

MARK = ">"
_LEAST_DIGITS = 4
_BESIDE_NUMBER = 3  # the mark before it, a blank and a rule after it


class SourceView(ScrollView, can_focus=True):
    """Shows lines; `first_line` is the number of the first of them."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"log--{part}" for part in PARTS} | {"source--number", "source--marked"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "edge(-1)", "Top", show=False),
        Binding("G,end", "edge(1)", "End", show=False),
        Binding("home", "line_start", "Start of lines", show=False),
        Binding("m", "marked", "Marked line", show=False),
        Binding("n", "find(1)", "Next match", show=False),
        Binding("N", "find(-1)", "Match before", show=False),
        Binding("space", "page_down", "Page down", show=False),
        Binding("b", "page_up", "Page up", show=False),
    ]

    class Changed(Message):
        """What a status line says may be another: the place, the search."""

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, SourceView.Changed)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.lines: list[Line] = []
        self.first_line = 1
        self.marked: int | None = None
        self.unseen = 0  # bytes of the file, or characters of long lines, that are not among the lines
        self.search = LogSearch(self.lines)
        self._digits = _LEAST_DIGITS
        self._stays = False  # the marked line was in sight, and is to be whatever the size becomes
        self._palette: Palette | None = None
        self._plain: RichStyle | None = None

    # What a screen asks.

    def show(self, lines: Sequence[str], *, first_line: int = 1, marked: int | None = None, unseen: int = 0) -> None:
        """Shows other lines, with the marked one in sight. What is looked for stays."""
        self.lines[:] = [Line(line[:LINE_LIMIT], 0, (), max(0, len(line) - LINE_LIMIT)) for line in lines]
        self.first_line, self.unseen = first_line, unseen + sum(line.cut for line in self.lines)
        self.search.forget_place()
        self._digits = max(_LEAST_DIGITS, len(str(first_line + len(lines))))
        widest = max((cells(drawn_text(line)) for line in self.lines), default=0)
        self.virtual_size = Size(widest + self._gutter, len(self.lines))
        self.scroll_to(x=0, y=0, animate=False, force=True)
        self.marked = None
        if marked is not None:
            self.mark(marked)
        self.refresh()
        self.post_message(self.Changed())

    def paint(self, colours: Sequence[Spans]) -> None:
        """Gives the lines their colours, one after the other."""
        for index, spans in enumerate(colours[: len(self.lines)]):
            self.lines[index] = self.lines[index]._replace(spans=spans)
        self.refresh()

    def mark(self, number: int) -> bool:
        """Marks a line and brings it into sight; False where it is not here."""
        index = number - self.first_line
        if not 0 <= index < len(self.lines):
            return False
        self.marked = number
        self._bring(index)
        self._stays = True
        self.refresh()
        self.post_message(self.Changed())
        return True

    @property
    def top_line(self) -> int:
        """Number of the first line on the screen."""
        return self.first_line + self.scroll_offset.y

    @property
    def bottom_line(self) -> int:
        """Number of the last line on the screen."""
        rows = max(1, self.scrollable_content_region.height)
        return self.first_line + min(self.scroll_offset.y + rows, max(1, len(self.lines))) - 1

    @property
    def last_line(self) -> int:
        return self.first_line + max(0, len(self.lines) - 1)

    def look_for(self, pattern: str) -> bool:
        """Goes to the first match from the first row on; "" looks for nothing more. `search.message` says what came of it."""
        self.refresh()
        found = self.search.set(pattern) and self.action_find(1)
        self.post_message(self.Changed())
        return found

    # Moving.

    @property
    def _gutter(self) -> int:
        return self._digits + _BESIDE_NUMBER

    def _bring(self, index: int, column: int | None = None) -> None:
        """Brings a row into sight, in the upper third where it was not."""
        height = self.scrollable_content_region.height
        row = None if self.scroll_offset.y <= index < self.scroll_offset.y + height else max(0, index - height // 3)
        self.scroll_to(x=column, y=row, animate=False, force=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self._stays = self._in_sight
            self.post_message(self.Changed())

    @property
    def _in_sight(self) -> bool:
        return self.marked is not None and self.top_line <= self.marked <= self.bottom_line

    def on_resize(self) -> None:
        if self.marked is not None and self._stays and not self._in_sight:
            self._bring(self.marked - self.first_line)
        self.post_message(self.Changed())

    def action_edge(self, direction: int) -> None:
        self.scroll_to(y=0 if direction < 0 else self.max_scroll_y, animate=False)

    def action_line_start(self) -> None:
        self.scroll_to(x=0, animate=False)

    def action_marked(self) -> None:
        if self.marked is not None:
            self._bring(self.marked - self.first_line, 0)

    def action_find(self, direction: int) -> bool:
        """Goes to the next match, or to the one before with -1."""
        match = self.search.find(direction, self.scroll_offset.y, unseen=self.unseen)
        if match is not None:
            self._bring(match.line, self._column_for(match))
        self.refresh()
        self.post_message(self.Changed())
        return match is not None

    def _column_for(self, match: Match) -> int | None:
        """To which column to scroll so that a match is in sight; None where it is."""
        text, width = self.lines[match.line].text, self.scrollable_content_region.width - self._gutter
        left, right = cells(text[: match.start]), cells(text[: match.end])
        inside = self.scroll_offset.x <= left and right <= self.scroll_offset.x + width
        return None if inside else max(0, left - width // 3)

    # Drawing.

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._palette = self._plain = None

    def render_line(self, y: int) -> Strip:
        index, width = self.scroll_offset.y + y, self.scrollable_content_region.width
        if self._plain is None or self._palette is None:
            self._plain = self.rich_style
            parts = {
                part: self.get_component_rich_style(f"log--{part}", partial=part != "match-current") for part in PARTS
            }
            self._palette = Palette(self.app.theme_variables, parts)
        if index >= len(self.lines):
            return Strip.blank(width, self._plain)
        number = self.first_line + index
        marked = number == self.marked
        ground = self.get_component_rich_style("source--marked") if marked else self._plain
        text = self._palette.paint(self.lines[index], self.search.matches(index), self.search.match)
        if (selection := self.text_selection) is not None and (span := selection.get_span(index)) is not None:
            style = self.screen.get_component_rich_style("screen--selection")
            text.stylize(style, span[0], None if span[1] < 0 else span[1])
        before = f"{MARK if marked else ' '}{number:>{self._digits}} │"
        numbered = ground if marked else self.get_component_rich_style("source--number")
        shown = strip_of(text, ground, self.scroll_offset.x, max(0, width - self._gutter), index)
        return Strip([Segment(before, numbered), *shown], self._gutter + shown.cell_length)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        last = min(selection.end.y if selection.end else len(self.lines), len(self.lines) - 1)
        parts = []
        for index in range(selection.start.y if selection.start else 0, last + 1):
            start, end = selection.get_span(index) or (0, 0)
            text = drawn_text(self.lines[index])
            parts.append(text[start:] if end < 0 else text[start:end])
        return "\n".join(parts), "\n"
