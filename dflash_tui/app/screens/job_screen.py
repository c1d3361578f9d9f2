"""What a screen with a job under its cursor can do with it: read what it was asked for and why it failed; stop it, start it again."""

from __future__ import annotations

import asyncio

from textual import work
from textual.content import Content
from textual.notifications import SeverityLevel

from dflash_tui.app.jobfiles import read_launch
from dflash_tui.app.reading import show_command, show_source
from dflash_tui.app.screens.base import ConsoleScreen
from dflash_tui.app.screens.confirm import ConfirmScreen, stop_text
from dflash_tui.app.widgets.jobs_table import JobRow
from dflash_tui.config import ConfigError
from dflash_tui.fleet.facts import Diagnosis, Job, JobState
from dflash_tui.fleet.source import Place
from dflash_tui.fleet.state import NodeView
from dflash_tui.hftoken import secrets_for
from dflash_tui.link import LinkError, new_job_id
from dflash_tui.node.protocol import BAD_REQUEST, INTERNAL, IO_ERROR, NOT_FOUND, Launch

READ_ONLY = "this console is read-only; start it without --read-only"
# Asking the node again would bring the same answer.
FINAL_CODES = (BAD_REQUEST, INTERNAL, IO_ERROR, NOT_FOUND)
ENDED_BADLY = (JobState.FAILED, JobState.KILLED, JobState.LOST, JobState.ORPHANED)


class JobScreen(ConsoleScreen):
    """A subclass says which job is selected, and draws the detail anew when more is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self._launches: dict[JobRow, Launch] = {}
        self._unreadable: set[JobRow] = set()  # whose launch.json cannot be read
        self._reading: JobRow | None = None
        # By the state, too: the log of a job whose strays still ran may have grown. None: the node had none to give.
        self._diagnoses: dict[tuple[JobRow, JobState], Diagnosis | None] = {}
        self._diagnosing: JobRow | None = None
        self._has_source = False

    def selected(self) -> tuple[NodeView, Job] | None:
        """The job under the cursor, with its node; None where there is none."""
        return None

    def select(self, host: str, job: str) -> None:
        """Puts the cursor on a job, as soon as it is there."""

    def draw_detail(self) -> None:
        """Shows what is known of the selected job."""

    def node_under_cursor(self) -> NodeView | None:
        found = self.selected()
        return None if found is None else found[0]

    # What is known beside the job's own record.

    def launch_of(self, node: NodeView, job: Job) -> Launch | None:
        """What the job was asked for; None where it is not read yet: then it is asked for."""
        row = JobRow(node.host, job.id)
        launch = self._launches.get(row)
        if launch is None and node.live and self._reading is None and row not in self._unreadable:
            self._reading = row
            self._read_launch(row)
        return launch

    def diagnosis_of(self, node: NodeView, job: Job) -> Diagnosis | None:
        """Why the job failed; None where it did not, or where that is not known yet: then it is asked for."""
        row = JobRow(node.host, job.id)
        if job.state not in ENDED_BADLY:
            return None
        if (row, job.state) not in self._diagnoses and self._diagnosing is None and node.live:
            self._diagnosing = row
            self._diagnose(row, job.state)
        return self._diagnoses.get((row, job.state))

    @work(group="launch-file")
    async def _read_launch(self, row: JobRow) -> None:
        # One at a time, and to its end: a slow link would never bring one that each drawing asks for anew.
        try:
            known = await self.keep_launch(row)
        finally:
            self._reading = None
        if known:
            self.draw_detail()

    async def keep_launch(self, row: JobRow) -> bool:
        """Reads what a job was asked for; False where the node could not be asked now."""
        try:
            self._launches[row] = await read_launch(self.console.link(row.host), row.job)
        except LinkError as error:
            if error.code not in FINAL_CODES:
                return False
            self._unreadable.add(row)
        return True

    @work(group="diagnose")
    async def _diagnose(self, row: JobRow, state: JobState) -> None:
        # One at a time, however fast the cursor moves: each reads a whole log on the node.
        try:
            told = await asyncio.wrap_future(self.console.link(row.host).diagnose(job=row.job))
            self._diagnoses[row, state] = told
        except LinkError as error:
            if error.code not in FINAL_CODES:
                return  # asked again when it is drawn again
            self._diagnoses[row, state] = None
        finally:
            self._diagnosing = None
        self.draw_detail()

    # Actions.

    def may_write(self, what: str) -> bool:
        if self.console.settings.read_only:
            self.say(f"cannot {what}: {READ_ONLY}", "warning")
            return False
        return True

    def reachable(self, node: NodeView, what: str) -> bool:
        if not node.live:
            self.say(f"cannot {what}: the link to {node.host} is {node.link.state}; wait until it is live", "warning")
        return node.live

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        self.console.say(text, severity)

    def action_open_log(self) -> None:
        found = self.selected()
        if found is None:
            self.say("no job is selected", "warning")
        else:
            self.console.open_log(found[0].host, found[1].id)

    def source_of_selected(self) -> Place | None:
        """Where the failure of the selected job was raised; None where it did not fail, or that is not known."""
        found = self.selected()
        told = None if found is None else self.diagnosis_of(*found)
        return None if told is None or told.source is None else Place(told.source.file, told.source.line)

    def offer_source(self) -> None:
        """Its key stands in the footer where it does something."""
        has_source = self.source_of_selected() is not None
        if has_source != self._has_source:
            self._has_source = has_source
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "open_source" or self._has_source

    def action_open_source(self) -> None:
        found, place = self.selected(), self.source_of_selected()
        if found is None or place is None:
            self.say("no source is known of the selected job", "warning")
        else:
            show_source(self.app, found[0].host, [place], job=found[1].id)

    def action_open_command(self) -> None:
        found = self.selected()
        if found is None:
            self.say("no job is selected", "warning")
        else:
            show_command(self.app, found[0].host, found[1].id)

    def action_open_file(self) -> None:
        node = self.node_under_cursor()
        if node is None:
            self.say("no node is selected", "warning")
        else:
            show_source(self.app, node.host)

    def action_stop(self, force: bool) -> None:
        found = self.selected()
        if found is None or not self.may_write("stop a job") or not self.reachable(found[0], "stop a job"):
            return
        job = found[1]
        if job.state.ended and not (job.state is JobState.ORPHANED and job.strays):
            self.say(f"{job.name or job.id} is {job.state}: there is nothing to stop", "warning")
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
        self.say(f"{node.host}: asked {job.name or job.id} to end")
        try:
            await asyncio.wrap_future(self.console.link(node.host).stop(job.id, force=force))
        except LinkError as error:
            self.say(f"{node.host}: {error}", "error")

    def action_restart(self) -> None:
        found = self.selected()
        if found is None or not self.may_write("start a job") or not self.reachable(found[0], "start a job"):
            return
        node, job = found
        if not job.state.ended:
            self.say(f"{job.name or job.id} is {job.state}; x stops it first", "warning")
        elif job.strays:
            self.say(f"processes of {job.name or job.id} are still alive; x ends them first", "warning")
        else:
            self._restart(node, job)

    @work(exclusive=True, group="restart")
    async def _restart(self, node: NodeView, job: Job) -> None:
        link = self.console.link(node.host)
        try:
            launch = await read_launch(link, job.id)
            question = f"Start {job.name or job.id} again on {node.host}?"
            kept = (
                "It is measured anew, from its beginning; its report takes the place of this one's."
                if launch.verb == "compare"
                else "Finished samples are not done again."
            )
            text = Content(f"{launch.verb} with the same spec, as a new job.\n{kept}")
            if not await self.app.push_screen_wait(ConfirmScreen(question, text, "Start it")):
                return
            self.say(f"{node.host}: planning {job.name or job.id} again")
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
                self.say(f"{node.host}: {plan.get('error')}: {plan.get('remedy') or 'see its log'}", "error")
                return
            started = await asyncio.wrap_future(link.launch(new_job_id(launch.verb), launch, secrets=secrets))
        except (ConfigError, LinkError) as error:
            self.say(f"{node.host}: {error}", "error")
            return
        self.console.job_started(node.host, started)
