"""How the screens look at 80x24 and at 200x60, with a clock that stands still."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from dflash_tui.app.screens.confirm import ConfirmScreen
from dflash_tui.fleet.facts import JobsArrived

from .comparisons import BAD, beside, comparison
from .comparisons import DONE as COMPARED
from .comparisons import FAILED as NO_VLLM
from .scripted import (
    PLANNED,
    REFUSED,
    HeardConsole,
    ScriptedLink,
    console,
    cpu_node,
    gpu_node,
    launch_file,
    lost_node,
    refused_node,
    shown,
    type_text,
    until,
    until_open,
    until_shown,
)
from .test_jobs_screen import DONE, FAILED, ORPHAN, RUNNING, node
from .test_launch_vllm import FOUND, planned

SIZES = [pytest.param((80, 24), id="80x24"), pytest.param((200, 60), id="200x60")]
Run = Callable[[Pilot[Any]], Awaitable[None]]


def fleet_console() -> HeardConsole:
    links = [ScriptedLink("gpu-1", gpu_node("gpu-1", job=RUNNING.id)), ScriptedLink("laptop", cpu_node("laptop"))]
    return console(*links, ScriptedLink("gpu-7", lost_node("gpu-7")), ScriptedLink("gpu-9", refused_node("gpu-9")))


def jobs_console(**answers: Any) -> HeardConsole:
    link = node(RUNNING, DONE, ORPHAN, FAILED, **answers)
    link.script = [
        *gpu_node("gpu-1", job=RUNNING.id),
        JobsArrived("gpu-1", (RUNNING, DONE, ORPHAN, FAILED), whole=True),
    ]
    return console(link, ScriptedLink("gpu-7", lost_node("gpu-7")), screen="jobs")


async def on_jobs(pilot: Pilot[Any]) -> None:
    await until_shown(pilot, "yesterday", "/models/qwen3-8b", "1/2 nodes live")


async def in_form(pilot: Pilot[Any]) -> None:
    """The form filled in and planned, with the cursor in no text field: it would blink."""
    await on_jobs(pilot)
    await pilot.press("n")
    await until_shown(pilot, "plan it first", "[ ] 0 H200")
    for name, text in {"model": "/models/qwen3-8b", "dataset": "/data/gsm8k", "output": "/data/states"}.items():
        pilot.app.screen.query_one(f"#{name}", Input).focus()
        await type_text(pilot, text)
    pilot.app.screen.query_one("#gpus").focus()
    await pilot.press("space", "f5")


@pytest.mark.parametrize("size", SIZES)
def test_the_fleet_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "gpu-1.cluster", "2/4 nodes live", "retrying in 4s")
        await pilot.press("down")
        await until_shown(pilot, "SM 1980 MHz")

    assert snap_compare(fleet_console(), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_the_jobs_look_as_they_did(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(jobs_console(), terminal_size=size, run_before=on_jobs)


@pytest.mark.parametrize("size", SIZES)
def test_a_planned_form_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await in_form(pilot)
        await until_shown(pilot, "This can run.", "planned: it can be launched")

    assert snap_compare(jobs_console(plan_answer=PLANNED), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_a_refused_form_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await in_form(pilot)
        await until_shown(pilot, "'gpt_oss' is not supported")

    assert snap_compare(jobs_console(plan_answer=REFUSED), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_the_question_before_a_stop_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await on_jobs(pilot)
        await pilot.press("x")
        await until_open(pilot, ConfirmScreen)
        await until_shown(pilot, "Stop it (y)")

    assert snap_compare(jobs_console(), terminal_size=size, run_before=run)


def compare_console() -> HeardConsole:
    jobs = (comparison(), COMPARED, BAD, NO_VLLM)
    spec = {
        "model": "/models/Qwen3-8B",
        "output": "/data/compare-8b",
        "samples": 256,
        "dtype": "bfloat16",
        "together": True,
    }
    files = {(job.id, "launch"): launch_file(job, **spec) for job in jobs}
    facts = [*gpu_node("gpu-1"), JobsArrived("gpu-1", (beside(14.0), *jobs[1:]), whole=True)]
    facts += [JobsArrived("gpu-1", (beside(float(second)),)) for second in range(15, 40)]
    return console(ScriptedLink("gpu-1", facts, files=files), screen="compare")


@pytest.mark.parametrize("size", SIZES)
def test_a_comparison_that_runs_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "hf 28%, vllm 67%", "last 2 min", "side by side", "parity BAD")
        await until(pilot, lambda: shown(pilot.app).count("Qwen3-8B ") >= 5)

    assert snap_compare(compare_console(), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_a_comparison_that_is_done_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "parity BAD", "last 2 min")
        await until(pilot, lambda: shown(pilot.app).count("Qwen3-8B ") >= 5)
        await pilot.press("down")
        await until_shown(pilot, "vllm is 2.4 times as fast", "the server's own batches")

    assert snap_compare(compare_console(), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_the_parity_of_a_comparison_looks_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "parity BAD", "last 2 min")
        await until(pilot, lambda: shown(pilot.app).count("Qwen3-8B ") >= 5)
        await pilot.press("down", "down", "d", "end")
        await until_shown(pilot, "worst sample", "BAD")

    assert snap_compare(compare_console(), terminal_size=size, run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_what_a_vllm_can_looks_in_the_form_as_it_did(snap_compare: Any, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await in_form(pilot)
        await until_shown(pilot, "This can run.", "it needs", "planned: it can be launched")

    app = jobs_console(plan_answer=planned(FOUND, "qwen3_5", extra_args=("--swap-space", "4")))
    assert snap_compare(app, terminal_size=size, run_before=run)
