"""The Logs screen: what a job prints and what it tells of itself, followed as it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Footer, Static

from dflash_tui.app.messages import LogReceived
from dflash_tui.app.reading import show_source
from dflash_tui.app.screens.base import ConsoleScreen, TitleBar
from dflash_tui.app.widgets.log_frames import TracedLog
from dflash_tui.app.widgets.log_view import LogView, Where
from dflash_tui.app.widgets.prompt_bar import SEARCH, PromptBar
from dflash_tui.app.widgets.put import put
from dflash_tui.app.widgets.rows import Cell, Row, RowsView, cell
from dflash_tui.app.widgets.words import job_state, last_seen, link_state
from dflash_tui.fleet.facts import LogArrived
from dflash_tui.fleet.format import clock, one_line, size
from dflash_tui.fleet.state import Fleet
from dflash_tui.link.errors import LinkError

if TYPE_CHECKING:
    from dflash_tui.link import Tail

FILES = ("log", "events")
BLOCK = 65536  # bytes that one read asks for: the most that the node gives at once
RETRY_S = 2.0

RESETS = {
    "truncated": "the file was truncated: what was shown is no more",
    "rotated": "another file took this one's place: what was shown is no more",
}


class JobChooser(RowsView):
    """The jobs of all nodes, one a line: those that run first."""

    def __init__(self, now: Callable[[], float], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._now = now
        self._fleet = Fleet()

    def show(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.set_rows((node.host, job.id) for node, job in fleet.jobs())
        self.refresh()

    def draw_row(self, row: Row, width: int) -> Sequence[Cell]:
        assert isinstance(row, tuple)
        host, job_id = row
        node, job = self._fleet.node(host), self._fleet.job(host, job_id)
        if node is None or job is None:
            return (cell(f"{host} {job_id}", width),)
        state, style = job_state(job.state)
        created = clock(node.console_time(job.created), now=self._now())
        return (
            cell(state, 15, style),
            cell(host, 16),
            cell(created, 17),
            cell(size(job.log_size), 11, right=True),
            cell("", 2),
            cell(job.name or job.id, max(0, width - 61)),
        )


class LogsScreen(ConsoleScreen):
    """The log of one job, or the list of jobs to choose one from."""

    MODE = "logs"
    HELP = """\
## Logs

What a job prints (`log`), or what it tells of itself (`events`), as it is written. Scrolling up stops following, and
nothing that arrives moves what you read; `G` or `End` follows again, `g` goes to the first byte of the file.
Scrolling on past the top or the bottom loads more. A progress bar is shown as a terminal shows it; escape sequences are removed.
`/` looks for a regular expression (with a capital in it, the case counts). `s` opens the source of the traceback's frame in
sight (`File "…", line N`); `[` and `]` choose the frame before and the next one. Escape goes back to the screen that opened the
log, `o` lists all jobs. A lost link keeps the place and goes on by itself.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("s", "open_source", "Source"),
        Binding("e", "other_file", "Log/events"),
        Binding("o", "choose", "Other job"),
        Binding("escape", "back", "Back", show=False),
    ]

    def __init__(self, host: str | None = None, job_id: str | None = None) -> None:
        super().__init__()
        self._host = host or ""
        self._job = job_id or ""
        self._file = "log"
        self.opened_from = ""  # the mode that Escape goes back to; "": the list of jobs
        self._tail: Tail | None = None
        self._error = ""

    def compose(self) -> ComposeResult:
        yield TitleBar(self.MODE)
        with Vertical(id="log-choice"):
            yield Static("Choose a job and press Enter", id="log-choice-title")
            yield JobChooser(self.console.now, id="log-jobs")
        with Vertical(id="log-panel"):
            yield Static(id="log-header")
            yield TracedLog(id="log")
            yield Static(id="log-status")
            yield PromptBar(id="log-search")
        yield Footer()

    def on_mount(self) -> None:
        if self._job:
            self.open_job(self._host, self._job)
        else:
            self._choosing(True)

    def on_unmount(self) -> None:
        self._close_tail()

    # Which log.

    @property
    def shown(self) -> tuple[str, str, str] | None:
        """Host, job and file that are shown; None before one was chosen."""
        return (self._host, self._job, self._file) if self._job else None

    def open_job(self, host: str, job_id: str, file: str = "log") -> None:
        """Shows a file of a job, from its end on. The one that is shown already keeps its place."""
        same = self._tail is not None and self.shown == (host, job_id, file)
        self._host, self._job, self._file = host, job_id, file
        self._choosing(False)
        if not same:
            view = self.query_one(LogView)
            view.following = True
            view.restart(0)
            self._follow()
        self._draw_lines()

    def _choosing(self, choosing: bool) -> None:
        self.query_one("#log-choice").display = choosing
        self.query_one("#log-panel").display = not choosing
        if choosing:
            self.query_one(JobChooser).show(self.console.fleet)
        self.query_one(JobChooser if choosing else LogView).focus()

    def on_rows_view_chosen(self, event: RowsView.Chosen) -> None:
        if isinstance(event.row, tuple):
            self.opened_from = ""
            self.open_job(*event.row)

    # Bytes.

    def _follow(self, offset: int = -BLOCK) -> None:
        self._close_tail()
        self._error = ""
        self._tail = self.console.link(self._host).follow(job=self._job, file=self._file, offset=offset)

    def _close_tail(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def on_log_received(self, event: LogReceived) -> None:
        fact = event.fact
        if self._tail is None or (fact.host, fact.tail) != (self._host, self._tail.id):
            return
        view = self.query_one(LogView)
        if fact.error:
            self._refused(fact)
            return
        if fact.reset:
            view.restart(fact.offset, RESETS.get(fact.reset, fact.reset))
        if fact.data or fact.gap_bytes:
            view.append(fact.data, fact.offset, fact.gap_bytes)

    def _refused(self, fact: LogArrived) -> None:
        self._error = one_line(fact.error)
        self._tail = None
        job = self.console.fleet.job(self._host, self._job)
        if job is not None and not job.state.ended:
            # The file of a job that has just begun may not be there yet.
            self.set_timer(RETRY_S, self._follow_again)
        self._draw_lines()

    def _follow_again(self) -> None:
        if self._tail is None and self._job:
            self._follow(self.query_one(LogView).stream_end or -BLOCK)

    def on_log_view_drawn(self, event: LogView.Drawn) -> None:
        if self._tail is not None:
            self._tail.ack(event.nbytes)

    def on_log_view_wanted(self, event: LogView.Wanted) -> None:
        if event.where == "end":
            self.query_one(LogView).restart(0)
            self._follow()
        else:
            self._fetch(event.where, event.offset)

    @work(exclusive=True, group="fetch")
    async def _fetch(self, where: Where, offset: int) -> None:
        """Reads what the reader scrolled to."""
        view, shown = self.query_one(LogView), self.shown
        start = max(0, offset - BLOCK) if where == "older" else offset
        length = offset - start if where == "older" else BLOCK
        future = self.console.link(self._host).read(job=self._job, file=self._file, offset=start, length=length)
        try:
            position, data = await asyncio.wrap_future(future)
        except LinkError as error:
            view.refused()
            self._error = one_line(str(error))
            self._draw_lines()
            return
        if self.shown != shown:
            return
        if where == "older":
            view.older(data, position.offset)
            return
        if where == "head":
            view.restart(0, stream_end=view.stream_end)
        view.newer(data, position.offset)

    # What stands above and below.

    def show_fleet(self, fleet: Fleet) -> None:
        if self.query_one("#log-choice").display:
            self.query_one(JobChooser).show(fleet)
        else:
            self._draw_lines()

    def on_log_view_changed(self) -> None:
        self._draw_lines()

    def _draw_lines(self) -> None:
        if not self._job:
            return
        view = self.query_one(TracedLog)
        node, job = self.console.fleet.node(self._host), self.console.fleet.job(self._host, self._job)
        name = self._job if job is None or not job.name else f"{job.name} ({self._job})"
        parts = [f"{self._file} of {one_line(name)} on {self._host}", size(view.stream_end)]
        if job is not None:
            parts.insert(1, job_state(job.state)[0])
        if node is not None and not node.live:
            now = self.console.now()
            parts.append(", ".join(filter(None, (f"link {link_state(node, now)[0]}", last_seen(node, now)))))
        put(self.query_one("#log-header", Static), Content("  ".join(parts)))
        put(self.query_one("#log-status", Static), Content("  ".join(self._status(view))))

    def _status(self, view: TracedLog) -> list[str]:
        if view.following:
            parts = ["following"]
        elif view.behind:
            parts = [f"not following, {size(view.behind)} newer not loaded: G"]
        else:
            parts = ["not following: G follows"]
        parts.append(f"lines {view.first_line:,}-{view.last_line:,} of {len(view.text):,} loaded")
        if view.text.start:
            parts.append(f"{size(view.text.start)} before them")
        if view.scroll_offset.x:
            parts.append(f"column {view.scroll_offset.x + 1}")
        if view.wrap:
            parts.append("wrapped")
        return [*filter(None, (self._error, view.search.message, view.frame_status)), *parts]

    # Keys.

    def action_search(self) -> None:
        if self._job and self.query_one("#log-panel").display:
            bar = self.query_one(PromptBar)
            bar.ask("search", SEARCH, bar.value)

    def on_prompt_bar_given(self, event: PromptBar.Given) -> None:
        if self.query_one(LogView).look_for(event.text) or not event.text:
            self.query_one(PromptBar).action_leave()
        self._draw_lines()

    def on_prompt_bar_left(self) -> None:
        self.query_one(LogView).focus()

    def action_open_source(self) -> None:
        if not self._job or self.query_one("#log-choice").display:
            return
        view = self.query_one(TracedLog)
        frame = view.frame_at_hand()
        if frame is None:
            self.console.say('no line with File "…", line N is loaded', "warning")
        else:
            show_source(self.app, self._host, *view.frames_around(frame), job=self._job)

    def action_other_file(self) -> None:
        if self._job:
            self.open_job(self._host, self._job, FILES[1 - FILES.index(self._file)])

    def action_choose(self) -> None:
        self._choosing(True)

    async def action_back(self) -> None:
        view = self.query_one(LogView)
        if self.query_one("#log-choice").display:
            if self._job:
                self._choosing(False)
        elif view.search.active:
            view.look_for("")
        elif self.opened_from not in ("", self.MODE):
            await self.console.action_mode(self.opened_from)
        else:
            self._choosing(True)
