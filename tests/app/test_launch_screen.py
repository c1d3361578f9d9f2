"""The launch form, filled in by keys at 80x24."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Button

from backends.spec import ExtractSpec, ParitySpec, PrepareSpec, SpecError, VerifySpec
from dflash_tui.app.orders import make_order
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.screens.launch import LaunchScreen
from dflash_tui.link import LinkError, RequestRefused

from .scripted import (
    PLANNED,
    REFUSED,
    ScriptedLink,
    console,
    cpu_node,
    gpu_node,
    h200,
    shown,
    type_text,
    until,
    until_open,
    until_shown,
)

EXTRACT = {"model": "/m/qwen", "dataset": "/d/gsm8k", "output": "/o/states"}


async def fill(pilot: Pilot[Any], **texts: str) -> None:
    """Goes to each field by Tab and types into it."""
    for name, text in texts.items():
        for _ in range(30):
            focused = pilot.app.focused
            if focused is not None and focused.id == name:
                break
            await pilot.press("tab")
        assert pilot.app.focused is not None and pilot.app.focused.id == name
        await type_text(pilot, text)


async def open_form(pilot: Pilot[Any]) -> None:
    await until_shown(pilot, "1/1 nodes live")
    await pilot.press("2", "n")
    await until_open(pilot, LaunchScreen)
    await until_shown(pilot, "plan it first")


def launch_button(pilot: Pilot[Any]) -> Button:
    return pilot.app.screen.query_one("#launch", Button)


async def test_a_job_is_planned_then_launched_with_exactly_what_was_typed() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=PLANNED)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT, layers="2,10,36", last="100", name="first try")
        await fill(pilot, gpus="")
        await pilot.press("space", "down", "space", "f5")
        await until_shown(pilot, "This can run.", "2, 10, 18, 26, 34, 36", "room for 7,473 samples", "planned")
        wanted = ExtractSpec("/m/qwen", "/d/gsm8k", "/o/states", layers=(2, 10, 36), last=100).to_json()
        uuids = (h200(0, 1.0).uuid, h200(1, 1.0).uuid)
        assert link.questions("plan") == [{"verb": "extract", "spec": wanted, "python": "", "gpus": uuids}]
        await pilot.press("f9")
        await until_open(pilot, JobsScreen)
        (asked,) = link.questions("launch")
        launch = asked["launch"]
        assert (launch.name, launch.verb, launch.python, launch.spec, launch.gpus, launch.share) == (
            "first try",
            "extract",
            "",
            wanted,
            uuids,
            False,
        )
        await until_shown(pilot, "+ starting", asked["job_id"])


async def test_a_name_on_the_hub_goes_with_a_token_and_the_plan_shows_the_download() -> None:
    plan = {**PLANNED, "hub": ["org/name@0123abcd"], "download_bytes": 16 << 30, "download_free_bytes": 90 << 30}
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=plan)
    app = console(link, hf_token="hf_forTheHub")
    async with app.run_test(size=(100, 40)) as pilot:
        await open_form(pilot)
        await fill(pilot, **{**EXTRACT, "model": "org/name"})
        await pilot.press("f5")
        await until_shown(pilot, "This can run.", "download", "16.0 GiB, 90.0 GiB free for it (org/name@0123abcd)")
        await pilot.press("f9")
        await until(pilot, lambda: bool(link.questions("launch")))
    assert link.secrets == [{"HF_TOKEN": "hf_forTheHub"}] * 2
    assert "hf_forTheHub" not in repr(link.asked) + repr(app.settings)


async def test_what_was_changed_after_the_plan_cannot_be_launched() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=PLANNED)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        assert launch_button(pilot).disabled
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until(pilot, lambda: not launch_button(pilot).disabled)
        await pilot.press("x")  # typed into the output
        await until(pilot, lambda: launch_button(pilot).disabled)
        await pilot.press("f9")
        await until_shown(pilot, "was not planned yet")
        await pilot.press("backspace")
        await until(pilot, lambda: not launch_button(pilot).disabled)
        assert not link.questions("launch")


async def test_another_name_needs_no_other_plan() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=PLANNED)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until(pilot, lambda: not launch_button(pilot).disabled)
        await fill(pilot, name="called otherwise")
        assert not launch_button(pilot).disabled


async def test_a_refused_plan_shows_the_remedy_and_launches_nothing() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=REFUSED)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until_shown(pilot, "'gpt_oss' is not supported", "remedy: choose a Qwen3 or Llama model")
        await pilot.press("f9")
        await pilot.pause()
        assert launch_button(pilot).disabled and not link.questions("launch")


async def test_a_spec_that_cannot_be_is_told_without_asking_the_node() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=PLANNED)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await pilot.press("f5")
        await until_shown(pilot, "extract: model, dataset, output must be given")
        await fill(pilot, **EXTRACT, layers="10,2")
        await pilot.press("f5")
        await until_shown(pilot, "layers must rise")
        assert not link.questions("plan")


async def test_a_launch_that_fails_stays_in_the_form_with_its_reason() -> None:
    error = RequestRefused("gpu-locked", "GPU 0 is taken by job 20261130-1", "stop that job or choose another GPU")
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=PLANNED, launch_answer=error)
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until(pilot, lambda: not launch_button(pilot).disabled)
        await pilot.press("f9")
        await until_shown(pilot, "GPU 0 is taken by job", "remedy: stop that job")
        assert isinstance(app.screen, LaunchScreen) and launch_button(pilot).disabled


async def test_a_link_that_is_lost_while_planning_is_told_in_the_form() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=LinkError("lost", "the link to gpu-1 was lost"))
    app = console(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until_shown(pilot, "the link to gpu-1 was lost")
        assert launch_button(pilot).disabled and not app.screen.query_one("#plan", Button).disabled


async def test_what_was_typed_is_there_again_when_the_form_is_opened_again() -> None:
    app = console(ScriptedLink("gpu-1", cpu_node("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("escape")
        await until_open(pilot, JobsScreen)
        await pilot.press("n")
        await until_shown(pilot, "/m/qwen", "/d/gsm8k", "/o/states", "no GPU on this node")


async def test_each_verb_shows_its_own_fields() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")))
    async with app.run_test(size=(80, 40)) as pilot:
        await open_form(pilot)
        assert "layers" in shown(app) and "inputs" not in shown(app)
        await pilot.press("tab", "enter", "down", "enter")
        await until(
            pilot, lambda: "inputs" in shown(app) and "layers" not in shown(app) and "busy GPUs" not in shown(app)
        )
        await pilot.press("enter", "down", "enter")
        await until(
            pilot, lambda: "recompute" in shown(app) and "busy GPUs" in shown(app) and "inputs" not in shown(app)
        )


async def test_ticks_stay_while_readings_change() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"))
    app = console(link)
    async with app.run_test(size=(80, 40)) as pilot:
        await open_form(pilot)
        await fill(pilot, gpus="")
        await pilot.press("space")
        await until_shown(pilot, "[x] 0 H200")
        for fact in gpu_node("gpu-1", seconds=90)[-3:]:
            link.emit(fact)
        await until(pilot, lambda: app.fleet.nodes[0].gpu_series)
        await pilot.pause(0.3)
        assert "[x] 0 H200" in shown(app) and "[ ] 1 H200" in shown(app)
        assert "[x] 2" not in shown(app) and "-  2 H200: GPU is lost" in shown(app)


def test_numbers_layers_and_several_inputs_are_read_as_people_write_them() -> None:
    order = make_order("gpu-1", "extract", {**EXTRACT, "layers": "2 10, 36", "first": "1_000", "last": "2,000"})
    assert order.spec == ExtractSpec(**EXTRACT, layers=(2, 10, 36), first=1000, last=2000).to_json()
    order = make_order("gpu-1", "prepare", {"model": "/m", "inputs": "/a.jsonl '/b c.jsonl'", "output": "/o/x"})
    assert order.spec == PrepareSpec("/m", ("/a.jsonl", "/b c.jsonl"), "/o/x").to_json()
    order = make_order("gpu-1", "verify", {"output": "/o", "recompute": "8"}, gpus=("GPU-1",), share=True)
    assert order.spec == VerifySpec("/o", recompute=8).to_json() and order.gpus == ("GPU-1",) and order.share


def test_names_on_the_hub_pass_untouched_and_a_folder_of_this_machine_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"model": "org/name@v2", "inputs": "hf://datasets/org/chats:train /a.jsonl", "output": "/o"}
    for host in ("gpu-1", "local"):
        spec = make_order(host, "prepare", texts).spec
        assert (spec["model"], spec["inputs"]) == ("org/name@v2", ["hf://datasets/org/chats:train", "/a.jsonl"])
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert make_order("local", "prepare", {**texts, "model": "org/name"}).spec["model"] == str(
        tmp_path / "org" / "name"
    )
    assert make_order("gpu-1", "prepare", {**texts, "model": "org/name"}).spec["model"] == "org/name"


def test_files_in_float8_and_two_folders_to_compare_are_asked_for_by_the_form() -> None:
    order = make_order("gpu-1", "extract", {**EXTRACT, "file_dtype": "float8_e4m3fn"})
    assert order.spec == ExtractSpec("/m/qwen", "/d/gsm8k", "/o/states", file_dtype="float8_e4m3fn").to_json()
    texts = {"reference": "/o/bf16", "output": "/o/fp8", "samples": "32", "file_dtype": "float8_e4m3fn"}
    order = make_order("gpu-1", "parity", texts, gpus=("GPU-1",))
    assert order.spec == ParitySpec("/o/bf16", "/o/fp8", samples=32).to_json() and order.gpus == ()
    with pytest.raises(SpecError, match="reference must be an absolute path on gpu-1"):
        make_order("gpu-1", "parity", {**texts, "reference": "bf16"})


def test_gpus_are_not_asked_for_where_the_verb_takes_none() -> None:
    texts = {"model": "/m", "inputs": "/a.jsonl", "output": "/o"}
    order = make_order("gpu-1", "prepare", texts, gpus=("GPU-1",), share=True)
    assert order.gpus == () and not order.share


@pytest.mark.parametrize(
    ("host", "changed", "line"),
    [
        ("gpu-1", {"model": "qwen"}, "absolute path on gpu-1"),
        ("gpu-1", {"model": "./models/qwen"}, "absolute path on gpu-1"),
        ("gpu-1", {"dataset": "models/qwen"}, "absolute path on gpu-1"),
        ("gpu-1", {"model": "hf://qwen"}, "is no name of a model"),
        ("gpu-1", {"last": "many"}, "'many'"),
        ("gpu-1", {"layers": "first"}, "one of dflash, speculators"),
        ("gpu-1", {"output": ""}, "output must be given"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_the_value(host: str, changed: dict[str, str], line: str) -> None:
    with pytest.raises(SpecError, match=line):
        make_order(host, "extract", {**EXTRACT, **changed})


def test_inputs_with_an_open_quote_are_refused() -> None:
    with pytest.raises(SpecError, match="quote names with blanks"):
        make_order("gpu-1", "prepare", {"model": "/m", "inputs": "'/a", "output": "/o"})


def test_on_the_local_node_a_path_may_be_relative(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    order = make_order("local", "extract", {**EXTRACT, "model": "m", "dataset": "~/d"})
    assert order.spec["model"] == str(tmp_path / "m") and order.spec["dataset"].endswith("/home/d")
