"""What the screens of the console have in common: the line at the top, the keys, and being told of the fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from dflash_tui.app.messages import FleetChanged
from dflash_tui.app.widgets.put import put
from dflash_tui.fleet.state import Fleet, NodeView

if TYPE_CHECKING:
    from dflash_tui.app.app import ConsoleApp

TITLES = (("fleet", "1 Fleet"), ("jobs", "2 Jobs"), ("logs", "3 Logs"), ("compare", "4 Compare"))


class TitleBar(Static):
    """The top line: which screen this is, which others there are, and the fleet in numbers."""

    def __init__(self, mode: str) -> None:
        super().__init__(id="title")
        self._mode = mode
        self._shown: tuple[Fleet, int] | None = None

    def show(self, fleet: Fleet, *, read_only: bool) -> None:
        width = self.app.size.width - 2
        if self._shown == (fleet, width):
            return
        self._shown = fleet, width
        whole = list(self._titles(fleet, read_only))
        put(self, next((title for title in whole if title.cell_length <= width), whole[-1]))

    def _titles(self, fleet: Fleet, read_only: bool) -> Iterator[Content]:
        """The line in full, then with less and less in it."""
        totals = fleet.totals()
        gpus = f"{totals.gpus} {'GPU' if totals.gpus == 1 else 'GPUs'}"
        jobs = f"{totals.active_jobs} {'job' if totals.active_jobs == 1 else 'jobs'}"
        live = f"{totals.live}/{totals.nodes} nodes live"
        # That nothing can be written is never left out.
        names = [("read-only", "bold reverse")] if read_only else [("dflash-tui", "bold"), ("", "")]
        for numbers in (f"{live}, {gpus}, {jobs} active", f"{live}, {gpus}, {jobs}"):
            for name in names:
                parts = [name, (" " if name[0] else "", "")]
                for mode, title in TITLES:
                    here = mode == self._mode
                    parts.append((f"[{title}]" if here else f" {title} ", "bold" if here else ""))
                yield Content.assemble(*parts, ("  " + numbers, ""))


class ConsoleScreen(Screen[None]):
    """A screen that shows the fleet: it gets `FleetChanged` while it is on top, and the whole fleet when it comes up."""

    MODE: ClassVar[str] = ""

    @property
    def console(self) -> ConsoleApp:
        """The app, with what screens may ask of it."""
        return cast("ConsoleApp", self.app)

    def show_fleet(self, fleet: Fleet) -> None:
        """Shows the fleet; called on the screens' thread, up to eight times a second."""

    def node_under_cursor(self) -> NodeView | None:
        """The node that the cursor is about; None where this screen is about no node."""
        return None

    def on_fleet_changed(self, event: FleetChanged) -> None:
        self._show(event.fleet)

    def on_screen_resume(self) -> None:
        self._show(self.console.fleet)

    def on_resize(self, event: events.Resize) -> None:
        for title in self.query(TitleBar):
            title.show(self.console.fleet, read_only=self.console.settings.read_only)

    def _show(self, fleet: Fleet) -> None:
        for title in self.query(TitleBar):
            title.show(fleet, read_only=self.console.settings.read_only)
        self.show_fleet(fleet)
