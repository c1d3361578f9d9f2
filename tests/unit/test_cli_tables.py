"""What commands print for people fits into 80 columns, and says what came of a job."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from dflash_tui.commands import export, parity, setup, verify
from dflash_tui.commands.follow import _figures
from dflash_tui.commands.jobs import print_jobs
from dflash_tui.commands.output import console
from dflash_tui.fleet.facts import Job, JobState, Progress

REASON = "line 2 of chats.jsonl is not JSON: mend or remove that line; each line is one JSON object"
LAYER = {
    "relative_error": 0.02651,
    "relative_error_by_token": 0.02644,
    "limit": 0.0781,
    "cosine": 0.999664,
    "worst_cosine": 0.999367,
    "worst_row": 12345,
    "worst_row_error": 0.0271,
    "lost_share": 0.1234,
    "worst_of_largest": 0.0123,
    "good": True,
}
# What a verification of float8 files told.
VERIFIED = json.loads(
    '{"verified": 24, "tokens": 2916, "bytes": 1160576, "not_extracted": 89, "unlisted": 0, "leftover": 0,'
    ' "file_dtype": "float8_e4m3fn", "recomputed": 3, "worst_error_by_layer": {"2": 0.02731, "8": 0.02919}}'
)


def terminal(width: int) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    screen = console(written)
    screen.width = width
    return screen, written


def job(**fields: Any) -> Job:
    values: dict[str, Any] = {
        "id": "20261130-094341-prepare-0026",
        "name": "chats",
        "verb": "prepare",
        "state": JobState.FAILED,
        "created": 1796032000.0,
        "directory": "/jobs/x",
        "reason": REASON,
    }
    return Job(**{**values, **fields})


def test_a_narrow_list_of_jobs_keeps_every_id_whole_and_tells_the_reasons_below() -> None:
    screen, written = terminal(80)
    print_jobs(screen, [("local", job()), ("local", job(state=JobState.DONE, reason=""))], with_host=False)
    title, failed, done, reason = written.getvalue().splitlines()
    assert all(cell_len(line) <= 80 for line in (title, failed, done))
    assert failed.split()[0] == done.split()[0] == job().id
    assert reason == f"{job().id}: {REASON}"


def test_a_wide_list_of_jobs_has_the_reason_in_its_line() -> None:
    screen, written = terminal(200)
    print_jobs(screen, [("local", job())], with_host=True)
    _, line = written.getvalue().splitlines()
    assert line.startswith("local") and line.rstrip().endswith(REASON)


def test_the_layers_of_a_parity_are_a_line_each_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, written = terminal(80)
    monkeypatch.setattr(parity, "console", lambda: screen)
    parity.show_result({"layers": {"2": LAYER, "61": LAYER}, "verdict": "good"})
    lines = written.getvalue().splitlines()
    assert len(lines) == 4 and all(cell_len(line) <= 80 for line in lines)
    assert lines[-1].split() == [
        "61",
        "0.0265",
        "0.0264",
        "0.0781",
        "0.99966",
        "0.99937",
        "12.34%",
        "12,345",
        "0.0271",
        "good",
    ]
    assert "parity is good" in capsys.readouterr().err


def test_a_parity_without_lost_values_shows_the_largest_difference_as_a_share_of_the_largest_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, written = terminal(80)
    monkeypatch.setattr(parity, "console", lambda: screen)
    parity.show_result({"layers": {"61": {**LAYER, "lost_share": 0.0}}, "verdict": "good"})
    *titles, line = written.getvalue().splitlines()
    assert len(titles) == 2 and all(cell_len(text) <= 80 for text in (*titles, line))
    assert "largest" in titles[1] and "lost" not in "".join(titles)
    assert line.split()[6] == "1.23%"


def test_a_verification_says_what_is_right_how_right_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    verify.show_result(VERIFIED)
    right, anew, missing = capsys.readouterr().err.splitlines()
    assert right == "every file is right: 24 samples, 2,916 tokens, 1.1 MiB in float8_e4m3fn"
    assert anew == "3 computed anew; worst relative error by layer: 2: 0.027, 8: 0.029"
    assert missing == "89 rows of the dataset are not extracted"


def test_an_export_says_what_lies_there_and_the_ids_of_the_draft_config(capsys: pytest.CaptureFixture[str]) -> None:
    export.show_result({"exported": 24, "kept": 4, "left_out": 2, "target_layer_ids": [1, 2], "output": "/sf"})
    assert capsys.readouterr().err.splitlines() == [
        "/sf holds 24 samples, 4 of them from an earlier export",
        "2 samples are left out; specforge.json names their rows",
        "target_layer_ids of SpecForge's draft config: 1, 2",
    ]


def test_a_setup_plan_names_each_environment_and_leaves_out_what_there_is_none_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, written = terminal(80)
    monkeypatch.setattr(setup, "terminal", lambda: screen)
    makes = {"worker": ["torch==2.13.0", "numpy==2.4.6"], "vllm-0.26.0": ["vllm==0.26.0"]}
    setup._show_plan("gpu-1", {"makes": makes, "already_whole": [], "where": "/e", "wheels": None, "bytes_total": 1})
    text = written.getvalue()
    assert "makes worker       torch==2.13.0, numpy==2.4.6" in text and "makes vllm-0.26.0  vllm==0.26.0" in text
    assert "whole already" not in text and "wheels" not in text


def test_where_a_bar_has_little_room_the_time_to_go_stays_and_the_lesser_rates_go() -> None:
    running = job(
        state=JobState.RUNNING,
        verb="extract",
        progress=Progress(
            done=16, total=23, samples_per_s=15.3, tokens_per_s=3889.0, bytes_per_s=6e6, eta_s=65.0, tokens=1, bytes=1
        ),
    )
    whole = ", 16 of 23 samples, 15.3 samples/s, 3,889 tokens/s, 5.7 MiB/s, 1:05 to go"
    assert _figures(running, phase=False, room=100) == _figures(running, phase=False) == whole
    assert _figures(running, phase=False, room=60) == ", 16 of 23 samples, 15.3 samples/s, 3,889 tokens/s, 1:05 to go"
    assert _figures(running, phase=False, room=20) == ", 16 of 23 samples, 15.3 samples/s, 1:05 to go"
