"""The doctor's screen: asked of the node under the cursor, readable at every size, asked again by a key."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from textual.command import CommandList
from textual.pilot import Pilot

from dflash_tui.app.app import ConsoleApp
from dflash_tui.app.commands import ConsoleCommands, show_doctor
from dflash_tui.app.screens.doctor import DoctorScreen
from dflash_tui.app.screens.fleet import FleetScreen
from dflash_tui.app.screens.help import HelpScreen
from dflash_tui.app.widgets.checkup_view import checkup_content
from dflash_tui.fleet.facts import Check, CheckStatus, Checkup
from dflash_tui.link import LinkError

from .scripted import ScriptedLink, console, cpu_node, gpu_node, shown, until, until_open, until_shown

CHECKUP = Checkup(
    "gpu-1",
    (
        Check(
            "torch on GPUs", CheckStatus.PROBLEM, "torch is built for CUDA 13.0, the driver supports 12.8",
            "install driver 580 or newer, or the cu126 build of torch",
        ),
        Check("vLLM", CheckStatus.WARNING, "not found: its backend is not available here", "dflash-tui setup --host gpu-1"),
        Check("clock", CheckStatus.UNKNOWN, "it was not asked"),
        *(Check(f"disk /data/{number}", CheckStatus.OK, "writes 1200 MB/s") for number in range(30)),
    ),
)  # fmt: skip


def hits(app: ConsoleApp) -> list[str]:
    """What the palette found."""
    found = app.screen.query(CommandList)
    return [option.hit.text or "" for one in found for option in one.options if option.hit is not None]


async def open_doctor(pilot: Pilot[None], host: str = "gpu-1") -> None:
    app = pilot.app
    assert isinstance(app, ConsoleApp)
    show_doctor(app, host)
    await until_open(pilot, DoctorScreen)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=["80x24", "200x60"])
async def test_the_problem_stands_on_top_with_its_remedy_at_every_size(size: tuple[int, int]) -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=CHECKUP)
    app = console(link)
    async with app.run_test(size=size) as pilot:
        await until_shown(pilot, "gpu-1.cluster")
        await open_doctor(pilot)
        await until_shown(
            pilot, "Doctor: gpu-1", "1 problem, 1 warning, 1 unknown, 30 ok", "! problem", "~ warning", "? unknown",
            "* ok", "-> install driver 580", "r looks again, m asks about a model, Esc closes",
        )  # fmt: skip
        lines = shown(app).splitlines()
        assert all(len(line) <= size[0] for line in lines)
        text = " ".join(line.strip("│ ") for line in lines)
        assert "torch is built for CUDA 13.0, the driver" in text
        await pilot.press("end")
        await until_shown(pilot, "disk /data/29")
        await pilot.press("escape")
        await until_open(pilot, FleetScreen)
        assert link.questions("doctor") == [{"write": True}]


async def test_the_node_under_the_cursor_is_asked_and_r_asks_again() -> None:
    first = ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=CHECKUP)
    second = ScriptedLink("laptop", cpu_node("laptop"), doctor_answer=Checkup("laptop", CHECKUP.checks[1:3]))
    app = console(first, second)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "gpu-1.cluster", "laptop.cluster")
        await pilot.press("end", "ctrl+p", *"doctor")
        await until(pilot, lambda: hits(app) == ["Doctor"], "the only hit")
        await pilot.press("enter")
        await until_shown(pilot, "Doctor: laptop", "no problem, 1 warning")
        await pilot.press("r")
        await until(pilot, lambda: len(second.questions("doctor")) == 2, "a second question")
        assert first.questions("doctor") == []
        await pilot.press("question_mark")
        await until_open(pilot, HelpScreen)
        await until_shown(pilot, "Look again")


async def test_while_the_node_is_asked_the_screen_says_so_and_r_asks_no_second_time() -> None:
    answer: Future[Checkup] = Future()
    answer.set_running_or_notify_cancel()
    link = ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=answer)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "gpu-1.cluster")
        await open_doctor(pilot)
        await until_shown(pilot, "looking at gpu-1: this takes up to a minute")
        await pilot.press("r")
        answer.set_result(CHECKUP)
        await until_shown(pilot, "1 problem")
        assert len(link.questions("doctor")) == 1


async def test_a_node_that_cannot_be_asked_is_told_with_its_remedy() -> None:
    error = LinkError("not-connected", "gpu-1 is not connected (lost)", "wait until it is live")
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=error))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "gpu-1.cluster")
        await open_doctor(pilot)
        await until_shown(pilot, "gpu-1 is not connected (lost)", "wait until it is live")


async def test_a_read_only_console_asks_for_no_writing() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=CHECKUP)
    app = console(link, read_only=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "gpu-1.cluster")
        await open_doctor(pilot)
        await until(pilot, lambda: link.questions("doctor"), "the question")
        assert link.questions("doctor") == [{"write": False}]


async def test_from_the_jobs_screen_the_palette_means_the_node_of_the_job() -> None:
    app: ConsoleApp = console(ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2)), screen="jobs")
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "1/1 nodes live")
        (command,) = [one for one in ConsoleCommands(app.screen).commands() if one.title == "Doctor"]
        assert "gpu-1" in command.help


def test_what_a_node_wrote_is_shown_as_text_and_long_lines_are_wrapped_under_themselves() -> None:
    check = Check("x", CheckStatus.PROBLEM, "[bold]\x1b[31m" + "word " * 40, "[/bold] mend " * 12)
    text = checkup_content(Checkup("h", (check,)), 80).plain
    lines = text.splitlines()
    assert "[bold]" in text and "[/bold] mend" in text and "\x1b" not in text
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(" " * 14) for line in lines[3:])


CAPABLE = {
    "ok": True, "error": None, "remedy": None, "warnings": [],
    "model": "/models/m", "family": "qwen3_5", "dtype": "bfloat16", "tensor_parallel": 1, "gpus": [[9, 0]], "unusable": [],
    "hf": {"ok": True, "why": "the family Qwen3.5 is known, 64 blocks", "remedy": "", "warnings": [], "versions": {"torch": "2.11.0"}},
    "vllm": [
        {
            "python": "/v/bin/python", "version": "0.20.1", "torch": "2.11.0", "transformers": "5.9.0", "ok": False,
            "why": "vLLM 0.20.1 cannot extract from qwen3_5: [why]", "remedy": "use vLLM 0.26.0", "warnings": [], "flags": [],
            "sources": ["vllm-project/vllm#39949"],
        }
    ],
}  # fmt: skip


async def test_m_asks_about_a_model_and_escape_goes_back_to_the_node() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=CHECKUP, plan_answer=CAPABLE)
    app = console(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "gpu-1.cluster")
        await open_doctor(pilot)
        await until_shown(pilot, "1 problem")
        await pilot.press("m", *"/models/q", "enter")
        await until_shown(
            pilot, "/models/q: qwen3_5 in bfloat16 on 1 GPU of compute capability 9.0", "! problem  vLLM 0.20.1",
            "[why]", "-> use vLLM 0.26.0", "* ok       hf",
        )  # fmt: skip
        (asked,) = link.questions("plan")
        assert asked["verb"] == "capabilities" and asked["spec"]["model"] == "/models/q" and asked["gpus"] == ()
        await pilot.press("r")
        await until(pilot, lambda: len(link.questions("plan")) == 2, "a second question about the model")
        await until_shown(pilot, "vLLM 0.20.1")
        await pilot.press("escape")
        await until_shown(pilot, "torch is built for CUDA 13.0")
        await pilot.press("escape")
        await until_open(pilot, FleetScreen)


async def test_a_model_that_cannot_be_asked_about_is_told_with_its_remedy() -> None:
    refused = {"ok": False, "error": "the model /m is not a folder", "remedy": "give the folder", "warnings": []}
    link = ScriptedLink("gpu-1", gpu_node("gpu-1", seconds=2), doctor_answer=CHECKUP, plan_answer=refused)
    app = console(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "gpu-1.cluster")
        await open_doctor(pilot)
        await until_shown(pilot, "1 problem")
        await pilot.press("m", *"models", "enter")
        await until_shown(pilot, "must be an absolute path on gpu-1")
        assert not link.questions("plan")
        await pilot.press("home", "ctrl+k", *"/m", "enter")
        await until_shown(pilot, "the model /m is not a folder", "give the folder")
