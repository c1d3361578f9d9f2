"""The Compare screen: what it shows of comparisons in every state, and what its keys do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dflash_tui.app.screens.compare import CompareScreen
from dflash_tui.app.screens.confirm import ConfirmScreen
from dflash_tui.app.screens.launch import LaunchScreen
from dflash_tui.app.screens.logs import LogsScreen
from dflash_tui.fleet.facts import Cause, Diagnosis, Job, JobsArrived, JobState, LinkChanged, LinkState, Side, Source
from dflash_tui.link import LinkError

from .comparisons import BAD, DONE, FAILED, HF, RESULT, SAMPLES, STARTING, beside, comparison, side
from .scripted import (
    NOW,
    PLANNED,
    HeardConsole,
    ScriptedLink,
    console,
    gpu_node,
    launch_file,
    live,
    running_job,
    shown,
    type_text,
    until,
    until_open,
    until_shown,
    until_told,
)

RUNNING = comparison()
SPEC = {"model": "/models/Qwen3-8B", "output": "/data/compare-8b", "samples": SAMPLES, "together": False}
SIZES = [pytest.param((80, 24), id="80x24"), pytest.param((200, 60), id="200x60")]


def node(*jobs: Job, host: str = "gpu-1", **answers: Any) -> ScriptedLink:
    """A live node with these jobs, whose launch files it can read."""
    facts = [*gpu_node(host, seconds=2), JobsArrived(host, jobs, whole=True)]
    files = {(job.id, "launch"): launch_file(job, **SPEC) for job in jobs}
    return ScriptedLink(host, facts, files=files, **answers)


def on_compare(*links: ScriptedLink, **settings: Any) -> HeardConsole:
    return console(*links, screen="compare", **settings)


def figure(app: HeardConsole, label: str) -> list[str]:
    """What stands in the columns of hf and vllm on the line of a figure."""
    lines = shown(app).splitlines()
    head = next(line for line in lines if re.match(r" +hf +vllm\b", line))
    begin, middle = head.index("hf"), head.index("vllm")
    line = next(line for line in lines[lines.index(head) :] if re.match(rf" *{re.escape(label)} ", line))
    return [line[begin:middle].strip(), line[middle : 2 * middle - begin].strip()]


@pytest.mark.parametrize("size", SIZES)
async def test_both_backends_stand_side_by_side_while_they_run(size: tuple[int, int]) -> None:
    link = node(beside(20.0))
    app = on_compare(link)
    async with app.run_test(size=size) as pilot:
        await until_shown(pilot, "Qwen3-8B on gpu-1", "> running")
        for second in range(21, 40):
            link.emit(JobsArrived("gpu-1", (beside(float(second)),)))
        hf, vllm = beside(39.0).sides["hf"], beside(39.0).sides["vllm"]
        await until_shown(pilot, f"{hf.done}/256", f"{vllm.done}/256", "last 2 min")
        assert figure(app, "samples/s") == ["2.67", "6.37"]
        assert figure(app, "per GPU") == ["2.67", "6.37"]
        assert figure(app, "start-up") == ["12s", "12s"]
        assert figure(app, "MB/s") == ["95.5", "228"]
        assert figure(app, "GPUs") == ["0 H200", "1 H200"]
        assert figure(app, "ETA") == ["1m 9s", "13s"]
        history = figure(app, "last 2 min")
        assert all(len(values) >= 18 and set(values) <= set("▁▂▃▄▅▆▇█") for values in history)
        assert "hf 28%, vllm 67%" in shown(app)


async def test_a_side_that_has_measured_nothing_yet_is_not_available_and_not_zero() -> None:
    app = on_compare(node(RUNNING))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "* done", "+ starting", "loading weights (4 of 17 fil…", "hf done, vllm starting")
        for label in ("samples/s", "tokens/s", "MB/s", "start-up"):
            hf, vllm = figure(app, label)
            assert vllm == "N/A" and hf[0].isdecimal(), label


async def test_what_is_being_done_when_both_are_done_is_told() -> None:
    sides = {name: Side(name, "done", None, SAMPLES, SAMPLES) for name in ("hf", "vllm")}
    event = {"event": "phase", "phase": "comparing what they wrote"}
    app = on_compare(node(comparison(sides=sides, last_event=event, gpus=())))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "for 2m 9s  comparing what they wrote")
        assert figure(app, "GPUs") == ["none: the CPU"] * 2


async def test_the_end_is_a_sentence_the_figures_and_the_parity_of_every_layer() -> None:
    app = on_compare(node(DONE))
    async with app.run_test(size=(200, 60)) as pilot:
        await until_shown(
            pilot,
            "vllm is 2.4 times as fast (2.3 to 2.5) for Qwen3-8B on 2 H200",
            "13.1  <- 2.42x as fast",
            "5.25 to 5.57",
            "23m 33s for 7,473 samples",
            "the server's own batches",
            "worst sample    row 131 at layer 34, off by 1.17 %: nearest its limit",
            "hf: NVML total energy counter; vllm: the cards did not answer all the time",
            "vllm 2.42x, parity good",
        )
        assert figure(app, "samples/joule") == ["0.00412", "N/A"]
        assert figure(app, "restarts") == ["0", "1"]
        for layer_id in RESULT["layer_ids"]:
            assert re.search(rf" {layer_id} +0\.\d %  +2 %  █+░+ +0\.9999\d  +131  good", shown(app)), layer_id
        assert "BAD" not in shown(app)


async def test_at_80_by_24_the_sentence_and_the_figures_fit_and_d_gives_them_the_screen_to_scroll() -> None:
    app = on_compare(node(DONE))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "same (worst layer 0.9 %)", "<- 2.42x as fast", "whole dataset", "0, 1 H200")
        assert "worst sample" not in shown(app)
        await pilot.press("d", "end")
        await until_shown(pilot, "worst sample", "/data/compare-8b/compare.json", "0.99998")
        assert "result" not in shown(app).splitlines()[1]
        await pilot.press("home")
        await until_shown(pilot, "vllm is 2.4 times as fast")
        await pilot.press("escape")
        await until_shown(pilot, "parity good")
        assert all(len(line) <= 80 for line in shown(app).splitlines())


async def test_states_that_are_not_the_same_are_said_before_any_speed() -> None:
    app = on_compare(node(BAD))
    async with app.run_test(size=(200, 60)) as pilot:
        await until_shown(
            pilot,
            "hf and vllm did NOT write the same",
            "! parity BAD: the two did not write the same states",
            "! layer id 34 is off by 0.2",
            "vllm 2.42x, parity BAD",
        )
        assert len(re.findall(r"31 % +2 %  █+ .*BAD", shown(app))) == 1
        # The first reason is in the sentence.
        assert shown(app).count("nearer to the reference's layer id 35") == 1


async def test_a_comparison_that_failed_shows_why_with_the_line_of_its_log_and_the_remedy() -> None:
    cause = Cause("port-in-use", "the port is taken", 812, "Address already in use")
    told = Diagnosis(True, cause, "another port", Source("/venv/api_server.py", 77), 900, 0)
    link = node(FAILED, diagnose_answer=told)
    app = on_compare(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(
            pilot, "the vllm side failed", "exit status 1", "the port is taken", "line 812", "another port"
        )
        assert figure(app, "state") == ["* done", "! failed"]
        await until_shown(pilot, "s Source")
        assert link.questions("diagnose") == [{"job": FAILED.id, "path": None}]


async def test_sides_of_a_job_that_was_killed_do_not_seem_to_run() -> None:
    killed = replace(beside(30.0), state=JobState.KILLED, ended=NOW, exit_signal=9)
    app = on_compare(node(killed))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "! killed", "- broken off", "signal 9")
        assert "> running" not in shown(app)


async def test_comparisons_of_all_nodes_are_listed_the_running_first_then_the_newest() -> None:
    other = replace(comparison("20261130-010000-compare-dddd", name="elsewhere"), created=NOW - 1000)
    extract = running_job(name="no comparison")
    app = on_compare(node(FAILED, DONE, extract, BAD), node(other, host="gpu-2"))
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(pilot, "elsewhere", "a shifted one", "no vllm there", "8b, one")
        await until(pilot, lambda: all("Qwen3-8B" in row for row in shown(app).splitlines()[2:6]), "every launch file")
        rows = shown(app).splitlines()[2:6]
        found = [next(name for name in ("elsewhere", "8b, one", "a shifted", "no vllm") if name in row) for row in rows]
        assert found == ["elsewhere", "8b, one", "a shifted", "no vllm"]
        assert "no comparison" not in shown(app)
        assert "2026-11-" in rows[1] and "gpu-2" in rows[0]


async def test_the_filter_finds_a_model_and_escape_gives_all_back() -> None:
    link = node(DONE, FAILED)
    link.files[(FAILED.id, "launch")] = launch_file(FAILED, model="/models/Other-1B")
    app = on_compare(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(pilot, "Qwen3-8B", "Other-1B")
        await pilot.press("slash")
        await type_text(pilot, "1b")
        await pilot.press("enter")
        await until(pilot, lambda: "parity good" not in shown(app))
        await pilot.press("escape")
        await until_shown(pilot, "parity good", "Other-1B")


async def test_an_empty_screen_says_what_a_comparison_is_and_how_one_is_started() -> None:
    app = on_compare(node())
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "no comparison yet: n starts one", "layer by layer", "1/1 nodes live")


async def test_c_and_4_open_the_screen_enter_and_l_open_the_log_and_escape_comes_back() -> None:
    app = console(node(DONE))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "1/1 nodes live")
        for key, log in (("c", "enter"), ("4", "l")):
            await pilot.press(key)
            await until_shown(pilot, "[4 Compare]", "parity good")
            await pilot.press(log)
            await until_open(pilot, LogsScreen)
            await until_shown(pilot, "[3 Logs]")
            await pilot.press("escape")
            await until_shown(pilot, "[4 Compare]", "parity good")


async def test_n_opens_the_form_for_a_comparison_and_what_it_starts_is_shown_here() -> None:
    link = node(DONE, plan_answer={**PLANNED, "warnings": []})
    app = on_compare(link)
    async with app.run_test(size=(80, 40)) as pilot:
        await until_shown(pilot, "parity good")
        await pilot.press("n")
        await until_open(pilot, LaunchScreen)
        await until_shown(pilot, "[4 Compare]", "backends run", "plan it first")
        for name, text in {"model": "/m", "dataset": "/d", "output": "/o/first"}.items():
            app.screen.query_one(f"#{name}").focus()
            await type_text(pilot, text)
        await pilot.press("f5")
        await until_shown(pilot, "planned: it can be launched")
        await pilot.press("f9")
        await until_open(pilot, CompareScreen)
        (asked,) = link.questions("launch")
        assert asked["launch"].verb == "compare"
        await until(pilot, lambda: app.screen.selected()[1].id == asked["job_id"])
        await until_shown(pilot, "hf waits, vllm waits")


async def test_another_job_started_from_the_same_form_is_shown_by_the_jobs() -> None:
    link = node(DONE)
    app = on_compare(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "parity good")
        job = running_job(name="an extraction")
        link.emit(JobsArrived("gpu-1", (job,)))
        app.job_started("gpu-1", job)
        await until_shown(pilot, "[2 Jobs]", "an extraction")


async def test_x_stops_after_a_question_that_says_that_there_will_be_no_verdict() -> None:
    link = node(RUNNING)
    app = on_compare(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "Qwen3-8B")
        await pilot.press("x")
        await until_open(pilot, ConfirmScreen)
        await until_shown(pilot, "Stop qwen3-8b on h200 on gpu-1?", "There is no verdict then")
        await pilot.press("y")
        await until(pilot, lambda: link.questions("stop") == [{"job_id": RUNNING.id, "force": False}])


async def test_a_read_only_console_starts_and_stops_no_comparison() -> None:
    link = node(RUNNING)
    app = on_compare(link, read_only=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "Qwen3-8B", "read-only", "[4 Compare]")
        await pilot.press("n")
        await until_told(pilot, "cannot start a comparison", "read-only")
        await pilot.press("x")
        await until_told(pilot, "cannot stop a job", "read-only")
        assert isinstance(app.screen, CompareScreen) and not link.questions("stop")


async def test_a_node_out_of_sight_leaves_what_was_last_known_with_a_doubt() -> None:
    link = node(beside(30.0))
    app = on_compare(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "> running")
        link.emit(LinkChanged("gpu-1", LinkState.LOST, NOW))
        await until_shown(pilot, "it may have changed", "> running (?)", "samples/s")


async def test_a_record_without_its_sides_or_with_a_strange_result_is_no_fault() -> None:
    strange = comparison(
        "20261130-030000-compare-eeee",
        state=JobState.DONE,
        sides={},
        result={
            "verdict": {"faster": 3, "ratio": "x", "sentence": None},
            "sides": {"hf": [], "vllm": {"gpus": 7}},
            "parity": [],
        },
    )
    app = on_compare(node(comparison(sides={}), strange))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "hf waits, vllm waits", "undecided, parity N/A")
        await pilot.press("down")
        await until_shown(pilot, "? parity N/A")


async def test_only_what_changed_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    link = node(RUNNING, DONE, BAD)
    app = on_compare(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "parity BAD", "Qwen3-8B")
        table = app.screen.query_one("#comparisons")
        drawn: list[Any] = []
        monkeypatch.setattr(table, "refresh_rows", lambda rows: drawn.append(list(rows)))
        for fact in live("gpu-1", at=NOW + 5):
            link.emit(fact)
        link.emit(JobsArrived("gpu-1", (beside(30.0),)))
        await until(pilot, lambda: any(drawn))
        assert {row.job for rows in drawn for row in rows} == {RUNNING.id}


async def test_the_figures_have_the_keyboard_again_once_a_filter_was_typed() -> None:
    app = on_compare(node(DONE))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "parity good")
        await pilot.press("d", "slash")
        await type_text(pilot, "8b")
        await pilot.press("enter")
        await until(pilot, lambda: app.focused is app.screen.query_one("#compare-detail"), "the figures to have it")
        await pilot.press("d")
        await until(pilot, lambda: app.focused is app.screen.query_one("#comparisons"), "the list to have it")


async def test_a_model_that_a_lost_link_kept_back_is_asked_for_once_it_is_live_again() -> None:
    link = node(FAILED, replace(FAILED, id="20261127-081600-compare-dddd"))
    link.read_answer = LinkError("lost", "the link was lost")
    app = on_compare(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: link.questions("read"), "the question")
        link.read_answer = None
        link.emit(LinkChanged("gpu-1", LinkState.LOST, NOW))
        for fact in live("gpu-1", at=NOW + 5):
            link.emit(fact)
        await until(pilot, lambda: shown(app).count("Qwen3-8B") >= 3, "both rows and the detail")


async def test_of_many_layers_those_that_the_node_left_off_are_counted() -> None:
    many = replace(DONE, result={**RESULT, "layer_ids": list(range(20))})
    app = on_compare(node(many))
    async with app.run_test(size=(200, 60)) as pilot:
        await until_shown(pilot, "and 14 better layers: parity.json has them")


async def test_over_time_a_side_that_is_done_shows_no_last_two_minutes() -> None:
    hf = side("hf", 30.0, 100)
    link = node(comparison(sides={"hf": hf, "vllm": STARTING}))
    app = on_compare(link)
    async with app.run_test(size=(120, 40)) as pilot:
        for second in range(31, 36):
            link.emit(
                JobsArrived("gpu-1", (comparison(sides={"hf": side("hf", second, 3 * second), "vllm": STARTING}),))
            )
            await pilot.pause(0.05)
        await until(pilot, lambda: "last 2 min" in shown(app) and figure(app, "last 2 min")[0], "its curve")
        link.emit(JobsArrived("gpu-1", (comparison(sides={"hf": HF, "vllm": side("vllm", 20.0, 50)}),)))
        link.emit(JobsArrived("gpu-1", (comparison(sides={"hf": HF, "vllm": side("vllm", 30.0, 90)}),)))
        await until(pilot, lambda: figure(app, "state")[0] == "* done" and figure(app, "last 2 min")[1], "vllm's curve")
        assert figure(app, "last 2 min")[0] == ""
