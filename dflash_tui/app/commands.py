"""The command palette: every action of the screens by its name, the jobs and the themes among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider, SearchIcon

from dflash_tui.app.reading import show_command, show_source
from dflash_tui.app.screens.base import ConsoleScreen
from dflash_tui.app.screens.doctor import DoctorScreen
from dflash_tui.app.screens.help import HelpScreen
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.widgets.words import WAITING, why
from dflash_tui.fleet.facts import JobState
from dflash_tui.fleet.format import one_line

if TYPE_CHECKING:
    from dflash_tui.app.app import ConsoleApp

MOST_JOBS = 200  # of a fleet's jobs that the palette offers: those that run, then the newest


class ConsolePalette(CommandPalette):
    """The palette with a sign that every terminal draws one column wide, in place of an emoji."""

    def on_mount(self) -> None:
        self.query_one(SearchIcon).icon = "/"


class Command(NamedTuple):
    title: str
    help: str
    run: Callable[[], Any]


class ConsoleCommands(Provider):
    """What the palette offers. Where the console is read-only nothing that writes is among it."""

    @property
    def console(self) -> ConsoleApp:
        return cast("ConsoleApp", self.app)

    async def discover(self) -> Hits:
        for command in self.commands():
            yield DiscoveryHit(command.title, command.run, help=command.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self.commands():
            score = matcher.match(command.title)
            if score > 0:
                yield Hit(score, matcher.highlight(command.title), command.run, command.title, command.help)

    def commands(self) -> Iterator[Command]:
        """Every command, in the order of the palette."""
        app = self.console
        yield Command("Fleet", "Nodes and their GPUs", partial(app.action_mode, "fleet"))
        yield Command("Jobs", "Jobs of all nodes", partial(app.action_mode, "jobs"))
        yield Command("Logs", "What a job prints", partial(app.action_mode, "logs"))
        yield Command("Compare", "Both backends side by side, and the verdicts", partial(app.action_mode, "compare"))
        yield Command("Help", "What this screen shows, and its keys", partial(show_help, app))
        host = self._host()
        if host is not None:
            about = one_line(f"What {host} can do, what it lacks and how to mend it")
            yield Command("Doctor", about, partial(show_doctor, app, host))
            yield Command(
                f"Open a file of {one_line(host)}", "FILE or FILE:LINE, to read", partial(show_source, app, host)
            )
        if not app.settings.read_only:
            yield Command("Launch a job", "The form, with a plan before anything starts", app.open_launch)
            about = "Which backend is faster on a node for a model, and do both write the same"
            yield Command("Compare the backends", about, partial(app.open_launch, "compare"))
        for node in app.fleet.nodes:
            if node.link.state in WAITING:
                yield Command(f"Connect to {one_line(node.host)} now", why(node), partial(app.retry, node.host))
        yield from self._job_commands()
        for name in sorted(app.available_themes):
            yield Command(
                f"Theme: {name}", "Use these colours until the console is left", partial(setattr, app, "theme", name)
            )
        yield Command("Save a picture", "This screen as an SVG file", app.deliver_screenshot)
        yield Command("Quit", "Leave the console; jobs go on without it", app.action_quit)

    def _host(self) -> str | None:
        """The node under the cursor of the screen, else the first one."""
        screen = self.console.screen_stack[0]  # what lies over it is about the same node
        node = screen.node_under_cursor() if isinstance(screen, ConsoleScreen) else None
        return node.host if node is not None else next(iter(self.console.hosts), None)

    def _job_commands(self) -> Iterator[Command]:
        app = self.console
        for number, (node, job) in enumerate(app.fleet.jobs()):
            if number >= MOST_JOBS:
                return
            name = one_line(f"{job.name or job.id} on {node.host}")
            about = f"{job.id}, {job.state}"
            yield Command(f"Log of {name}", about, partial(app.open_log, node.host, job.id))
            yield Command(f"Command of {name}", about, partial(show_command, app, node.host, job.id))
            if app.settings.read_only:
                continue
            if not job.state.ended or (job.state is JobState.ORPHANED and job.strays):
                yield Command(f"Stop {name}", f"{about}; asks first", partial(self._order, node.host, job.id, "stop"))
                yield Command(
                    f"Force the end of {name}", f"{about}; asks first", partial(self._order, node.host, job.id, "force")
                )
            else:
                yield Command(
                    f"Restart {name}", f"{about}; asks first", partial(self._order, node.host, job.id, "restart")
                )

    async def _order(self, host: str, job: str, what: str) -> None:
        """Goes to the job on the Jobs screen and does there what its key does."""
        app = self.console
        await app.action_mode("jobs")
        jobs = app.screen
        if not isinstance(jobs, JobsScreen):
            app.say("something else is open on the Jobs screen; close it first", "warning")
            return
        jobs.select(host, job)
        found = jobs.selected()
        if found is None or (found[0].host, found[1].id) != (host, job):
            app.say(f"{job} is not among the jobs that the filter shows; clear it first", "warning")
        elif what == "restart":
            jobs.action_restart()
        else:
            jobs.action_stop(what == "force")


def show_doctor(app: ConsoleApp, host: str) -> None:
    """Opens the doctor on a node, one at a time."""
    if not isinstance(app.screen, DoctorScreen):
        app.push_screen(DoctorScreen(host))


def show_help(app: ConsoleApp) -> None:
    """Opens the help of the screen that is open; the help itself has none."""
    if not isinstance(app.screen, HelpScreen):
        app.push_screen(HelpScreen())
