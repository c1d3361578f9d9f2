"""The Compare screen: which backend is faster on a node for a model, live while it is found out, and all that was found before."""

from __future__ import annotations

from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Static

from dflash_tui.app.screens.base import TitleBar
from dflash_tui.app.screens.job_screen import JobScreen
from dflash_tui.app.widgets.compare_table import VERB, CompareTable, comparisons, heading
from dflash_tui.app.widgets.compare_view import about_content, figures_content, head_content, parity_content
from dflash_tui.app.widgets.comparison import model_of
from dflash_tui.app.widgets.filter_bar import FilterBar
from dflash_tui.app.widgets.jobs_table import JobRow
from dflash_tui.app.widgets.put import put
from dflash_tui.app.widgets.rows import RowsView
from dflash_tui.fleet.facts import Job
from dflash_tui.fleet.state import Fleet, NodeView

NONE_YET = """\
no comparison yet: n starts one

It runs both backends, hf and vllm, on the same samples of a dataset, measures each apart from its start-up,
and looks layer by layer whether both wrote the same hidden states."""

# From so many columns on parity stands beside the figures, below it under them.
BESIDE_FROM = 150


class CompareScreen(JobScreen):
    """Comparisons above; below the selected one's backends side by side, and the verdict once there is one."""

    MODE = "compare"
    HELP = """\
## Compare

Both backends on the same samples: the list has every comparison of every node, those that run first. Below stand the two
side by side: rates are those since the start-up, which is counted apart; `last 2 min` is samples/s over time.
At its end: the verdict in a sentence, the interval that 95 % of such measurements lie in, samples per joule where the cards
tell of their energy (`N/A` is not 0), how long the whole dataset would take, and parity: for each layer how far vllm's
states are from hf's, against the limit of the dtype.
`n` opens the form for a new one, Enter or `l` the log, `x` stops it after a question, `d` gives the figures the
whole screen and the keys to scroll, Escape takes that back. Of one that failed the cause stands below, with the line of its
log and the remedy; `s` opens the source that raised it. `i` shows its command, environment and versions.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "new", "New"),
        Binding("x", "stop(False)", "Stop"),
        Binding("X", "stop(True)", "Force", show=False),
        Binding("l", "open_log", "Log"),
        Binding("s", "open_source", "Source"),
        Binding("i", "open_command", "Command, environment and versions", show=False),
        Binding("d", "toggle_detail", "Figures"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "back", "Back", show=False),
    ]
    LARGE: ClassVar[str] = "-large"

    def __init__(self) -> None:
        super().__init__()
        self._wanted: JobRow | None = None
        self._drawn: Fleet | None = None
        self._states: list[object] = []

    def compose(self) -> ComposeResult:
        yield TitleBar(self.MODE)
        yield Static(id="compare-heading")
        yield CompareTable(self.console.clock_text, id="comparisons")
        with VerticalScroll(id="compare-detail"):
            yield Static(id="compare-head")
            with Container(id="compare-body"):
                yield Static(id="compare-figures")
                with Container(id="compare-more"):
                    yield Static(id="compare-parity")
                    yield Static(id="compare-about")
        yield FilterBar(id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(CompareTable).focus()
        self.set_interval(self.console.settings.refresh, self._refresh)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= BESIDE_FROM, "-beside")
        self.query_one("#compare-heading", Static).update(Content(heading(event.size.width - 1)))
        self.draw_detail()

    def show_fleet(self, fleet: Fleet) -> None:
        # Progress waits for the next drawing; what comes, goes or changes its state does not.
        states: list[object] = [(node.host, node.live, job.id, job.state) for node, job in comparisons(fleet)]
        if states != self._states or self._drawn is None:
            self._states = states
            self._draw()

    def on_screen_resume(self) -> None:
        self._draw()

    def _refresh(self) -> None:
        if self.is_current and self._drawn is not self.console.fleet:
            self._draw()

    def _draw(self) -> None:
        fleet, self._drawn = self.console.fleet, self.console.fleet
        table = self.query_one(CompareTable)
        table.show(fleet, self._launches)
        if self._wanted is not None and fleet.job(self._wanted.host, self._wanted.job) is not None:
            if self._wanted in table.rows:  # else a filter hides it
                table.move_to(self._wanted)
            self._wanted = None
        self._read_models(fleet)
        self.draw_detail()

    def _read_models(self, fleet: Fleet) -> None:
        """Reads what the comparisons were asked for whose records do not tell their model."""
        rows = [
            JobRow(node.host, job.id)
            for node, job in comparisons(fleet)
            if node.live and not model_of(job, self._launches.get(JobRow(node.host, job.id)))
        ]
        wanted = [row for row in rows if row not in self._unreadable]
        if wanted and not any(worker.group == "models" and not worker.is_finished for worker in self.workers):
            self._read_all(wanted)

    @work(group="models")
    async def _read_all(self, rows: list[JobRow]) -> None:
        for row in rows:
            if not await self.keep_launch(row):
                break  # asked again when it is drawn again
        self.query_one(CompareTable).show(self.console.fleet, self._launches)
        self.draw_detail()

    # The comparison under the cursor.

    def select(self, host: str, job: str) -> None:
        self._wanted = JobRow(host, job)
        self._draw()

    def selected(self) -> tuple[NodeView, Job] | None:
        table = self.query_one(CompareTable)
        return table.job_of(table.cursor)

    def on_rows_view_moved(self, event: RowsView.Moved) -> None:
        self.query_one("#compare-detail", VerticalScroll).scroll_home(animate=False)
        self.draw_detail()

    def on_rows_view_chosen(self, event: RowsView.Chosen) -> None:
        self.action_open_log()

    def draw_detail(self) -> None:
        found = self.selected()
        shown = [found is not None] * 4
        if found is None:
            empty = "no comparison matches the filter" if self.query_one(FilterBar).value else NONE_YET
            put(self.query_one("#compare-head", Static), Content(empty))
        else:
            node, job = found
            launch, told = self.launch_of(node, job), self.diagnosis_of(node, job)
            width = self._body_width()
            parity = parity_content(job, width=width)
            shown[2] = parity is not None
            put(
                self.query_one("#compare-head", Static),
                head_content(node, job, launch, told, now=self.console.now(), width=self.size.width - 3),
            )
            put(self.query_one("#compare-figures", Static), figures_content(node, job, width=width))
            put(self.query_one("#compare-parity", Static), parity or Content(""))
            put(
                self.query_one("#compare-about", Static),
                about_content(node, job, launch, clock=self.console.clock_text, width=width),
            )
        self.offer_source()
        for name, there in zip(("body", "figures", "parity", "about"), shown, strict=True):
            self.query_one(f"#compare-{name}").display = there

    def _body_width(self) -> int:
        """Columns of the figures and of what stands beside or under them; the style sheet says which."""
        whole = self.size.width - 3  # the padding, and a column for the scroll bar
        return (whole - 2) // 2 if self.has_class("-beside") else whole

    # Actions.

    def action_new(self) -> None:
        if self.may_write("start a comparison"):
            self.console.open_launch(VERB)

    def action_toggle_detail(self) -> None:
        """The figures take the screen, and the keys; or give them back."""
        detail = self.query_one("#compare-detail", VerticalScroll)
        if detail.has_class(self.LARGE):
            self._give_back()
        else:
            detail.add_class(self.LARGE)
            self._show_list(False)
            detail.focus()

    def _give_back(self) -> None:
        self.query_one("#compare-detail").remove_class(self.LARGE)
        self._show_list(True)
        self.query_one(CompareTable).focus()

    def _show_list(self, shown: bool) -> None:
        for widget in (self.query_one("#compare-heading"), self.query_one(CompareTable)):
            widget.display = shown

    def action_filter(self) -> None:
        self.query_one(FilterBar).open()

    def action_back(self) -> None:
        if self.query_one("#compare-detail").has_class(self.LARGE):
            self._give_back()
        else:
            self.query_one(FilterBar).action_clear_filter()

    def on_filter_bar_filter_changed(self, event: FilterBar.FilterChanged) -> None:
        self.query_one(CompareTable).set_filter(event.text)
        self.draw_detail()

    def on_filter_bar_left(self) -> None:
        table = self.query_one(CompareTable)
        (table if table.display else self.query_one("#compare-detail")).focus()
