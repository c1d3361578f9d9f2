"""Comparisons as real processes: to their verdict, with a side that fails, stopped and killed; nothing is left of any."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comparison_jobs import VERSION, Comparison
from extraction_jobs import until

Make = Callable[..., Comparison]

WORDS = "ValueError: the heads of this model have a width that no kernel knows"
FIELDS = {
    *("verb", "model", "dataset", "output", "report", "first", "samples", "tokens", "together", "dtype", "layer_ids"),
    *("gpus", "versions", "sides", "parity", "verdict"),
}
FIGURES = {
    *("samples", "tokens", "bytes", "startup_s", "steady_s", "samples_per_s", "tokens_per_s", "mb_per_s"),
    *("samples_per_s_per_gpu", "interval", "joules", "samples_per_joule", "energy_source", "whole_dataset_s"),
    *("whole_dataset_samples", "packing", "versions", "gpus", "restarts", "skipped"),
}
SIDE = {
    *("side", "state", "phase", "done", "total", "tokens", "bytes", "elapsed_s", "startup_s", "samples_per_s"),
    *("tokens_per_s", "bytes_per_s", "gpus"),
}


def comparison_in(folder: Path, models: dict[str, Path], dataset: Path, extraction: Path, **spec: Any) -> Comparison:
    return Comparison(folder, extraction, model=str(models["qwen3"]), dataset=str(dataset), **spec)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], dataset: Path, extraction: Path
) -> Iterator[Comparison]:
    """One that ran to its verdict and kept its files. Copy its output before changing anything."""
    job = comparison_in(tmp_path_factory.mktemp("finished"), models, dataset, extraction, keep_files=True)
    try:
        assert job.run(seconds=0.1) == 0, job.log[-3000:]
        yield job
    finally:
        job.end()


@pytest.fixture
def make(tmp_path: Path, models: dict[str, Path], dataset: Path, extraction: Path) -> Iterator[Make]:
    made: list[Comparison] = []

    def comparison(**spec: Any) -> Comparison:
        made.append(comparison_in(tmp_path, models, dataset, extraction, **spec))
        return made[-1]

    try:
        yield comparison
    finally:
        for one in made:
            if hasattr(one, "process"):
                one.end()


def states(job: Comparison, side: str) -> list[str]:
    """What each side was told to be, in order, without repetitions."""
    told = [event["state"] for event in job.events("side") if event["side"] == side]
    return [state for at, state in enumerate(told) if at == 0 or told[at - 1] != state]


def left_nothing(job: Comparison) -> None:
    until(lambda: not job.processes(), "every process of the comparison to end")
    assert not (job.output / "hf").exists() and not (job.output / "vllm").exists()


def test_a_comparison_runs_one_side_after_the_other_and_tells_how_far_each_is(finished: Comparison) -> None:
    assert all(set(event) - {"t", "event"} == SIDE for event in finished.events("side"))
    for side in ("hf", "vllm"):
        # With so few samples a side may be through with all of them between two looks.
        assert [state for state in states(finished, side) if state != "running"] == ["waiting", "starting", "done"]
    running = [event["side"] for event in finished.events("side") if event["state"] == "starting"]
    assert running == sorted(running), "one after the other, hf first"
    until(lambda: not finished.processes(), "every process of the comparison to end")


def test_a_comparison_ends_with_the_figures_of_both_sides_and_a_verdict(finished: Comparison) -> None:
    result = finished.last_event()
    assert result["event"] == "finished"
    assert set(result) >= FIELDS
    assert all(set(result["sides"][side]) >= FIGURES for side in ("hf", "vllm"))
    for figures in result["sides"].values():
        assert (figures["samples"], figures["tokens"], figures["skipped"]) == (24, result["tokens"], 0)
        assert figures["startup_s"] > 0
        assert figures["joules"] is figures["energy_source"] is figures["samples_per_s_per_gpu"] is None
    vllm = result["sides"]["vllm"]
    # Four at a time, a tenth of a second each; of samples of unlike lengths.
    assert 0 < vllm["samples_per_s"] < 100
    assert vllm["tokens_per_s"] == pytest.approx(vllm["samples_per_s"] * result["tokens"] / 24, rel=1e-4)
    assert vllm["whole_dataset_s"] == pytest.approx(vllm["startup_s"] + 24 / vllm["samples_per_s"], rel=1e-4)
    assert vllm["versions"]["vllm"] == VERSION
    assert result["parity"]["verdict"] == "good"
    assert "both wrote the same" in result["verdict"]["sentence"]


def test_a_comparison_keeps_its_reports_and_the_files_that_are_to_be_kept(finished: Comparison) -> None:
    result = finished.last_event()
    report = json.loads((finished.output / "compare.json").read_text())
    assert {name: report[name] for name in FIELDS - {"verb"}} == {name: result[name] for name in FIELDS - {"verb"}}
    assert result["parity"]["report"] == str(finished.output / "parity.json")
    assert json.loads((finished.output / "parity.json").read_text())["layers"] == result["parity"]["layers"]
    for side in ("hf", "vllm"):
        assert len(list((finished.output / side).glob("hs_*"))) == 24
        assert (finished.output / f"{side}.spec.json").stat().st_mode & 0o077 == 0, "its arguments may hold a key"


def test_a_comparison_into_an_earlier_ones_folder_is_done_anew_and_sees_a_vllm_whose_layers_are_one_off(
    finished: Comparison, make: Make
) -> None:
    job = make()
    shutil.copytree(finished.output, job.output)
    before = {path.name for path in job.output.iterdir()}
    assert job.run({"name": "shifted"}) == 0, job.log[-3000:]
    result = job.last_event()
    assert any("done anew" in event["message"] for event in job.events("warning"))
    assert job.side("hf")["startup_s"] > 0, "nothing of the earlier one was gone on with"
    assert result["parity"]["verdict"] == "bad"
    assert "did NOT write the same" in result["verdict"]["sentence"]
    assert any("nearer to the reference's layer id" in reason for reason in result["parity"]["reasons"])
    assert {path.name for path in job.output.iterdir()} == before - {"hf", "vllm"}
    left_nothing(job)


def test_a_side_that_fails_fails_the_comparison_with_its_own_words_and_ends_the_other(make: Make) -> None:
    job = make(together=True)
    assert job.run({"name": "fails to start", "words": WORDS}) == 1
    failed = job.last_event()
    assert failed["event"] == "failed"
    assert failed["message"].startswith("the vllm side failed: the vLLM server ended with exit status 1")
    assert failed["remedy"] == "see the log"
    assert WORDS in failed["message"] and WORDS in job.log
    # Where this machine is slow, hf is done before.
    assert job.side("hf")["state"] in ("stopped", "done")
    assert job.side("vllm")["state"] == "failed"
    assert any("share" in event["message"] or "same CPU" in event["message"] for event in job.events("warning"))
    assert json.loads((job.output / "compare.json").read_text())["finished"] is False
    left_nothing(job)


def test_a_side_that_is_killed_fails_the_comparison_and_ends_the_other(make: Make) -> None:
    job = make(together=True)
    # vLLM never gets healthy, so that hf is what ends: by a hand that kills its process.
    job.start({"name": "not healthy"})
    job.until_side("vllm", state="starting")
    job.until_side("hf", state="starting")
    (hf,) = [pid for pid in job.processes() if "/hf.spec.json" in _command(pid)]
    os.kill(hf, signal.SIGKILL)
    assert job.wait() == 1
    assert job.last_event()["message"] == "the hf side was killed by signal 9 and did not say why"
    assert job.side("vllm")["state"] == "stopped"
    left_nothing(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_stopped_or_killed_leaves_no_process(make: Make, number: signal.Signals) -> None:
    # At a time: the processes of both are there, and nobody waits for hf.
    job = make(together=True).start({"name": "not healthy"})
    until(lambda: any("serve" in _command(pid) for pid in job.processes()), "the server to be there")
    job.until_side("hf")
    job.process.send_signal(number)
    status = job.wait()
    until(lambda: not job.processes(), "every process of the comparison to end")
    if number == signal.SIGTERM:
        assert status == 3
        last = job.last_event()
        assert (last["event"], last["total"]) == ("interrupted", 48)
        assert "done anew" in last["message"]
        assert job.side("vllm")["state"] == "stopped"
        left_nothing(job)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
