"""How the Source and the Command screen look at 80x24 and at 200x60."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from dflash_tui.app.widgets.prompt_bar import PromptBar
from dflash_tui.app.widgets.source_view import SourceView

from .scripted import until, until_shown
from .test_command_screen import JOB
from .test_command_screen import node as command_node
from .test_source_screen import FILE, console, node, on_source

SIZES = [pytest.param((80, 24), id="80x24"), pytest.param((200, 60), id="200x60")]
Run = Callable[[Pilot[Any]], Awaitable[None]]


@pytest.mark.parametrize("theme", ["kiln", "chalk"])
@pytest.mark.parametrize("size", SIZES)
def test_a_source_looks_as_it_did(snap_compare: Any, size: tuple[int, int], theme: str) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await on_source(pilot)
        view = pilot.app.screen.query_one(SourceView)
        await until(pilot, lambda: view.lines[0].spans, "the colours")
        await pilot.press("slash", *"says", "enter")
        await until(pilot, lambda: view.search.match and not pilot.app.screen.query_one(PromptBar).display, "a match")
        await until_shown(pilot, f"{FILE}:300 on gpu-1")

    assert snap_compare(console(node(), theme=theme), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_a_command_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await pilot.press("2")
        await until_shown(pilot, JOB.id)
        await pilot.press("i")
        await until_shown(pilot, "/opt/worker/bin/python -u")
        view = pilot.app.screen.query_one(SourceView)
        await until(pilot, lambda: view.lines[0].spans, "the colours")

    assert snap_compare(console(command_node()), terminal_size=size, run_before=run)
