"""A log on the screen. Its own widget because RichLog and Log jump to the end on every write and cost more the longer they are.

Only rows that can be seen are rendered, and bytes are taken in batches, so that neither costs more for a long log.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import ClassVar, Literal

from rich.style import Style as RichStyle
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import var
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from dflash_tui.app.widgets.log_palette import PARTS, Palette, strip_of
from dflash_tui.app.widgets.log_rows import RowIndex, cells, drawn_text, pieces
from dflash_tui.app.widgets.log_search import LogSearch, Match
from dflash_tui.fleet.logtext import LogText

FLUSH_S, FLOOD_S = 0.1, 1.0  # bytes that arrive within this time are drawn together; within the longer one where
FLOOD_BYTES = 4096  # more than this were drawn last: nobody reads so fast, and drawing is what costs

Where = Literal["older", "newer", "head", "end"]


class LogView(ScrollView, can_focus=True):
    """Shows the bytes that it is given. It asks for others by `Wanted` and tells by `Drawn` what it has taken."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"log--{part}" for part in PARTS}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "top", "Top", show=False),
        Binding("G,end", "follow", "Follow"),
        Binding("home", "line_start", "Start of lines", show=False),
        Binding("w", "toggle_wrap", "Wrap", show=False),
        Binding("n", "find(1)", "Next match", show=False),
        Binding("N", "find(-1)", "Match before", show=False),
        Binding("space", "page_down", "Page down", show=False),
        Binding("b", "page_up", "Page up", show=False),
    ]

    following: var[bool] = var(True)
    wrap: var[bool] = var(False)

    class Drawn(Message):
        """So many bytes of the stream were taken and drawn."""

        def __init__(self, nbytes: int) -> None:
            super().__init__()
            self.nbytes = nbytes

    class Wanted(Message):
        """The reader wants bytes that are not here: those before `offset`, those from it on, the first or the last."""

        def __init__(self, where: Where, offset: int) -> None:
            super().__init__()
            self.where = where
            self.offset = offset

    class Changed(Message):
        """What a status line says may be another: following, wrapping, the place, the search."""

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, LogView.Changed)

    def __init__(self, *, text: LogText | None = None, id: str | None = None) -> None:
        super().__init__(id=id)
        self.text = LogText() if text is None else text
        self.stream_end = 0  # where the stream stands; beyond the text's end where the reader is elsewhere
        self.search = LogSearch(self.text)
        self.rendered = 0  # rows rendered so far
        self._rows = RowIndex()
        self._palette: Palette | None = None
        self._plain: RichStyle | None = None
        self._pending: list[tuple[bytes, int, int]] = []
        self._flush_planned, self._not_before = False, 0.0
        self._asked: Where | None = None
        self._no_older = False
        self._own_move, self._widest = False, 0

    # Bytes in.

    def append(self, data: bytes, offset: int, gap: int = 0) -> None:
        """Takes bytes of the stream: those at `offset`, with `gap` bytes missing before them. Draws them a little later."""
        self._pending.append((data, offset, gap))
        if not self._flush_planned:
            self._flush_planned = True
            self.set_timer(max(FLUSH_S / 2, self._not_before - monotonic()), self._flush)

    def restart(self, offset: int, note: str = "", *, stream_end: int | None = None) -> None:
        """Forgets all that is shown and goes on at `offset`, where the stream stands too unless `stream_end` says otherwise.

        `note` says why, where there is a reason that the reader must know.
        """
        if self._pending:
            self.post_message(self.Drawn(sum(len(data) for data, _, _ in self._pending)))
            self._pending.clear()
        self._asked, self._no_older = None, False
        self.search.forget_place()
        self._widest = 0
        self.stream_end = offset if stream_end is None else stream_end
        self.text.clear(offset)
        self._rows.rebuild((), 0, self._wrap_width)
        if note:
            self.note(note)
        self._resize_content()
        self._move_to(0)

    def note(self, text: str) -> None:
        """Puts a line of the console's own at the end."""
        self._flush()
        self.text.mark()
        self._appended(self.text.note(text).top)

    def older(self, data: bytes, offset: int) -> None:
        """Takes the bytes before the text that were asked for. Where none come, or only a hole in the file, it asks no more."""
        self._asked = None
        if not data.strip(b"\0") or offset + len(data) != self.text.older_end:
            self._no_older = True
            self.post_message(self.Changed())
            return
        change = self.text.prepend(data, offset)
        top, part = self._rows.locate(self.scroll_offset.y)
        self.search.shift(change.top)
        self._rows.rebuild(self._finished_texts(0), self.text.finished, self._wrap_width)
        self._measure(0, min(change.top + 1, len(self.text)))
        self._resize_content()
        self._move_to(self._rows.first_row(min(top + change.top, self.text.finished)) + part)

    def newer(self, data: bytes, offset: int) -> None:
        """Takes the bytes after the text that were asked for."""
        self._asked = None
        self.text.mark()
        self._appended(self.text.feed(data, offset).top)
        self.stream_end = max(self.stream_end, self.text.end)

    def refused(self) -> None:
        """What was asked for does not come."""
        self._asked = None

    def _flush(self) -> None:
        self._flush_planned = False
        pending, self._pending = self._pending, []
        if not pending:
            return
        self.text.mark()
        dropped, taken = 0, 0
        for data, offset, gap in pending:
            taken += len(data)
            self.stream_end = offset + len(data)
            if len(self.text) and offset - gap > self.text.end:
                continue  # the reader is elsewhere
            if not len(self.text):
                self.text.clear(offset - gap)
            if gap:
                dropped += self.text.gap(gap).top
            dropped += self._take(data, offset)
        self._appended(dropped)
        self._not_before = monotonic() + (FLOOD_S if taken > FLOOD_BYTES else FLUSH_S)
        self.call_after_refresh(self.post_message, self.Drawn(taken))

    def _take(self, data: bytes, offset: int) -> int:
        """Feeds what is to be shown of `data`; returns by how many lines the top changed.

        The reader's place is worth more than the newest lines: these are read again when they are wanted.
        """
        if self.following:
            return self.text.feed(data, offset).top
        while data and (room := self.text.room):
            self.text.feed(data[:room], offset)
            data, offset = data[room:], offset + room
        return 0

    @property
    def behind(self) -> int:
        """Bytes of the stream after the text: not 0 where the reader is elsewhere in a long log."""
        return max(0, self.stream_end - self.text.end)

    @property
    def first_line(self) -> int:
        """Number of the first line on the screen, from 1 on; 0 where there is none."""
        return min(self._rows.locate(self.scroll_offset.y)[0] + 1, len(self.text))

    @property
    def last_line(self) -> int:
        """Number of the last line on the screen."""
        last = self.scroll_offset.y + max(1, self.scrollable_content_region.height) - 1
        return min(self._rows.locate(last)[0] + 1, len(self.text))

    # Geometry.

    @property
    def _wrap_width(self) -> int | None:
        return max(2, self.scrollable_content_region.width) if self.wrap else None

    def _appended(self, top: int) -> None:
        """Since the text's mark lines came at the end; `-top` lines went at the top."""
        before, dropped = self.text.kept, -top
        self._rows.cut(before)
        known = max(0, before - dropped)
        rows = self._rows.drop(min(dropped, before))
        self._rows.append(self._finished_texts(known))
        self.search.shift(top)
        self._measure(known)
        self._resize_content()
        if self.following:
            self._move_to(self.max_scroll_y)
        elif rows:
            self._move_to(self.scroll_offset.y - rows)

    def _finished_texts(self, start: int) -> Iterator[str]:
        return (drawn_text(self.text[index]) for index in range(start, self.text.finished))

    def _measure(self, start: int, end: int | None = None) -> None:
        for index in range(start, len(self.text) if end is None else end):
            self._widest = max(self._widest, cells(drawn_text(self.text[index])))

    def _resize_content(self) -> None:
        self._rows.set_open(drawn_text(self.text[index]) for index in range(self.text.finished, len(self.text)))
        self._own_move = True
        self.virtual_size = Size(0 if self.wrap else self._widest, self._rows.rows)
        self._own_move = False
        self.refresh()
        self.post_message(self.Changed())

    def _move_to(self, row: int, column: int | None = None) -> None:
        self._own_move = True
        self.scroll_to(x=column, y=row, animate=False, force=True)
        self._own_move = False

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._own_move or round(old_value) == round(new_value):
            return
        self.following = round(new_value) >= self.max_scroll_y and not self.behind
        self._ask_at_the_edges()
        self.post_message(self.Changed())

    def _ask_at_the_edges(self) -> None:
        row = self.scroll_offset.y
        if row == 0 and self.text.start > 0 and not self._no_older and not self.following:
            self._ask("older", self.text.older_end)
        elif row >= self.max_scroll_y and self.behind:
            self._ask("newer", self.text.end)

    def _ask(self, where: Where, offset: int) -> None:
        if self._asked is None:
            self._asked = where
            self.post_message(self.Wanted(where, offset))

    def on_resize(self) -> None:
        if self.wrap and self._wrap_width != self._rows.width:
            self._rewrap()
        elif self.following:
            self._move_to(self.max_scroll_y)

    def _rewrap(self) -> None:
        line = self.first_line - 1
        self._rows.rebuild(self._finished_texts(0), self.text.finished, self._wrap_width)
        self._resize_content()
        row = self.max_scroll_y if self.following else self._rows.first_row(max(0, min(line, self.text.finished)))
        self._move_to(row, 0 if self.wrap else None)

    def watch_wrap(self) -> None:
        if self.is_mounted:
            self._rewrap()

    def watch_following(self) -> None:
        self.post_message(self.Changed())

    def on_mouse_scroll_up(self) -> None:
        # The wheel scrolls by animation: what arrives before its first step must not bring the reader back.
        if self.scroll_offset.y > 0:
            self.following = False

    # Keys.

    def action_toggle_wrap(self) -> None:
        self.wrap = not self.wrap

    def action_top(self) -> None:
        self.following = False
        self._move_to(0)
        if self.text.start > 0:
            self._ask("head", 0)

    def action_follow(self) -> None:
        if self.behind:
            self._ask("end", self.stream_end)
        self.following = True
        self._move_to(self.max_scroll_y)

    def action_line_start(self) -> None:
        self.scroll_to(x=0, animate=False)

    def action_scroll_up(self) -> None:
        self._scroll_back(1)

    def action_scroll_down(self) -> None:
        self.scroll_relative(y=1, animate=False)
        self._ask_at_the_edges()

    def action_page_up(self) -> None:
        self._scroll_back(self.scrollable_content_region.height - 1)

    def _scroll_back(self, rows: int) -> None:
        if self.scroll_offset.y == 0 and self.text.start > 0:
            self.following = False
        self.scroll_relative(y=-rows, animate=False)
        self._ask_at_the_edges()

    def action_page_down(self) -> None:
        self.scroll_relative(y=self.scrollable_content_region.height - 1, animate=False)
        self._ask_at_the_edges()

    # Search.

    def look_for(self, pattern: str) -> bool:
        """Goes to the first match from the first row on; "" looks for nothing more. `search.message` says what came of it."""
        self.refresh()
        found = self.search.set(pattern) and self.action_find(1)
        self.post_message(self.Changed())
        return found

    def action_find(self, direction: int) -> bool:
        """Goes to the next match, or to the one before with -1."""
        row = self._rows.locate(self.scroll_offset.y)[0]
        match = self.search.find(direction, row, unseen=self.text.start + self.behind)
        if match is not None:
            self.following = False
            self._show(match)
        self.refresh()
        self.post_message(self.Changed())
        return match is not None

    def _show(self, match: Match) -> None:
        text = self.text[match.line].text
        row, column = self._rows.first_row(match.line), None
        region = self.scrollable_content_region
        if self.wrap:
            row += len(pieces(text[: match.end], self._rows.width)) - 1
        else:
            left, right = cells(text[: match.start]), cells(text[: match.end])
            if left < self.scroll_offset.x or right > self.scroll_offset.x + region.width:
                column = max(0, left - region.width // 3)
        if not self.scroll_offset.y <= row < self.scroll_offset.y + region.height:
            self._move_to(row - region.height // 3, column)
        elif column is not None:
            self._move_to(self.scroll_offset.y, column)

    # Drawing.

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._palette = None
        self._plain = None

    def render_line(self, y: int) -> Strip:
        self.rendered += 1
        left, row = self.scroll_offset.x, self.scroll_offset.y + y
        width = self.scrollable_content_region.width
        if self._plain is None:
            self._plain = self.rich_style
        if row >= self.virtual_size.height:
            return Strip.blank(width, self._plain)
        index, part = self._rows.locate(row)
        text = self._paint(index)
        if self._rows.width is not None:
            rows = pieces(text.plain, self._rows.width)
            start = sum(map(len, rows[:part]))
            text, left = text[start : start + len(rows[part])], 0
        if (selection := self.text_selection) is not None and (span := selection.get_span(row)) is not None:
            style = self.screen.get_component_rich_style("screen--selection")
            text.stylize(style, span[0], None if span[1] < 0 else span[1])
        return strip_of(text, self._plain, left, width, row)

    def _paint(self, index: int) -> Text:
        if self._palette is None:
            parts = {
                part: self.get_component_rich_style(f"log--{part}", partial=part != "match-current") for part in PARTS
            }
            self._palette = Palette(self.app.theme_variables, parts)
        return self._palette.paint(self.text[index], self.search.matches(index), self.search.match)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        last = min(selection.end.y if selection.end else self.virtual_size.height, self.virtual_size.height - 1)
        parts = []
        for row in range(selection.start.y if selection.start else 0, last + 1):
            index, part = self._rows.locate(row)
            text = pieces(drawn_text(self.text[index]), self._rows.width)[part]
            start, end = selection.get_span(row) or (0, 0)
            parts.append(text[start:] if end < 0 else text[start:end])
        return "\n".join(parts), "\n"
