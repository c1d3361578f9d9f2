"""The command `compare`: its order, both sides as lines and bars, the tables of a result, and its exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.progress import BarColumn, Progress, TextColumn

from backends.spec import CompareSpec
from dflash_tui.cli import main, make_parser
from dflash_tui.commands import compare
from dflash_tui.commands.comparison import show_result
from dflash_tui.commands.follow import Bar, Lines
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import console
from dflash_tui.commands.sides import side_words
from dflash_tui.fleet.facts import Job, JobState, Side

NEEDED = ["--model", "/models/Qwen3-8B", "--dataset", "/data/chats", "--output", "/data/compared"]
LAYER = {
    "relative_error": 0.0061,
    "relative_error_by_token": 0.0088,
    "limit": 0.0781,
    "cosine": 0.999964,
    "worst_cosine": 0.999367,
    "worst_row": 12345,
    "worst_row_error": 0.0271,
    "lost_share": 0.0,
    "worst_of_largest": 0.0123,
    "good": True,
}
SENTENCE = "hf is 2.1 times as fast (1.9 to 2.3) for Qwen3-8B on 1 H200: 41.2 against 19.6 samples/s"
FIGURES: dict[str, Any] = {
    "samples": 256,
    "startup_s": 31.25,
    "steady_s": 61.5,
    "samples_per_s": 41.23,
    "interval": [39.8, 42.61],
    "tokens_per_s": 36_012.0,
    "mb_per_s": 1770.2,
    "samples_per_s_per_gpu": 41.23,
    "joules": 38_020.0,
    "samples_per_joule": 0.00673,
    "whole_dataset_s": 22_190.0,
    "packing": "packs",
    "versions": {"python": "3.12.3", "torch": "2.11.0+cu130", "transformers": "5.17.0"},
    "restarts": 0,
    "skipped": 0,
}
RESULT: dict[str, Any] = {
    "model": "/models/Qwen3-8B",
    "report": "/data/compared/compare.json",
    "sides": {
        "hf": FIGURES,
        "vllm": {
            **FIGURES,
            "samples_per_s": 19.6,
            "interval": None,
            "joules": None,
            "packing": "the server's own batches",
            "versions": {"vllm": "0.26.0"},
            "restarts": 1,
            "energy_note": "NVML: Driver Not Loaded",
        },
    },
    "parity": {"verdict": "good", "reasons": [], "layers": {"2": LAYER, "36": LAYER}},
    "verdict": {"faster": "hf", "ratio": 2.104, "low": 1.91, "high": 2.32, "sentence": SENTENCE},
}


def job(**fields: Any) -> Job:
    values: dict[str, Any] = {
        "id": "20261130-094341-compare-0026",
        "name": "Qwen3-8B",
        "verb": "compare",
        "state": JobState.RUNNING,
        "created": 1796032000.0,
    }
    return Job(**{**values, **fields})


HALF_WAY = {
    "hf": Side("hf", "running", "extracting", 120, 256, samples_per_s=41.23, bytes_per_s=1.77e9, startup_s=31.0),
    "vllm": Side("vllm", "waiting", total=256),
}


def order(*words: str) -> Any:
    return compare.compare_order(make_parser().parse_args(["compare", *words]), "node")


def test_every_field_of_the_spec_can_be_given() -> None:
    options = [
        *("--layers", "2,10,36", "--dtype", "float16", "--device", "cuda", "--gpus", "0,1", "--first", "5"),
        *("--samples", "77", "--together", "--keep-files", "--pack-tokens", "9", "--max-sample-tokens", "10"),
        *("--min-free-bytes", "11", "--vllm-python", "/v/bin/python", "--tensor-parallel", "2", "--concurrency", "12"),
    ]
    made = order(*NEEDED, *options, "--", "--enforce-eager", "--gpu-memory-utilization=0.8")
    default = CompareSpec("m", "d", "o").to_json()
    given = made.spec.to_json()
    assert {name for name, value in given.items() if value == default[name]} == {"gpus"}, "the node fills in the GPUs"
    assert made.gpus == ("0", "1")
    assert given["extra_args"] == ["--enforce-eager", "--gpu-memory-utilization=0.8"]
    assert made.name == "compared"
    assert order(*NEEDED, "--name", "mine").name == "mine"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (NEEDED[:4], "compare: the following arguments are required: --output"),
        ([], "--model, --dataset, --output"),
        ([*NEEDED, "--samples", "0"], "samples must be a whole number of at least 1"),
        (["--list", "--show", "x"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["compare", *words]) == Exit.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_path_on_a_node_must_be_whole() -> None:
    with pytest.raises(CommandError, match="'compared' is no whole path"):
        order(*NEEDED[:5], "compared")


def test_lines_tell_both_sides_where_something_changed() -> None:
    written = io.StringIO()
    lines = Lines(written)
    starting = {**HALF_WAY, "hf": Side("hf", "starting", "loading the model", 0, 256, elapsed_s=12.0)}
    for sides in ({}, starting, starting, HALF_WAY):
        lines.show(job(sides=sides))
    assert written.getvalue().splitlines() == [
        "compare 20261130-094341-compare-0026: running",
        "compare 20261130-094341-compare-0026: running, hf loading the model, 0 of 256 samples, 12 s; vllm waiting",
        "compare 20261130-094341-compare-0026: running, hf extracting, 120 of 256 samples, 41.2 samples/s, 1.6 GiB/s;"
        " vllm waiting",
    ]
    assert side_words(job()) == "not begun"


def test_a_terminal_shows_a_bar_for_each_side_and_then_one_for_what_follows() -> None:
    written = io.StringIO()
    screen = console(written)
    screen.width = 100
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    progress = Progress(*columns, console=screen)
    bar = Bar(progress)
    bar.show(job())
    bar.show(job(sides=HALF_WAY))
    shown = {task.description: task for task in progress.tasks if task.visible}
    assert {name.strip(): (task.completed, task.total) for name, task in shown.items()} == {
        "hf": (120, 256),
        "vllm": (0, 256),
    }
    done = {name: Side(name, "done", "extracting", 256, 256) for name in ("hf", "vllm")}
    bar.show(job(sides=done))
    assert sum(task.visible for task in progress.tasks) == 3


def test_a_result_is_tables_that_fit_into_80_columns_and_the_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_result(RESULT)
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[-1] == SENTENCE
    assert all(cell_len(line) <= 80 for line in lines[:-1])
    cells = {line[:18].strip(): line[18:].split("  ") for line in lines}
    rows = {name: [cell.strip() for cell in found if cell.strip()] for name, found in cells.items()}
    assert rows["samples/s (95 %)"] == ["41.2 (39.8 to 42.6)", "19.6"]
    assert rows["joules"] == ["38,020", "n/a"]
    assert rows["samples/joule"] == ["0.00673", "0.00673"]
    assert rows["whole dataset"] == ["6:09:50", "6:09:50"]
    assert rows["version"] == ["transformers 5.17.0", "vllm 0.26.0"]
    assert rows["restarts"] == ["1"]
    assert "skipped" not in rows
    assert "no energy: NVML: Driver Not Loaded" in told.err
    assert "kept in /data/compared/compare.json" in told.err


def test_a_result_without_figures_and_from_a_stranger_still_shows(capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"verdict": "bad", "reasons": ["layer id 2 is off\x1b[2J by 0.4"], "layers": {}}
    show_result(
        {"sides": {"hf": {"interval": "x", "joules": True}}, "parity": bad, "verdict": {"sentence": "a\x1b[31mb"}}
    )
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "ab"
    assert "layer id 2 is off by 0.4" in told.err
    assert "\x1b" not in told.out + told.err


@pytest.mark.parametrize(
    ("state", "verdict", "code"),
    [
        (JobState.DONE, "good", Exit.OK),
        (JobState.DONE, "bad", Exit.FAILED),
        (JobState.DONE, None, Exit.FAILED),
        (JobState.FAILED, None, Exit.FAILED),
        (JobState.INTERRUPTED, None, Exit.INTERRUPTED),
    ],
)
def test_a_bad_parity_is_a_failure_for_scripts(state: JobState, verdict: str | None, code: Exit) -> None:
    result = None if verdict is None else json.loads(json.dumps({**RESULT, "parity": {"verdict": verdict}}))
    assert compare.outcome(job(state=state, result=result)) == code


@pytest.mark.parametrize("width", [80, 200])
def test_the_list_has_the_newest_first_and_every_id_and_sentence_whole(width: int) -> None:
    written = io.StringIO()
    screen = console(written)
    screen.width = width
    old = {
        "host": "gpu-1",
        "job": job().id,
        "created": 1796032000.0,
        "model": "/models/Qwen3-8B",
        "state": "done",
        "faster": "hf",
        "ratio": 2.104,
        "low": 1.91,
        "high": 2.32,
        "sentence": SENTENCE,
        "reason": "",
    }
    unknown = dict.fromkeys(("faster", "ratio", "low", "high"))
    new = {**old, **unknown, "job": "20261130-110000-compare-0027", "created": 1796036000.0, "state": "running"}
    compare.print_list(screen, [old, {**new, "sentence": "", "reason": side_words(job(sides=HALF_WAY))}])
    lines = written.getvalue().splitlines()
    assert [job_id for line in lines[1:3] for job_id in line.split() if "compare-" in job_id] == [
        new["job"],
        old["job"],
    ]
    assert all(cell_len(line) <= width for line in lines[:3])
    assert "hf 2.10" in lines[2]
    assert SENTENCE in written.getvalue()
    assert "120 of 256 samples" in written.getvalue()


def answering(answer: Callable[[Any], Any]) -> Any:
    """A node whose files are answered so."""
    return SimpleNamespace(host="gpu-1", link=SimpleNamespace(read=lambda **asked: asked), answer=answer)


def test_a_comparison_whose_launch_cannot_be_read_is_listed_without_its_model() -> None:
    assert compare._entry(answering(lambda asked: (None, b'{"half')), job(result=None))["model"] == ""

    def gone(asked: Any) -> Any:
        raise CommandError(Exit.NOT_FOUND, "there is no job")

    def away(asked: Any) -> Any:
        raise CommandError(Exit.UNREACHABLE, "the link was lost")

    assert compare._entry(answering(gone), job(result=None))["model"] == ""
    with pytest.raises(CommandError, match="the link was lost"):
        compare._entry(answering(away), job(result=None))
