"""Why a job failed, in the detail of the Jobs screen: asked of its node once, and never waited for."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from dflash_tui.fleet.facts import Cause, Diagnosis, Job, JobsArrived, JobState, Source
from dflash_tui.link import LinkError, RequestRefused

from .scripted import NOW, ScriptedLink, console, launch_file, live, running_job, shown, until, until_shown

FAILED = running_job(state=JobState.FAILED, ended=NOW - 10, exit_code=1, reason="its log says why", progress=None)
OTHER = replace(FAILED, id="20261130-010200-extract-cccc", name="another", created=NOW - 900)
WELL = replace(FAILED, id="20261130-010300-extract-dddd", name="well", state=JobState.DONE, reason="")
TOLD = Diagnosis(
    True,
    Cause("port-in-use", "the port that the server wants is taken", 812, "OSError: [Errno 98] Address already in use"),
    "give another port",
    Source("/venv/vllm/api_server.py", 77),
    900,
    0,
)


def node(*jobs: Job, diagnose_answer: Diagnosis | Exception | Future[Diagnosis] | None = None) -> ScriptedLink:
    files = {(job.id, "launch"): launch_file(job) for job in jobs}
    return ScriptedLink(
        "gpu-1", [*live("gpu-1"), JobsArrived("gpu-1", jobs)], files=files, diagnose_answer=diagnose_answer
    )


async def test_a_failed_job_shows_its_cause_its_line_where_it_was_raised_and_the_remedy() -> None:
    link = node(FAILED, diagnose_answer=TOLD)
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(
            pilot,
            "the port that the server wants is taken",
            "line 812",
            "Address already in use",
            "give another port",
            "/venv/vllm/api_server.py:77",
        )
        for _ in range(5):  # drawn again, asked once
            link.emit(JobsArrived("gpu-1", (replace(FAILED, log_size=FAILED.log_size + 1),)))
            await pilot.pause(0.15)
        assert link.questions("diagnose") == [{"job": FAILED.id, "path": None}]


async def test_a_small_terminal_shows_the_cause_and_the_remedy_before_all_the_job_said_of_its_end() -> None:
    wordy = replace(FAILED, reason="the server ended with status 1 before it was healthy: " + "words of its own " * 20)
    app = console(node(wordy, diagnose_answer=TOLD))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "the port that the server wants is taken", "give another port", "line 812")


async def test_a_job_whose_own_words_hold_the_cause_says_it_once_and_then_where_it_was_raised() -> None:
    told = replace(FAILED, reason=f"the server ended with status 1: {TOLD.cause.text if TOLD.cause else ''}")
    app = console(node(told, diagnose_answer=TOLD))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "/venv/vllm/api_server.py:77")
        detail = shown(app)
        assert detail.count("the port that the server wants is taken") == 1
        assert detail.index("why ") < detail.index("raised at")


async def test_a_diagnosis_that_takes_its_time_holds_nothing_up_and_they_are_asked_one_by_one() -> None:
    slow: Future[Diagnosis] = Future()
    link = node(FAILED, OTHER, diagnose_answer=slow)
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: link.questions("diagnose"), "the question")
        await pilot.press("down")
        await until_shown(pilot, OTHER.id)
        assert len(link.questions("diagnose")) == 1
        link.diagnose_answer = TOLD
        slow.set_result(replace(TOLD, remedy="of the first"))
        await until_shown(pilot, "give another port")
        assert "of the first" not in shown(app)
        assert {asked["job"] for asked in link.questions("diagnose")} == {FAILED.id, OTHER.id}
        await pilot.press("up")
        await until_shown(pilot, "of the first")


async def test_a_job_that_ended_well_is_not_asked_about() -> None:
    link = node(WELL)
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, WELL.id, "/models/qwen3-8b")
        assert not link.questions("diagnose")


async def test_a_node_that_has_no_diagnosis_is_not_asked_again() -> None:
    link = node(FAILED, diagnose_answer=RequestRefused("internal", "diagnose failed", ""))
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: link.questions("diagnose"), "the question")
        for size in range(5):
            link.emit(JobsArrived("gpu-1", (replace(FAILED, log_size=size),)))
            await pilot.pause(0.15)
        await until_shown(pilot, "its log says why")
        assert len(link.questions("diagnose")) == 1


@pytest.mark.parametrize(
    "no_answer",
    [LinkError("lost", "the link was lost"), RequestRefused("timed-out", "no answer within 180 s")],
    ids=["the link was lost", "the node was too slow"],
)
async def test_a_question_without_an_answer_is_asked_again(no_answer: LinkError) -> None:
    link = node(FAILED, diagnose_answer=no_answer)
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: link.questions("diagnose"), "the question")
        link.diagnose_answer = TOLD
        link.emit(JobsArrived("gpu-1", (replace(FAILED, log_size=1),)))
        await until_shown(pilot, "give another port")


async def test_an_orphan_is_diagnosed_anew_once_its_strays_have_ended() -> None:
    orphan = replace(FAILED, state=JobState.ORPHANED)
    link = node(orphan, diagnose_answer=replace(TOLD, remedy="of its first lines"))
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "of its first lines")
        link.diagnose_answer = TOLD
        link.emit(JobsArrived("gpu-1", (FAILED,)))
        await until_shown(pilot, "give another port")


async def test_the_source_is_one_key_away_where_the_detail_is_hidden_too() -> None:
    link = node(WELL, FAILED, diagnose_answer=TOLD)
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, WELL.id)
        await pilot.press("d", "home", "down")
        await until_shown(pilot, "s Source")
