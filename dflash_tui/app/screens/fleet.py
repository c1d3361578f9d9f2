"""The Fleet screen: every node, every GPU, and what runs on the one under the cursor."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Static

from dflash_tui.app.screens.base import ConsoleScreen, TitleBar
from dflash_tui.app.widgets.filter_bar import FilterBar
from dflash_tui.app.widgets.fleet_view import FleetView
from dflash_tui.app.widgets.node_detail import gpu_detail, node_detail
from dflash_tui.app.widgets.rows import RowsView
from dflash_tui.fleet.state import Fleet


class FleetScreen(ConsoleScreen):
    """Nodes and GPUs above, the processes of the selected GPU below."""

    MODE = "fleet"
    HELP = """\
## Fleet

One section a node: the state of its link, when it was last seen, its host in one line, then one line a GPU:
utilisation now and over the last two minutes, memory, power and its limit, temperature, clock.
Below stand the processes of the GPU under the cursor, or the node itself.
`N/A` means that the node cannot say; it is not 0.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("d", "toggle_detail", "Detail"),
    ]

    def compose(self) -> ComposeResult:
        yield TitleBar(self.MODE)
        yield FleetView(self.console.now, id="fleet")
        with VerticalScroll(id="fleet-detail"):
            yield Static(id="fleet-detail-text")
        yield FilterBar(id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self._fleet: Fleet | None = None
        self._drawn: Fleet | None = None
        self.query_one(FleetView).focus()
        self.set_interval(self.console.settings.refresh, self._draw)
        self.set_interval(1.0, self._refresh_ages)

    def show_fleet(self, fleet: Fleet) -> None:
        before, self._fleet = self._drawn, fleet
        # Readings wait for the next drawing; a link that changed, or a node that is seen for the first time, does not.
        if before is None or any(
            was.link != now.link or (was.metrics is None) != (now.metrics is None)
            for was, now in zip(before.nodes, fleet.nodes, strict=True)
        ):
            self._draw()

    def _draw(self) -> None:
        if self._fleet is None or self._fleet is self._drawn or not self.is_current:
            return
        self._drawn = self._fleet
        self.query_one(FleetView).show(self._fleet)
        self._draw_detail()

    def _refresh_ages(self) -> None:
        if self.is_current:
            self.query_one(FleetView).refresh_ages()

    def _draw_detail(self) -> None:
        view = self.query_one(FleetView)
        node, gpu = view.node_of(view.cursor), view.gpu_of(view.cursor)
        if node is None:
            text = Content("nothing matches the filter" if self.query_one(FilterBar).value else "no node yet")
        elif gpu is None:
            text = node_detail(node)
        else:
            text = gpu_detail(node, gpu)
        self.query_one("#fleet-detail-text", Static).update(text)

    def on_rows_view_moved(self, event: RowsView.Moved) -> None:
        self._draw_detail()
        self.query_one("#fleet-detail", VerticalScroll).scroll_home(animate=False)

    def action_filter(self) -> None:
        self.query_one(FilterBar).open()

    def action_toggle_detail(self) -> None:
        detail = self.query_one("#fleet-detail")
        detail.display = not detail.display

    def on_filter_bar_filter_changed(self, event: FilterBar.FilterChanged) -> None:
        self.query_one(FleetView).set_filter(event.text)
        self._draw_detail()

    def on_filter_bar_left(self) -> None:
        self.query_one(FleetView).focus()
