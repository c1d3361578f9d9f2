"""The doctor's word on one node, over whatever screen is open: what it can do, what it lacks and how to mend it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, cast

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_tui.app.widgets.checkup_view import checkup_content
from dflash_tui.app.widgets.plan_view import refusal_content
from dflash_tui.fleet.facts import Checkup
from dflash_tui.fleet.format import one_line
from dflash_tui.link import LinkError

if TYPE_CHECKING:
    from dflash_tui.app.app import ConsoleApp


class DoctorScreen(ModalScreen[None]):
    """Asks the node when it opens, and again when it is told to."""

    HELP = """\
## Doctor

What this node can do, the worst first: `!` problem, `~` warning, `?` could not be looked at, `*` ok.
The line after `->` says what mends it. Disks are tried by writing up to 256 MiB, which is removed again;
a read-only console leaves that out.
"""
    DEFAULT_CSS = """
    DoctorScreen {
        align: center middle;

        & > #doctor {
            width: 100%;
            max-width: 140;
            height: auto;
            max-height: 100%;
            padding: 0 1;
            border: round $border;
            background: $surface;
            scrollbar-size-vertical: 1;
            scrollbar-gutter: stable;
        }
        & #doctor-text {
            height: auto;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "again", "Look again"),
        Binding("escape,q", "dismiss", "Close"),
        Binding("question_mark", "app.help", "Help"),  # a modal screen gets none of the app's
    ]

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host
        self._checkup: Checkup | None = None
        self._asking = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="doctor"):
            yield Static(id="doctor-text")

    def on_mount(self) -> None:
        scroll = self.query_one("#doctor")
        scroll.border_title = Content(one_line(f"Doctor: {self.host}"))
        scroll.border_subtitle = "r looks again, Esc closes"
        scroll.focus()
        self.action_again()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_again(self) -> None:
        if not self._asking:
            self._ask()

    @work
    async def _ask(self) -> None:
        app = cast("ConsoleApp", self.app)
        self._asking, self._checkup = True, None
        self._show(Content(one_line(f"looking at {self.host}: this takes up to a minute")))
        try:
            self._checkup = await asyncio.wrap_future(app.link(self.host).doctor(write=not app.settings.read_only))
        except LinkError as error:
            self._show(refusal_content(error.message, error.remedy))
        else:
            self._draw()
        finally:
            self._asking = False

    def _draw(self) -> None:
        if self._checkup is not None:
            width = self.query_one("#doctor").scrollable_content_region.width
            self._show(checkup_content(self._checkup, width))

    def _show(self, text: Content) -> None:
        self.query_one("#doctor-text", Static).update(text)
