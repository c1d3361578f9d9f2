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
from dflash_tui.app.widgets.put import put
from dflash_tui.app.widgets.rows import RowsView
from dflash_tui.app.widgets.words import WAITING
from dflash_tui.fleet.facts import LinkState
from dflash_tui.fleet.state import Fleet, NodeView


class FleetScreen(ConsoleScreen):
    """Nodes and GPUs above, the processes of the selected GPU below."""

    MODE = "fleet"
    HELP = """\
## Fleet

One section a node: the state of its link, when it was last seen, its host in one line, then one line a GPU:
utilisation now and over the last two minutes, memory, power and its limit, temperature, clock.
Below stand the troubles, the processes and the health of the GPU under the cursor, or the node itself; Enter gives that
more room, Escape takes it back. `!` and a word in the place of the clock: the card has a trouble.
`N/A` means that the node cannot say; it is not 0.
A node that cannot be reached is tried again by itself. One that was refused is not (a host key that is not known, say):
mend what the lines below name, then `r` connects again.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("d", "toggle_detail", "Detail"),
        Binding("r", "retry", "Connect now"),
        Binding("escape", "clear_filter", "Show all", show=False),
    ]
    LARGE: ClassVar[str] = "-large"

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
        self._link_state: LinkState | None = None
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
        node = self.selected()
        if node is not None and node.link.state is not self._link_state:
            self._link_state = node.link.state
            self.refresh_bindings()

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
        put(self.query_one("#fleet-detail-text", Static), text)

    def on_rows_view_moved(self, event: RowsView.Moved) -> None:
        self._draw_detail()
        self.refresh_bindings()
        self.query_one("#fleet-detail", VerticalScroll).scroll_home(animate=False)

    def action_filter(self) -> None:
        self.query_one(FilterBar).open()

    def on_rows_view_chosen(self) -> None:
        """The lines below take the screen, and the keys."""
        detail = self.query_one("#fleet-detail", VerticalScroll)
        detail.display = True
        detail.add_class(self.LARGE)
        detail.focus()

    def action_clear_filter(self) -> None:
        detail = self.query_one("#fleet-detail", VerticalScroll)
        if detail.has_class(self.LARGE):
            detail.remove_class(self.LARGE)
            self.query_one(FleetView).focus()
            return
        self.query_one(FilterBar).action_clear_filter()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "retry":
            node = self.selected()
            return node is not None and node.link.state in WAITING
        return True

    def selected(self) -> NodeView | None:
        """The node under the cursor, or the one whose GPU is there."""
        view = self.query_one(FleetView)
        return view.node_of(view.cursor)

    def node_under_cursor(self) -> NodeView | None:
        return self.selected()

    def action_retry(self) -> None:
        node = self.selected()
        if node is not None:
            self.console.retry(node.host)

    def action_toggle_detail(self) -> None:
        detail = self.query_one("#fleet-detail")
        detail.display = not detail.display

    def on_filter_bar_filter_changed(self, event: FilterBar.FilterChanged) -> None:
        self.query_one(FleetView).set_filter(event.text)
        self._draw_detail()

    def on_filter_bar_left(self) -> None:
        self.query_one(FleetView).focus()
