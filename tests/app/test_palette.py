"""The command palette has every action, and does with each what its key does."""

from __future__ import annotations

from textual.command import CommandPalette, SearchIcon
from textual.pilot import Pilot
from textual.widgets import Select, Static

from dflash_tui.app.app import ConsoleApp
from dflash_tui.app.commands import Command, ConsoleCommands
from dflash_tui.app.screens.compare import CompareScreen
from dflash_tui.app.screens.confirm import ConfirmScreen
from dflash_tui.app.screens.help import HelpScreen
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.screens.launch import LaunchScreen
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import JobsArrived, JobState, LinkState
from tests.app.scripted import (
    NOW,
    Clock,
    ScriptedLink,
    gpu_node,
    launch_file,
    refused_node,
    running_job,
    until,
    until_open,
)

ENDED = "20261130-015500-extract-0001"


def console(*, read_only: bool = False) -> ConsoleApp:
    jobs = (running_job(), running_job(ENDED, name="the first", state=JobState.FAILED))
    link = ScriptedLink("gpu-1", [*gpu_node("gpu-1"), JobsArrived("gpu-1", jobs, whole=True)])
    for job in jobs:
        link.files[(job.id, "launch")] = launch_file(job)
    return ConsoleApp([link], Settings(hosts=("gpu-1",), read_only=read_only), clock=Clock(NOW))


async def known(app: ConsoleApp, pilot: Pilot[None]) -> dict[str, Command]:
    """The commands, once the jobs are known."""
    await until(pilot, lambda: app.fleet.job("gpu-1", ENDED) is not None)
    return {command.title: command for command in ConsoleCommands(app.screen).commands()}


async def test_every_action_is_in_the_palette() -> None:
    app = console()
    async with app.run_test() as pilot:
        titles = await known(app, pilot)
        for title in (
            "Fleet", "Jobs", "Logs", "Compare", "Help", "Launch a job", "Compare the backends", "Quit", "Theme: kiln", "Theme: chalk",
            "Log of qwen3-8b gsm8k on gpu-1", "Stop qwen3-8b gsm8k on gpu-1", "Force the end of qwen3-8b gsm8k on gpu-1",
            "Log of the first on gpu-1", "Restart the first on gpu-1",
        ):  # fmt: skip
            assert title in titles
        assert "Stop the first on gpu-1" not in titles
        assert "Restart qwen3-8b gsm8k on gpu-1" not in titles


async def test_the_palette_connects_again_to_a_node_that_was_refused() -> None:
    link = ScriptedLink("gpu-9", refused_node("gpu-9"))
    app = ConsoleApp([link], Settings(hosts=("gpu-9",)), clock=Clock(NOW))
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.fleet.nodes[0].link.state is LinkState.REFUSED)
        commands = {command.title: command for command in ConsoleCommands(app.screen).commands()}
        commands["Connect to gpu-9 now"].run()
        assert link.asked == [("retry", {})]
        await pilot.press("ctrl+p")
        await until_open(pilot, CommandPalette)
        await until(pilot, lambda: app.screen.query_one(SearchIcon).icon == "/", "the icon")


async def test_a_read_only_console_offers_nothing_that_writes() -> None:
    app = console(read_only=True)
    async with app.run_test() as pilot:
        titles = await known(app, pilot)
        assert "Log of the first on gpu-1" in titles
        assert not [
            title for title in titles if title.startswith(("Launch", "Compare the", "Stop", "Force", "Restart"))
        ]


async def test_typing_in_the_palette_finds_a_theme_and_enter_takes_it() -> None:
    app = console()
    async with app.run_test() as pilot:
        await known(app, pilot)
        await pilot.press("ctrl+p")
        await until_open(pilot, CommandPalette)
        await pilot.press(*"chalk")
        await until(pilot, lambda: _hits(app) == ["Theme: chalk"])
        await pilot.press("enter")
        await until(pilot, lambda: app.theme == "chalk")


async def test_the_palette_shows_all_of_it_before_anything_is_typed() -> None:
    app = console()
    async with app.run_test() as pilot:
        titles = await known(app, pilot)
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette) and len(_hits(app)) == len(titles))
        assert _hits(app) == list(titles)


async def test_screens_help_and_the_launch_form_open_from_the_palette() -> None:
    app = console()
    async with app.run_test(size=(100, 40)) as pilot:
        titles = await known(app, pilot)
        await titles["Jobs"].run()
        await until_open(pilot, JobsScreen)
        titles["Help"].run()
        await until_open(pilot, HelpScreen)
        await pilot.press("escape")
        await until_open(pilot, JobsScreen)
        titles["Launch a job"].run()
        await until_open(pilot, LaunchScreen)


async def test_the_palette_opens_the_form_for_a_comparison_over_the_compare_screen() -> None:
    app = console()
    async with app.run_test(size=(100, 40)) as pilot:
        titles = await known(app, pilot)
        titles["Compare the backends"].run()
        await until_open(pilot, LaunchScreen)
        assert isinstance(app.screen_stack[0], CompareScreen)
        await until(pilot, lambda: app.screen.query_one("#verb", Select).value == "compare")


async def test_stopping_from_the_palette_asks_about_the_job_that_was_named() -> None:
    app = console()
    async with app.run_test(size=(100, 40)) as pilot:
        titles = await known(app, pilot)
        await titles["Stop qwen3-8b gsm8k on gpu-1"].run()
        await until_open(pilot, ConfirmScreen)
        assert "qwen3-8b gsm8k" in _question(app)
        await pilot.press("n")
        await until_open(pilot, JobsScreen)
        await titles["Restart the first on gpu-1"].run()
        await until_open(pilot, ConfirmScreen)
        assert "the first" in _question(app)


async def test_a_job_that_the_filter_hides_is_not_mistaken_for_another() -> None:
    app = console()
    async with app.run_test(size=(100, 40)) as pilot:
        titles = await known(app, pilot)
        await titles["Jobs"].run()
        await pilot.press("slash", *"first", "enter")
        await pilot.pause()
        await titles["Stop qwen3-8b gsm8k on gpu-1"].run()
        await pilot.pause()
        assert isinstance(app.screen, JobsScreen)
        assert any("the filter" in notification.message for notification in app._notifications)


def _question(app: ConsoleApp) -> str:
    return str(app.screen.query_one("#confirm-question", Static).content)


def _hits(app: ConsoleApp) -> list[str]:
    from textual.command import CommandList

    options = app.screen.query_one(CommandList).options
    return [option.hit.text or "" for option in options if option.hit is not None]
