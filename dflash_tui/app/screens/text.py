"""What the screens have in common that show a text to read: line numbers, search, going to a line, back with Escape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Footer, Static

from dflash_tui.app.screens.base import ConsoleScreen, TitleBar
from dflash_tui.app.widgets.highlight import highlight
from dflash_tui.app.widgets.prompt_bar import SEARCH, PromptBar
from dflash_tui.app.widgets.put import put
from dflash_tui.app.widgets.source_view import SourceView
from dflash_tui.fleet.format import one_line
from dflash_tui.fleet.state import Fleet, NodeView


class TextScreen(ConsoleScreen):
    """A subclass fills it by `show_text`, and says by `header` and `notes` what it is."""

    CSS_PATH = Path(__file__).parent.parent / "styles" / "source.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("colon", "go_to", "Go to line"),
        Binding("escape", "back", "Back"),
    ]

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host
        self.message = ""  # what went wrong, or is going on

    def compose(self) -> ComposeResult:
        yield TitleBar(self.MODE)
        yield Static(id="text-header")
        yield SourceView(id="text")
        yield Static(id="text-status")
        yield PromptBar(id="text-prompt")
        yield Footer()

    @property
    def view(self) -> SourceView:
        return self.query_one(SourceView)

    @property
    def prompt(self) -> PromptBar:
        return self.query_one(PromptBar)

    def node_under_cursor(self) -> NodeView | None:
        return self.console.fleet.node(self.host)

    def show_fleet(self, fleet: Fleet) -> None:
        self.draw_lines()

    # What a subclass says.

    def header(self) -> Sequence[str]:
        """What stands above the text."""
        return ()

    def notes(self) -> Sequence[str]:
        """What stands below it, after the place and the search."""
        return ()

    def go_to_line(self, number: int) -> None:
        """Goes to a line, or says that there is none."""
        if not self.view.mark(number):
            self.message = f"there is no line {number:,}: the last one is {self.view.last_line:,}"
            self.draw_lines()

    def given(self, what: str, text: str) -> None:
        """The answer to a question of the subclass."""

    # What it shows.

    @work(exclusive=True, group="highlight")
    async def show_text(
        self, lines: Sequence[str], name: str, *, first_line: int = 1, marked: int | None = None, unseen: int = 0
    ) -> None:
        """Shows a text at once, and with the colours of its language (by the file's name) as soon as these are known."""
        self.message = ""
        self.view.show(lines, first_line=first_line, marked=marked, unseen=unseen)
        try:
            colours = await asyncio.to_thread(highlight, lines, name)
        except Exception as error:  # one of hundreds of lexers, over whatever a node has: the text is there without it
            self.tell(f"not highlighted: {type(error).__name__}: {error}")
            return
        if colours is not None:
            self.view.paint(colours)

    def tell(self, message: str) -> None:
        """Says something below the text."""
        self.message = one_line(message)
        self.draw_lines()

    def draw_lines(self) -> None:
        put(self.query_one("#text-header", Static), Content(one_line("  ".join(filter(None, self.header())))))
        view = self.view
        place = f"lines {view.top_line:,}-{view.bottom_line:,} of {view.last_line:,}" if view.lines else ""
        parts = [self.message, view.search.message, place, *self.notes()]
        put(self.query_one("#text-status", Static), Content(one_line("  ".join(filter(None, parts)))))

    def on_source_view_changed(self) -> None:
        self.draw_lines()

    # Keys.

    def action_search(self) -> None:
        self.prompt.ask("search", SEARCH)

    def action_go_to(self) -> None:
        self.prompt.ask("line", "number of a line")

    def action_back(self) -> None:
        if self.view.search.active:
            self.view.look_for("")
        else:
            self.dismiss()

    def on_prompt_bar_left(self) -> None:
        self.view.focus()

    def on_prompt_bar_given(self, event: PromptBar.Given) -> None:
        text = event.text.strip()
        if event.what == "search":
            if self.view.look_for(event.text) or not event.text:
                self.prompt.action_leave()
        elif event.what == "line":
            if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0:
                self.message = ""
                self.prompt.action_leave()
                self.go_to_line(int(text))
            elif text:
                self.message = f"{text!r} is no line: give a number from 1 on"
            else:
                self.prompt.action_leave()
        else:
            self.prompt.action_leave()
            self.given(event.what, text)
        self.draw_lines()
