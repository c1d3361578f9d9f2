"""A log whose tracebacks can be walked: the frames that they name, one after the other."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual.binding import Binding, BindingType

from dflash_tui.app.widgets.log_rows import cells
from dflash_tui.app.widgets.log_view import LogView
from dflash_tui.fleet.source import FRAME, Place

_FRAME = re.compile(FRAME)
_LONGEST = 50  # columns of a frame in the status line


class Frame(NamedTuple):
    """Characters [start, end) of the line that begins at the byte `offset` of the log name a line of a source."""

    offset: int
    start: int
    end: int
    place: Place


class TracedLog(LogView):
    """Marks the frame that was chosen; by its place in the file, which holds whatever comes or goes around it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left_square_bracket", "frame(-1)", "Frame before", show=False),
        Binding("right_square_bracket", "frame(1)", "Next frame", show=False),
    ]

    chosen: Frame | None = None
    frame_message = ""

    def _frames(self, lines: Iterable[int]) -> Iterator[tuple[int, Frame]]:
        for index in lines:
            line = self.text[index]
            if 'File "' in line.text:
                for found in _FRAME.finditer(line.text):
                    place = Place(found["file"], int(found["line"]))
                    yield index, Frame(line.offset, found.start(), found.end(), place)

    def _index_of(self, frame: Frame) -> int | None:
        """The line of a frame, None where it is no longer here."""
        count = len(self.text)
        index = bisect_left(range(count), frame.offset, key=lambda number: self.text[number].offset)
        while index < count and self.text[index].offset == frame.offset:
            if frame in (found for _, found in self._frames([index])):
                return index
            index += 1
        return None

    @property
    def _visible(self) -> range:
        return range(max(0, self.first_line - 1), self.last_line)

    def action_frame(self, direction: int) -> None:
        """Goes to the next frame of a traceback, or to the one before; from the rows that are seen where none is chosen."""
        count = len(self.text)
        here = self._index_of(self.chosen) if self.chosen is not None else None
        if here is None:
            start = self._visible.start if direction > 0 else max(0, self._visible.stop - 1)
        else:
            start = here + direction
        lines = range(start, count) if direction > 0 else range(min(start, count - 1), -1, -1)
        found = next(self._frames(lines), None)
        self.frame_message = "" if found is not None else self._no_frame(direction, here is not None)
        if found is not None:
            index, self.chosen = found
            self.following = False
            self._show_line(index)
        self.refresh()
        self.post_message(self.Changed())

    def _no_frame(self, direction: int, one_is_chosen: bool) -> str:
        more = " in the lines loaded" if self.text.start or self.behind else ""
        if not one_is_chosen:
            return f'no frame of a traceback{more}: a line with File "…", line N'
        return f"no other frame {'after' if direction > 0 else 'before'} this one{more}"

    def _show_line(self, index: int) -> None:
        row, height = self._rows.first_row(index), self.scrollable_content_region.height
        if not self.scroll_offset.y <= row < self.scroll_offset.y + height:
            self._move_to(row - height // 3, 0)

    def frame_at_hand(self) -> Frame | None:
        """The chosen frame where it is in sight; else that of the selected line, the last one in sight, or the nearest."""
        visible = self._visible
        chosen = None if self.chosen is None else self._index_of(self.chosen)
        if chosen in visible:
            return self.chosen
        if (selection := self.text_selection) is not None and selection.start is not None:
            selected = self._rows.locate(selection.start.y)[0]
            if selected < len(self.text) and (found := next(self._frames([selected]), None)):
                return found[1]
        for lines in (reversed(visible), range(visible.start - 1, -1, -1), range(visible.stop, len(self.text))):
            if (found := next(self._frames(lines), None)) is not None:
                return found[1]
        return None

    def frames_around(self, frame: Frame, most: int = 100) -> tuple[list[Place], int]:
        """The frames of the log near this one, in their order, and which of them it is."""
        index = self._index_of(frame)
        if index is None:
            return [frame.place], 0
        before = [found for _, found in zip(range(most), self._frames(range(index - 1, -1, -1)), strict=False)]
        after = [found for _, found in zip(range(most), self._frames(range(index + 1, len(self.text))), strict=False)]
        places = [found.place for _, found in reversed(before)]
        return [*places, frame.place, *(found.place for _, found in after)], len(places)

    def _paint(self, index: int) -> Text:
        text = super()._paint(index)
        if self.chosen is not None and self.text[index].offset == self.chosen.offset:
            style = self.get_component_rich_style("log--match-current")
            text.stylize(style, self.chosen.start, self.chosen.end)
        return text

    def restart(self, offset: int, note: str = "", *, stream_end: int | None = None) -> None:
        self.chosen, self.frame_message = None, ""
        super().restart(offset, note, stream_end=stream_end)

    @property
    def frame_status(self) -> str:
        """What there is to say of frames, in the status line."""
        if self.frame_message or self.chosen is None:
            return self.frame_message
        name = str(self.chosen.place)
        # Its end tells more than its beginning.
        return f"frame {name if cells(name) <= _LONGEST else '…' + name[-_LONGEST:]}"
