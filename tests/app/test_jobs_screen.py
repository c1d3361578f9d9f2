"""The Jobs screen, driven by keys: what is asked of a node, and what is not."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from dflash_tui.app.screens.confirm import ConfirmScreen
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.screens.logs import LogsScreen
from dflash_tui.fleet.facts import Job, JobsArrived, JobState, LinkChanged, LinkState, Progress, Stray
from dflash_tui.link import RequestRefused

from .scripted import (
    GIB,
    NOW,
    PLANNED,
    REFUSED,
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

RUNNING = running_job()
DONE = running_job(
    "20261130-010000-extract-aaaa",
    name="yesterday",
    state=JobState.DONE,
    created=NOW - 7000,
    ended=NOW - 10,
    exit_code=0,
    result={"t": 1.0, "event": "finished", "done": 1000, "total": 1000, "verified": 1000},
)
ORPHAN = running_job(
    "20261130-010100-extract-bbbb",
    name="orphan",
    state=JobState.ORPHANED,
    reason="the supervisor is gone",
    strays=(Stray(777, 1, "VLLM::EngineCore", 70 * GIB, 3 * GIB), Stray(778, 2, "VLLM::Worker", None, GIB)),
)
FAILED = running_job(
    "20261130-010200-prepare-cccc",
    name="prepare gsm8k",
    verb="prepare",
    state=JobState.FAILED,
    progress=None,
    exit_code=2,
    reason="line 12 of /data/x.jsonl is not JSON: mend it",
)


def node(*jobs: Job, **answers: Any) -> ScriptedLink:
    """A live node with these jobs, whose launch files it can read."""
    facts = [*gpu_node("gpu-1", job=RUNNING.id, seconds=2), JobsArrived("gpu-1", jobs, whole=True)]
    files = {(job.id, "launch"): launch_file(job, output=f"/data/{job.id}") for job in jobs}
    return ScriptedLink("gpu-1", facts, files=files, **answers)


def on_jobs(*links: ScriptedLink, **settings: Any) -> HeardConsole:
    return console(*links, screen="jobs", **settings)


async def test_a_job_shows_its_state_in_words_its_rates_and_its_end_in_sight() -> None:
    app = on_jobs(node(RUNNING, FAILED))
    async with app.run_test(size=(200, 60)) as pilot:
        await until_shown(pilot, "prepare gsm8k")
        line = next(line for line in shown(app).splitlines() if "> running" in line)
        for part in ("qwen3-8b gsm8k", "gpu-1", "extract", "52%", "520/1,000", "8.7", "7,600", "373", "55s", "1m 10s"):
            assert part in line, part
        await until_shown(pilot, "! failed")


async def test_the_detail_says_why_a_job_failed_and_what_it_was_asked_for() -> None:
    app = on_jobs(node(FAILED))
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(
            pilot, "line 12 of /data/x.jsonl is not JSON", "exit status 2", f"/data/{FAILED.id}", "/models/qwen3-8b"
        )


async def test_at_80_by_24_the_detail_shows_progress_rate_and_paths_without_scrolling() -> None:
    app = on_jobs(node(RUNNING))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "/models/qwen3-8b", "/data/gsm8k", f"/data/{RUNNING.id}")
        await until_shown(
            pilot,
            "> running  for 1m 9s",
            "█▌░░░░░░░░░░░ 52%  520/1,000 samples  ETA 55s",
            "8.7 samples/s  7,600 tokens/s",
        )
        await until_shown(pilot, "455k tokens, 20.5 GiB in 1m; now extracting")


async def test_a_job_that_has_done_nothing_yet_says_what_it_is_doing_in_place_of_its_bar() -> None:
    loading = running_job(progress=Progress(done=0, total=1000, phase="importing torch"))
    starting = running_job(
        "20261130-010300-demo-dddd", name="demo", progress=None, last_event={"event": "phase", "phase": "checking"}
    )
    app = on_jobs(node(loading, starting))
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "importing tor", "checking")


async def test_escape_gives_all_jobs_back_after_a_filter_was_kept() -> None:
    app = on_jobs(node(RUNNING, DONE))
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "yesterday", "qwen3-8b gsm8k")
        await pilot.press("slash")
        await type_text(pilot, "yester")
        await pilot.press("enter")
        await until(pilot, lambda: "qwen3-8b gsm8k" not in shown(app))
        await pilot.press("escape")
        await until_shown(pilot, "qwen3-8b gsm8k")


async def test_a_running_job_comes_before_those_that_ended() -> None:
    app = on_jobs(node(DONE, FAILED, RUNNING))
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "yesterday", "qwen3-8b gsm8k")
        lines = shown(app).splitlines()
        place = {name: next(k for k, line in enumerate(lines) if name in line) for name in ("qwen3-8b", "yesterday")}
        assert place["qwen3-8b"] < place["yesterday"]


async def test_a_job_of_a_node_out_of_sight_keeps_its_state_with_a_doubt() -> None:
    link = node(RUNNING)
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "> running")
        link.emit(LinkChanged("gpu-1", LinkState.LOST, NOW, detail="nothing was heard for 10 s"))
        await until_shown(pilot, "> running (?)", "it may have changed")


async def test_a_stop_says_which_processes_and_what_is_kept_and_does_nothing_until_it_is_confirmed() -> None:
    link = node(RUNNING)
    app = on_jobs(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "> running", f"/data/{RUNNING.id}")
        await pilot.press("x")
        await until_shown(
            pilot,
            "Stop qwen3-8b gsm8k on gpu-1?",
            "supervisor 30001",
            "runner 30002",
            "31000",
            "after 1m",
            "Kept",
            RUNNING.id,
        )
        await pilot.press("enter")  # the button that does nothing has the focus
        await until_open(pilot, JobsScreen)
        await pilot.press("x")
        await until_open(pilot, ConfirmScreen)
        await pilot.press("escape")
        await until_open(pilot, JobsScreen)
        assert link.questions("stop") == []
        await pilot.press("x")
        await until_open(pilot, ConfirmScreen)
        await pilot.press("y")
        await until(pilot, lambda: link.questions("stop"))
        assert link.questions("stop") == [{"job_id": RUNNING.id, "force": False}]


async def test_a_second_stop_and_a_capital_x_force() -> None:
    stopping = replace(RUNNING, state=JobState.STOPPING, stop_requested=NOW - 5)
    for job, key in ((stopping, "x"), (RUNNING, "X")):
        link = node(job)
        app = on_jobs(link)
        async with app.run_test(size=(80, 24)) as pilot:
            await until_shown(pilot, "qwen3-8b gsm8k")
            await pilot.press(key)
            await until_shown(pilot, "Force the end of", "Samples in work are lost")
            await pilot.press("y")
            await until(pilot, lambda link=link: link.questions("stop"))
            assert link.questions("stop") == [{"job_id": RUNNING.id, "force": True}]


async def test_for_an_orphan_the_question_lists_its_strays() -> None:
    link = node(ORPHAN)
    app = on_jobs(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "? orphaned")
        await pilot.press("x")
        await until_shown(
            pilot,
            *("End the strays of orphan", "process 777, 70.0 GiB of GPU memory, 3.0 GiB of memory", "VLLM::EngineCore"),
            "process 778, 1.0 GiB of memory: VLLM::Worker",
        )
        await pilot.press("y")
        await until(pilot, lambda: link.questions("stop"))
        assert link.questions("stop") == [{"job_id": ORPHAN.id, "force": False}]


async def test_a_stop_that_the_node_refuses_is_told_with_its_remedy() -> None:
    link = node(RUNNING, stop_answer=RequestRefused("not-running", "job is not running", "look at the list again"))
    app = on_jobs(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "> running")
        await pilot.press("x")
        await until_open(pilot, ConfirmScreen)
        await pilot.press("y")
        await until_told(pilot, "job is not running: look at the list again")


@pytest.mark.parametrize(
    ("job", "key", "reason"),
    [
        (DONE, "x", "there is nothing to stop"),
        (RUNNING, "r", "x stops it first"),
        (ORPHAN, "r", "x ends them first"),
    ],
)
async def test_an_action_that_makes_no_sense_says_why(job: Job, key: str, reason: str) -> None:
    link = node(job)
    app = on_jobs(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, job.name)
        await pilot.press(key)
        await until_told(pilot, reason)
        assert not link.questions("stop") and not link.questions("launch")


@pytest.mark.parametrize("key", ["n", "x", "X", "r"])
async def test_read_only_starts_and_stops_nothing_and_says_why(key: str) -> None:
    link = node(RUNNING)
    app = on_jobs(link, read_only=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "> running", "read-only")
        await pilot.press(key)
        await until_told(pilot, "start it without", "--read-only")
        assert isinstance(app.screen, JobsScreen)
        assert {name for name, _ in link.asked} <= {"read"}


async def test_nothing_is_asked_of_a_node_that_is_out_of_reach() -> None:
    link = node(RUNNING)
    app = on_jobs(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "> running")
        link.emit(LinkChanged("gpu-1", LinkState.RETRYING, NOW, retry_in_s=3.0))
        await until_shown(pilot, "(?)")
        await pilot.press("x")
        await until_told(pilot, "the link to gpu-1 is retrying")
        assert not link.questions("stop")


async def test_a_restart_plans_and_launches_the_same_spec_under_another_id() -> None:
    link = node(FAILED, plan_answer=PLANNED)
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "! failed")
        await pilot.press("r")
        await until_shown(pilot, "Start prepare gsm8k again", "Finished samples are not done again")
        await pilot.press("y")
        await until(pilot, lambda: link.questions("launch"))
        (asked,) = link.questions("launch")
        assert asked["job_id"] != FAILED.id and "-prepare-" in asked["job_id"]
        assert asked["launch"].spec["output"] == f"/data/{FAILED.id}" and asked["launch"].verb == "prepare"
        assert link.questions("plan")[0]["spec"] == asked["launch"].spec
        await until(pilot, lambda: getattr(app.screen.selected(), "__getitem__", lambda _: None)(1) is not None)
        await until(pilot, lambda: app.screen.selected()[1].id == asked["job_id"])


async def test_a_restart_that_the_plan_refuses_launches_nothing() -> None:
    link = node(FAILED, plan_answer=REFUSED)
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "! failed")
        await pilot.press("r")
        await until_open(pilot, ConfirmScreen)
        await pilot.press("y")
        await until_told(pilot, "'gpt_oss' is not supported", "choose a Qwen3 or Llama model")
        assert not link.questions("launch")


async def test_a_launch_file_that_cannot_be_read_is_told() -> None:
    link = node(FAILED)
    link.files[FAILED.id, "launch"] = b'{"half": '
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "! failed")
        await pilot.press("r")
        await until_told(pilot, "cannot be read", "launch it anew from the form")


async def test_what_a_job_was_asked_for_is_asked_once_however_slow_the_answer_and_however_often_it_is_drawn() -> None:
    link = node(RUNNING)
    slow: Future[Any] = Future()
    link.read_answer = slow
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until(pilot, lambda: link.questions("read"), "the question")
        for second in range(6):
            link.emit(JobsArrived("gpu-1", (replace(RUNNING, log_size=second),)))
            await pilot.pause(0.15)
        assert len(link.questions("read")) == 1
        link.read_answer = None
        slow.set_result(link.read(job=RUNNING.id, file="launch").result())
        await until_shown(pilot, "/models/qwen3-8b")


async def test_a_job_that_a_filter_hides_takes_the_cursor_neither_now_nor_later() -> None:
    link = node(RUNNING, DONE)
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "yesterday")
        await pilot.press("slash")
        await type_text(pilot, RUNNING.id)
        await pilot.press("enter")
        await until(pilot, lambda: "yesterday" not in shown(app))
        screen = app.screen
        assert isinstance(screen, JobsScreen)
        screen.select("gpu-1", DONE.id)
        await pilot.press("escape")
        await until_shown(pilot, "yesterday")
        link.emit(JobsArrived("gpu-1", (replace(DONE, name="told anew"),)))
        await until_shown(pilot, "told anew")
        found = screen.selected()
        assert found is not None and found[1].id == RUNNING.id


async def test_enter_opens_the_log_of_the_job_under_the_cursor() -> None:
    link = node(RUNNING, DONE)
    app = on_jobs(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "yesterday")
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, LogsScreen) and link.questions("follow"))
        assert link.questions("follow") == [{"job": DONE.id, "file": "log"}]
        await pilot.press("2")
        await until_open(pilot, JobsScreen)
        await until_shown(pilot, "yesterday")


async def test_escape_leaves_a_log_for_the_jobs_and_one_that_was_chosen_from_the_list_for_the_list() -> None:
    app = on_jobs(node(RUNNING, DONE))
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "yesterday")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, LogsScreen) and bool(app.screen.shown))
        await pilot.press("escape")
        await until_open(pilot, JobsScreen)
        await pilot.press("3", "o", "enter", "escape")
        await until_shown(pilot, "[3 Logs]", "Choose a job")


async def test_the_filter_narrows_the_jobs_by_any_part_of_a_name() -> None:
    app = on_jobs(node(RUNNING, DONE, FAILED))
    async with app.run_test(size=(100, 40)) as pilot:
        await until_shown(pilot, "yesterday", "prepare gsm8k")
        await pilot.press("slash")
        await type_text(pilot, "yester")
        await until(pilot, lambda: "prepare gsm8k" not in shown(app))
        await pilot.press("enter", "down", "up")
        assert app.screen.selected()[1].id == DONE.id
        await pilot.press("slash", "escape")
        await until_shown(pilot, "prepare gsm8k")


async def test_the_bar_moves_as_the_job_tells_of_its_progress() -> None:
    link = node(RUNNING)
    app = on_jobs(link)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "52%")
        for done in (700, 900, 1000):
            progress = Progress(done=done, total=1000, samples_per_s=9.0, eta_s=1.0)
            link.emit(JobsArrived("gpu-1", (replace(RUNNING, progress=progress),)))
            await until_shown(pilot, f"{done // 10}%")


async def test_a_console_without_a_job_says_how_to_start_one() -> None:
    app = on_jobs(ScriptedLink("gpu-1", live("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "no job yet: n starts one")
