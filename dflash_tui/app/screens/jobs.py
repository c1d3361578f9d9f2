"""The Jobs screen: every job of every node; start, stop, force, start again."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Static

from dflash_tui.app.screens.base import TitleBar
from dflash_tui.app.screens.job_screen import JobScreen
from dflash_tui.app.widgets.filter_bar import FilterBar
from dflash_tui.app.widgets.job_detail import job_detail
from dflash_tui.app.widgets.jobs_table import JobRow, JobsTable, heading
from dflash_tui.app.widgets.put import put
from dflash_tui.app.widgets.rows import RowsView
from dflash_tui.fleet.facts import Job, JobState
from dflash_tui.fleet.state import Fleet, NodeView


class JobsScreen(JobScreen):
    """Jobs above, the one under the cursor in detail below."""

    MODE = "jobs"
    HELP = """\
## Jobs

Every job of every node, those that run first. `n` opens the form for a new one, `x` stops the one under the cursor
after a question that says what will happen, `X` does so without waiting for it to end by itself, `r` starts it again
with the same spec (finished samples are not done twice), Enter or `l` opens its log.
Of a job that ended badly the detail shows the cause, the line of its log that tells it, and the remedy; `s` opens the source
that raised it. `i` shows the command that a job was started with, its environment and versions; `o` opens any file of the node.
A job of a node that is out of sight keeps its last known state, with `(?)` beside it.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "new", "New"),
        Binding("x", "stop(False)", "Stop"),
        Binding("X", "stop(True)", "Force", show=False),
        Binding("r", "restart", "Restart"),
        Binding("l", "open_log", "Log"),
        Binding("s", "open_source", "Source"),
        # Not in the footer, where 80 columns have no room for more; the help and the palette tell of them.
        Binding("i", "open_command", "Command, environment and versions", show=False),
        Binding("o", "open_file", "Open a file of the node", show=False),
        Binding("d", "toggle_detail", "Detail", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "clear_filter", "Show all", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield TitleBar(self.MODE)
        yield Static(id="jobs-heading")
        yield JobsTable(self.console.now, id="jobs")
        with VerticalScroll(id="job-detail"):
            yield Static(id="job-detail-text")
        yield FilterBar(id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self._wanted: JobRow | None = None
        self._states: list[tuple[str, bool, str, JobState]] = []
        self._drawn: Fleet | None = None
        self.query_one(JobsTable).focus()
        self.set_interval(self.console.settings.refresh, self._refresh)
        self.set_interval(1.0, self._refresh_ages)

    def on_resize(self, event: events.Resize) -> None:
        # One column less than the screen: the table keeps one for its scroll bar.
        self.query_one("#jobs-heading", Static).update(Content(heading(event.size.width - 1)))

    def show_fleet(self, fleet: Fleet) -> None:
        # Progress waits for the next drawing; a job that comes, goes or changes its state, or its node its link, does not.
        states = [(node.host, node.live, job.id, job.state) for node in fleet.nodes for job in node.jobs.values()]
        if states != self._states:
            self._states = states
            self._draw()

    def on_screen_resume(self) -> None:
        self._draw()

    def _draw(self) -> None:
        fleet, self._drawn = self.console.fleet, self.console.fleet
        table = self.query_one(JobsTable)
        table.show(fleet)
        if self._wanted is not None and fleet.job(self._wanted.host, self._wanted.job) is not None:
            if self._wanted in table.rows:  # else a filter hides it
                table.move_to(self._wanted)
            self._wanted = None
        self.draw_detail()

    def select(self, host: str, job: str) -> None:
        """Puts the cursor on a job, as soon as the table has it."""
        self._wanted = JobRow(host, job)
        self._draw()

    def _refresh(self) -> None:
        if self.is_current and self._drawn is not self.console.fleet:
            self._draw()

    def _refresh_ages(self) -> None:
        if self.is_current:
            self.query_one(JobsTable).refresh_ages()

    # The job under the cursor.

    def selected(self) -> tuple[NodeView, Job] | None:
        table = self.query_one(JobsTable)
        return table.job_of(table.cursor)

    def on_rows_view_moved(self, event: RowsView.Moved) -> None:
        self.query_one("#job-detail", VerticalScroll).scroll_home(animate=False)
        self.draw_detail()

    def on_rows_view_chosen(self, event: RowsView.Chosen) -> None:
        self.action_open_log()

    def draw_detail(self) -> None:
        self.offer_source()
        if not self.query_one("#job-detail").display:
            return
        found = self.selected()
        if found is None:
            empty = "no job matches the filter" if self.query_one(FilterBar).value else "no job yet: n starts one"
            text = Content(empty)
        else:
            node, job = found
            launch, told = self.launch_of(node, job), self.diagnosis_of(node, job)
            text = job_detail(node, job, launch, told, now=self.console.now(), clock=self.console.clock_text)
        put(self.query_one("#job-detail-text", Static), text)

    # Actions.

    def action_new(self) -> None:
        if self.may_write("start a job"):
            self.console.open_launch()

    def action_toggle_detail(self) -> None:
        detail = self.query_one("#job-detail")
        detail.display = not detail.display
        self.draw_detail()

    def action_filter(self) -> None:
        self.query_one(FilterBar).open()

    def action_clear_filter(self) -> None:
        self.query_one(FilterBar).action_clear_filter()

    def on_filter_bar_filter_changed(self, event: FilterBar.FilterChanged) -> None:
        self.query_one(JobsTable).set_filter(event.text)
        self.draw_detail()

    def on_filter_bar_left(self) -> None:
        self.query_one(JobsTable).focus()
