"""A text file of a node, at a line: the source behind a traceback's frame, or any other. Read-only and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType

from dflash_tui.app.screens.text import TextScreen
from dflash_tui.app.widgets.words import last_seen
from dflash_tui.fleet.format import one_line, size
from dflash_tui.fleet.source import Place, SourceText, lines_of, place_of
from dflash_tui.link import LinkError


class SourceScreen(TextScreen):
    """Shows up to 1 MiB before a line and as much from it on.

    places: the frames of a traceback, or one place, or none: then it asks for a file. at: the one to begin with. job: the one
    whose log names them: a relative path is looked for where that job ran.
    """

    HELP = """\
## Source

A text file of the node, read-only, with the line that was asked for marked by `>`. Up to 1 MiB before that line and as much
after it are here, of a line the first 8,192 characters; `:` goes to any other line of the file, `m` back to the marked one, `o`
opens another file (FILE or FILE:LINE).
`[` and `]` go to the frame before and the next one of the traceback that it was opened from.
`/` looks for a regular expression (with a capital in it, the case counts). Characters that would steer a terminal are shown by signs.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "open", "Open file"),
        Binding("left_square_bracket", "frame(-1)", "Frame before"),
        Binding("right_square_bracket", "frame(1)", "Next frame"),
    ]

    def __init__(self, host: str, places: Sequence[Place] = (), at: int = 0, job: str | None = None) -> None:
        super().__init__(host)
        self._places = list(places)
        self._at = at  # the place that is asked for
        self._in_sight = at  # the one that is shown
        self._job = job
        self._shown: SourceText | None = None

    def on_mount(self) -> None:
        # At once: `focus` comes a little later, and would take the keyboard from the question below.
        self.set_focus(self.view)
        if self._places:
            self.open_place(self._places[self._at])
        else:
            self.action_open()

    # What is shown.

    @property
    def shown(self) -> SourceText | None:
        """The file that is on the screen; None before one came."""
        return self._shown

    def header(self) -> Sequence[str]:
        found = self._shown
        node = self.console.fleet.node(self.host)
        away = last_seen(node, self.console.now()) if node is not None else ""
        if found is None:
            return f"a file of {self.host}", away
        place = Place(found.path, self.view.marked)
        return f"{place} on {self.host}", size(found.size), away

    def notes(self) -> Sequence[str]:
        found, parts = self._shown, []
        if len(self._places) > 1:
            parts.append(f"frame {self._in_sight + 1} of {len(self._places)}")
        if found is not None:
            if found.offset:
                parts.append(f"{size(found.offset)} before them")
            if found.left_off:
                parts.append(f"{size(found.left_off)} after them: : goes there")
            if found.gap_bytes:
                parts.append(f"{size(found.gap_bytes)} of it are a hole")
        return parts

    @work(exclusive=True, group="open")
    async def open_place(self, place: Place, *, keep: bool = False) -> None:
        """Shows a file at a line; what is shown stays where the node refuses. keep: another line of the same file."""
        self.tell(f"opening {place}")
        try:
            asked = self.console.link(self.host).source(
                path=place.file, of_job=None if keep else self._job, line=place.line or 1
            )
            found = await asyncio.wrap_future(asked)
        except LinkError as error:
            self.tell(str(error))
            return
        self._shown = found
        if not keep:
            self._in_sight = self._at
        self.show_text(
            lines_of(found.data),
            found.path,
            first_line=found.first_line,
            marked=place.line,
            unseen=found.offset + found.left_off,
        )

    def go_to_line(self, number: int) -> None:
        found = self._shown
        whole = found is None or (not found.offset and not found.left_off)
        if self.view.mark(number) or found is None:
            return
        if whole:
            super().go_to_line(number)
        else:
            self.open_place(Place(found.path, number), keep=True)

    # Keys.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "frame" or len(self._places) > 1

    def action_frame(self, direction: int) -> None:
        at = self._at + direction
        if not 0 <= at < len(self._places):
            self.tell(f"no frame {'after' if direction > 0 else 'before'} this one")
            return
        self._at = at
        self.open_place(self._places[at])

    def action_open(self) -> None:
        path = self._shown.path if self._shown is not None else ""
        # The folder of what is shown: a neighbour is what one looks for most.
        self.prompt.ask(
            "file", f"FILE or FILE:LINE on {one_line(self.host)}", path.rpartition("/")[0] + "/" if path else ""
        )

    def given(self, what: str, text: str) -> None:
        if not text:
            return
        self._places, self._at = [place_of(text)], 0
        self.refresh_bindings()
        self.open_place(self._places[0])
