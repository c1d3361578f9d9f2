"""The console: starts the links, keeps what they tell, and gives it to the screen that is on top."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import tzinfo
from pathlib import Path, PurePath
from typing import Any, ClassVar

from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.notifications import SeverityLevel
from textual.screen import Screen

from dflash_tui.app.bridge import Inbox, NodeLinkLike
from dflash_tui.app.commands import ConsoleCommands, ConsolePalette, show_help
from dflash_tui.app.crash import write_report
from dflash_tui.app.messages import FleetChanged, LogReceived
from dflash_tui.app.screens.compare import CompareScreen
from dflash_tui.app.screens.fleet import FleetScreen
from dflash_tui.app.screens.job_screen import JobScreen
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.screens.launch import LaunchScreen
from dflash_tui.app.screens.logs import LogsScreen
from dflash_tui.app.screens.text import TextScreen
from dflash_tui.app.terminal import LEAVE_WITHIN_S, TerminalWatch, leave_within
from dflash_tui.app.themes import DEFAULT_THEME, load_themes
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job, LogArrived
from dflash_tui.fleet.format import clock as clock_text
from dflash_tui.fleet.state import Fleet, reduce

STYLES = Path(__file__).parent / "styles"
DRAIN_INTERVAL_S = 0.125


class ConsoleApp(App[None]):
    """The console over `links`, which it starts and closes.

    clock: the console's time in seconds since 1970; zone: of the times shown, the user's own where it is None.
    """

    TITLE = "dflash-tui"
    CSS_PATH: ClassVar[str | PurePath | list[str | PurePath] | None] = [
        STYLES / f"{name}.tcss" for name in ("base", "fleet", "jobs", "launch", "logs", "compare")
    ]
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        "fleet": FleetScreen,
        "jobs": JobsScreen,
        "logs": LogsScreen,
        "compare": CompareScreen,
    }
    DEFAULT_MODE = "fleet"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012 - as Textual declares it
    VERTICAL_BREAKPOINTS = [(0, "-short"), (40, "-tall")]  # noqa: RUF012 - as Textual declares it
    COMMANDS = {ConsoleCommands}  # noqa: RUF012 - as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f,1", "mode('fleet')", "Fleet", show=False),
        Binding("j,2", "mode('jobs')", "Jobs", show=False),
        Binding("l,3", "mode('logs')", "Logs", show=False),
        Binding("c,4", "mode('compare')", "Compare", show=False),
        Binding("question_mark", "help", "Help"),
        Binding("f1", "help", "Help", show=False),  # where a field takes every character
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self,
        links: Sequence[NodeLinkLike],
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        zone: tzinfo | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.zone = zone
        self._clock = clock
        self._inbox = Inbox()
        self._links = {link.host: link for link in links}
        self._watch: TerminalWatch | None = None
        self._logs: LogsScreen | None = None
        self.fleet = Fleet.of(self._links, clock())
        self.form_values: dict[str, str] = {}  # what was last typed into the launch form
        for link in links:
            link.emit = self._inbox.put

    # What screens may ask.

    def now(self) -> float:
        """The console's time, in seconds since 1970."""
        return self._clock()

    def link(self, host: str) -> NodeLinkLike:
        """The link to a host of the fleet. Raises KeyError for any other."""
        return self._links[host]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._links)

    def clock_text(self, time: float | None) -> str:
        """A time of the console's clock, in the user's zone."""
        return clock_text(time, now=self.now(), zone=self.zone)

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        """Tells the user one line; what nodes wrote in it is no markup."""
        self.notify(text, severity=severity, markup=False)

    def retry(self, host: str) -> None:
        """Connects to a host now, where its link waits or was refused."""
        self._links[host].retry()
        self.say(f"{host}: connecting again")

    def open_launch(self, verb: str = "") -> None:
        """Opens the launch form: over the Compare screen for a comparison, else over the Jobs screen. "" leaves the verb as it was last."""
        self._open_launch(verb)

    @work
    async def _open_launch(self, verb: str) -> None:
        mode = "compare" if verb == "compare" else "jobs"
        await self.action_mode(mode)
        if not isinstance(self.screen, LaunchScreen):
            await self.push_screen(LaunchScreen(mode, verb))

    def open_log(self, host: str, job: str) -> None:
        """Shows the log of a job; Escape there comes back to the screen that shows now."""
        self._open_log(host, job, self.current_mode)

    @work
    async def _open_log(self, host: str, job: str, back: str) -> None:
        await self.action_mode("logs")
        while isinstance(self.screen, TextScreen):  # a source that was left open over another log
            await self.pop_screen()
        if self._logs is not None:
            self._logs.open_job(host, job)
            self._logs.opened_from = back

    def job_started(self, host: str, job: Job) -> None:
        """A job was started: the screen that shows it goes to it."""
        self.say(f"{host}: started {job.id}")
        self._show_job(host, job)

    @work
    async def _show_job(self, host: str, job: Job) -> None:
        if not (isinstance(self.screen_stack[0], JobsScreen) or job.verb == "compare"):
            await self.action_mode("jobs")
        base = self.screen_stack[0]
        if isinstance(base, JobScreen):
            base.select(host, job.id)

    # Life.

    async def on_mount(self) -> None:
        if not self.is_headless:
            self._watch = TerminalWatch(sys.__stdin__.fileno() if sys.__stdin__ else 0, self._terminal_gone)
            self._watch.start()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGHUP, signal.SIGTERM):
                loop.add_signal_handler(number, self._ended_by_signal, int(number))
        themes, problems = load_themes()
        for theme in themes:
            self.register_theme(theme)
        wanted = self.settings.theme or DEFAULT_THEME
        if wanted in self.available_themes:
            self.theme = wanted
        else:
            problems.append(f"no theme is called {wanted!r}; there are {', '.join(sorted(self.available_themes))}")
        for problem in problems:
            self.say(f"theme: {problem}", "warning")
        if self.settings.screen in self.MODES:
            await self.action_mode(self.settings.screen)
        self.set_interval(DRAIN_INTERVAL_S, self._drain)
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        """What may wait until something is on the screen."""
        # What is loaded by now stays: the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        for link in self._links.values():
            link.start()

    def on_unmount(self) -> None:
        for link in self._links.values():
            link.close(wait=False)
        if self._watch is not None:
            self._watch.stop()

    def _terminal_gone(self) -> None:
        self.call_later(self._ended_by_signal, int(signal.SIGHUP))

    def _ended_by_signal(self, number: int) -> None:
        leave_within(LEAVE_WITHIN_S, 128 + number)
        self.exit(return_code=128 + number)

    def _drain(self) -> None:
        before = self.fleet
        for fact in self._inbox.drain():
            if isinstance(fact, LogArrived):
                if self._logs is not None:
                    self._logs.post_message(LogReceived(fact))
            else:
                self.fleet = reduce(self.fleet, fact)
        if self.fleet is not before:
            for screen in self.screen_stack:
                screen.post_message(FleetChanged(self.fleet))

    # Actions.

    async def action_mode(self, mode: str) -> None:
        """Shows another screen; what lies over this one stays there."""
        if mode != self.current_mode:
            await self.switch_mode(mode)
        base = self.screen_stack[0]
        if isinstance(base, LogsScreen):
            self._logs = base

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(ConsolePalette(id="--command-palette"))

    def action_help(self) -> None:
        show_help(self)

    async def action_quit(self) -> None:
        active = self.fleet.totals().active_jobs
        if active:
            jobs = "1 job runs" if active == 1 else f"{active} jobs run"
            self.exit(return_code=0, message=f"{jobs} on without the console; `dflash-tui jobs` shows them.")
        else:
            self.exit(return_code=0)

    def _handle_exception(self, error: Exception) -> None:
        # What is opened in the moment of quitting is never composed, and finds nothing of its own: that is no failure.
        if not (self._exit and isinstance(error, NoMatches)):
            super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        # A traceback is for the report, not for the user's terminal.
        if self._exception is not None:
            self._exit_renderables.clear()
            self.error_console.print(write_report(self._exception), markup=False, soft_wrap=True, highlight=False)
        super()._print_error_renderables()
