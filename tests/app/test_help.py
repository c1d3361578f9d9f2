"""The help tells of the keys that do something on the screen under it, and of no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import Markdown, Static

from dflash_tui.app.app import ConsoleApp
from dflash_tui.app.commands import show_help
from dflash_tui.app.screens.help import HelpScreen, active_keys
from dflash_tui.config import Settings
from tests.app.scripted import NOW, Clock, ScriptedLink, gpu_node, until_open


def console(screen: str = "fleet") -> ConsoleApp:
    settings = Settings(hosts=("gpu-1",), screen=screen)
    return ConsoleApp([ScriptedLink("gpu-1", gpu_node("gpu-1"))], settings, clock=Clock(NOW))


async def opened(app: ConsoleApp, pilot: Pilot[None]) -> HelpScreen:
    await pilot.pause()
    await pilot.press("question_mark")
    await until_open(pilot, HelpScreen)
    assert isinstance(app.screen, HelpScreen)
    return app.screen


@pytest.mark.parametrize("mode", ["fleet", "jobs", "logs", "compare"])
async def test_the_help_of_each_screen_has_its_sentences_and_each_of_its_keys(mode: str) -> None:
    app = console(mode)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        below = app.screen
        wanted = [
            active.binding.description
            for active in below.active_bindings.values()
            if active.enabled and active.binding.description
        ]
        screen = await opened(app, pilot)
        keys = str(screen.query_one("#help-keys", Static).content)
        assert wanted
        for what in wanted:
            assert what in keys
        assert below.HELP is not None
        assert screen.query_one(Markdown).source == below.HELP.strip()


async def test_the_help_tells_of_the_widget_under_the_cursor_first() -> None:
    app = console("logs")
    async with app.run_test() as pilot:
        await pilot.pause()
        places = [keys.where for keys in active_keys(app.screen)]
        assert places == sorted(places, key=("Where the cursor is", "On this screen", "Everywhere").index)
        assert set(places) == {"Where the cursor is", "On this screen", "Everywhere"}


async def test_two_keys_of_one_action_stand_on_one_line() -> None:
    app = console()
    async with app.run_test() as pilot:
        await pilot.pause()
        found = {keys.what: keys.keys for keys in active_keys(app.screen)}
        assert found["Jobs"] == "j 2" or found["Jobs"] == "2"
        assert len([keys for keys in active_keys(app.screen) if keys.what == "Jobs"]) == 1


@pytest.mark.parametrize("key", ["escape", "question_mark", "q"])
async def test_the_help_closes_with_escape_question_mark_and_q(key: str) -> None:
    app = console()
    async with app.run_test() as pilot:
        await pilot.pause()
        below = app.screen
        await opened(app, pilot)
        await pilot.press(key)
        await pilot.pause()
        assert app.screen is below
        assert app.is_running


async def test_a_second_question_mark_opens_no_help_of_the_help() -> None:
    app = console()
    async with app.run_test() as pilot:
        await opened(app, pilot)
        show_help(app)
        await pilot.pause()
        assert len([screen for screen in app.screen_stack if isinstance(screen, HelpScreen)]) == 1


@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=["80x24", "200x60"])
def test_snapshot_of_the_help(size: tuple[int, int], snap_compare: Callable[..., bool]) -> None:
    app = console("logs")

    async def run_before(pilot: Pilot[None]) -> None:
        await opened(app, pilot)

    assert snap_compare(app, terminal_size=size, run_before=run_before)
