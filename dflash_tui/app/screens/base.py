"""What the screens of the console have in common: the line at the top, the keys, and being told of the fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from dflash_tui.app.messages import FleetChanged
from dflash_tui.app.widgets.put import put
from dflash_tui.fleet.state import Fleet, NodeView

if TYPE_CHECKING:
    from dflash_tui.app.app import ConsoleApp

TITLES = (("fleet", "1 Fleet"), ("jobs", "2 Jobs"), ("logs", "3 Logs"))


class TitleBar(Static):
    """The top line: which screen this is, which others there are, and the fleet in numbers."""

    def __init__(self, mode: str) -> None:
        super().__init__(id="title")
        self._mode = mode
        self._shown: Fleet | None = None

    def show(self, fleet: Fleet, *, read_only: bool) -> None:
        if self._shown is fleet:
            return
        self._shown = fleet
        # In the place of the name: there 80 columns cannot cut it.
        parts: list[tuple[str, str]] = [
            ("read-only", "bold reverse") if read_only else ("dflash-tui", "bold"),
            (" ", ""),
        ]
        for mode, title in TITLES:
            parts.append((f"[{title}]" if mode == self._mode else f" {title} ", "bold" if mode == self._mode else ""))
        totals = fleet.totals()
        numbers = (
            f"{totals.live}/{totals.nodes} nodes live, {totals.gpus} {'GPU' if totals.gpus == 1 else 'GPUs'}, "
            f"{totals.active_jobs} {'job' if totals.active_jobs == 1 else 'jobs'} active"
        )
        parts.append(("  " + numbers, ""))
        put(self, Content.assemble(*parts))


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

    def _show(self, fleet: Fleet) -> None:
        for title in self.query(TitleBar):
            title.show(fleet, read_only=self.console.settings.read_only)
        self.show_fleet(fleet)
