"""The Jobs screen: every job of every node; start, stop, force, start again."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.notifications import SeverityLevel
from textual.widgets import Footer, Static

from dflash_tui.app.jobfiles import read_launch
from dflash_tui.app.screens.base import ConsoleScreen, TitleBar
from dflash_tui.app.screens.confirm import ConfirmScreen, stop_text
from dflash_tui.app.widgets.filter_bar import FilterBar
from dflash_tui.app.widgets.job_detail import job_detail
from dflash_tui.app.widgets.jobs_table import JobRow, JobsTable, heading
from dflash_tui.app.widgets.put import put
from dflash_tui.app.widgets.rows import RowsView
from dflash_tui.config import ConfigError
from dflash_tui.fleet.facts import Diagnosis, Job, JobState
from dflash_tui.fleet.state import Fleet, NodeView
from dflash_tui.hftoken import secrets_for
from dflash_tui.link import LinkError, RequestRefused, new_job_id
from dflash_tui.node.protocol import Launch

READ_ONLY = "this console is read-only; start it without --read-only"
_ENDED_BADLY = (JobState.FAILED, JobState.KILLED, JobState.LOST, JobState.ORPHANED)


class JobsScreen(ConsoleScreen):
    """Jobs above, the one under the cursor in detail below."""

    MODE = "jobs"
    HELP = """\
## Jobs

Every job of every node, those that run first. `n` opens the form for a new one, `x` stops the one under the cursor
after a question that says what will happen, `X` does so without waiting for it to end by itself, `r` starts it again
with the same spec (finished samples are not done twice), Enter or `l` opens its log.
Of a job that ended badly the detail shows the cause, the line of its log that tells it, and the remedy.
A job of a node that is out of sight keeps its last known state, with `(?)` beside it.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "new", "New"),
        Binding("x", "stop(False)", "Stop"),
        Binding("X", "stop(True)", "Force", show=False),
        Binding("r", "restart", "Restart"),
        Binding("l", "open_log", "Log"),
        Binding("d", "toggle_detail", "Detail"),
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
        self._launches: dict[JobRow, Launch] = {}
        self._diagnoses: dict[JobRow, Diagnosis | None] = {}  # None: the node had none to give
        self._diagnosing: JobRow | None = None
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
        if states != self._states or self._wanted is not None:
            self._states = states
            self._draw()

    def on_screen_resume(self) -> None:
        self._draw()

    def _draw(self) -> None:
        fleet, self._drawn = self.console.fleet, self.console.fleet
        table = self.query_one(JobsTable)
        table.show(fleet)
        if self._wanted in table.rows and self._wanted is not None:
            table.move_to(self._wanted)
            self._wanted = None
        self._draw_detail()

    def select(self, host: str, job: str) -> None:
        """Puts the cursor on a job, as soon as the table has it."""
        self._wanted = JobRow(host, job)
        self.show_fleet(self.console.fleet)

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

    def node_under_cursor(self) -> NodeView | None:
        found = self.selected()
        return None if found is None else found[0]

    def on_rows_view_moved(self, event: RowsView.Moved) -> None:
        self.query_one("#job-detail", VerticalScroll).scroll_home(animate=False)
        self._draw_detail()

    def on_rows_view_chosen(self, event: RowsView.Chosen) -> None:
        self.action_open_log()

    def _draw_detail(self) -> None:
        if not self.query_one("#job-detail").display:
            return
        found = self.selected()
        if found is None:
            empty = "no job matches the filter" if self.query_one(FilterBar).value else "no job yet: n starts one"
            text = Content(empty)
        else:
            node, job = found
            row = JobRow(node.host, job.id)
            launch = self._launches.get(row)
            if launch is None and node.live:
                self._read_launch(row)
            if job.state in _ENDED_BADLY and row not in self._diagnoses and self._diagnosing is None and node.live:
                self._diagnosing = row
                self._diagnose(row)
            told = self._diagnoses.get(row) if job.state in _ENDED_BADLY else None
            text = job_detail(node, job, launch, told, now=self.console.now(), clock=self.console.clock_text)
        put(self.query_one("#job-detail-text", Static), text)

    @work(exclusive=True, group="launch-file")
    async def _read_launch(self, row: JobRow) -> None:
        try:
            self._launches[row] = await read_launch(self.console.link(row.host), row.job)
        except LinkError:
            return  # the detail does without; it is asked again when it is drawn again
        self._draw_detail()

    @work(group="diagnose")
    async def _diagnose(self, row: JobRow) -> None:
        # One at a time, however fast the cursor moves: each reads a whole log on the node.
        try:
            told = await asyncio.wrap_future(self.console.link(row.host).diagnose(job=row.job))
            self._diagnoses[row] = told
        except RequestRefused:
            self._diagnoses[row] = None
        except LinkError:
            return  # asked again when it is drawn again
        finally:
            self._diagnosing = None
        self._draw_detail()

    # Actions.

    def _may_write(self, what: str) -> bool:
        if self.console.settings.read_only:
            self._say(f"cannot {what}: {READ_ONLY}", "warning")
            return False
        return True

    def _reachable(self, node: NodeView, what: str) -> bool:
        if not node.live:
            self._say(f"cannot {what}: the link to {node.host} is {node.link.state}; wait until it is live", "warning")
        return node.live

    def _say(self, text: str, severity: SeverityLevel = "information") -> None:
        self.console.say(text, severity)

    def action_new(self) -> None:
        if self._may_write("start a job"):
            self.console.open_launch()

    def action_open_log(self) -> None:
        found = self.selected()
        if found is None:
            self._say("no job is selected", "warning")
        else:
            self.console.open_log(found[0].host, found[1].id)

    def action_toggle_detail(self) -> None:
        detail = self.query_one("#job-detail")
        detail.display = not detail.display
        self._draw_detail()

    def action_filter(self) -> None:
        self.query_one(FilterBar).open()

    def action_clear_filter(self) -> None:
        self.query_one(FilterBar).action_clear_filter()

    def on_filter_bar_filter_changed(self, event: FilterBar.FilterChanged) -> None:
        self.query_one(JobsTable).set_filter(event.text)
        self._draw_detail()

    def on_filter_bar_left(self) -> None:
        self.query_one(JobsTable).focus()

    def action_stop(self, force: bool) -> None:
        found = self.selected()
        if found is None or not self._may_write("stop a job") or not self._reachable(found[0], "stop a job"):
            return
        job = found[1]
        if job.state.ended and not (job.state is JobState.ORPHANED and job.strays):
            self._say(f"{job.name or job.id} is {job.state}: there is nothing to stop", "warning")
            return
        # Who asks a second time does not want to wait any longer.
        self._stop(*found, force or job.state is JobState.STOPPING)

    @work(exclusive=True, group="stop")
    async def _stop(self, node: NodeView, job: Job, force: bool) -> None:
        row = JobRow(node.host, job.id)
        launch = self._launches.get(row)
        if launch is None:
            try:
                launch = await asyncio.wait_for(read_launch(self.console.link(node.host), job.id), 3.0)
            except (LinkError, TimeoutError):
                launch = None  # the question is asked without its grace and its folder
        orphaned = job.state is JobState.ORPHANED
        what = "End the strays of" if orphaned else "Force the end of" if force else "Stop"
        question = f"{what} {job.name or job.id} on {node.host}?"
        yes = "End them" if orphaned else "Force" if force else "Stop it"
        if not await self.app.push_screen_wait(ConfirmScreen(question, stop_text(node, job, launch, force=force), yes)):
            return
        self._say(f"{node.host}: asked {job.name or job.id} to end")
        try:
            await asyncio.wrap_future(self.console.link(node.host).stop(job.id, force=force))
        except LinkError as error:
            self._say(f"{node.host}: {error}", "error")

    def action_restart(self) -> None:
        found = self.selected()
        if found is None or not self._may_write("start a job") or not self._reachable(found[0], "start a job"):
            return
        node, job = found
        if not job.state.ended:
            self._say(f"{job.name or job.id} is {job.state}; x stops it first", "warning")
        elif job.strays:
            self._say(f"processes of {job.name or job.id} are still alive; x ends them first", "warning")
        else:
            self._restart(node, job)

    @work(exclusive=True, group="restart")
    async def _restart(self, node: NodeView, job: Job) -> None:
        link = self.console.link(node.host)
        try:
            launch = await read_launch(link, job.id)
            question = f"Start {job.name or job.id} again on {node.host}?"
            text = Content(f"{launch.verb} with the same spec, as a new job.\nFinished samples are not done again.")
            if not await self.app.push_screen_wait(ConfirmScreen(question, text, "Start it")):
                return
            self._say(f"{node.host}: planning {job.name or job.id} again")
            launch = launch._replace(env={**launch.env, **self.console.settings.env})
            secrets = secrets_for(launch.verb, launch.spec, self.console.settings)
            asked = link.plan(
                launch.verb,
                launch.spec,
                python=launch.python,
                gpus=launch.gpus,
                share=launch.share,
                env=launch.env,
                secrets=secrets,
            )
            plan = await asyncio.wrap_future(asked)
            if not plan.get("ok"):
                self._say(f"{node.host}: {plan.get('error')}: {plan.get('remedy') or 'see its log'}", "error")
                return
            started = await asyncio.wrap_future(link.launch(new_job_id(launch.verb), launch, secrets=secrets))
        except (ConfigError, LinkError) as error:
            self._say(f"{node.host}: {error}", "error")
            return
        self.console.job_started(node.host, started)
