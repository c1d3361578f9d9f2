"""Comparisons as real processes: to their verdict, with a side that fails, stopped and killed; nothing is left of any."""

from __future__ import annotations

import json
import os
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


@pytest.fixture
def make(tmp_path: Path, models: dict[str, Path], dataset: Path, extraction: Path) -> Iterator[Make]:
    made: list[Comparison] = []

    def comparison(**spec: Any) -> Comparison:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        common = {"model": str(models["qwen3"]), "dataset": str(dataset), **spec}
        made.append(Comparison(folder, extraction, **common))
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


def test_a_comparison_runs_both_sides_to_a_verdict_and_keeps_its_reports(make: Make, dataset: Path) -> None:
    job = make(keep_files=True)
    assert job.run(seconds=0.1) == 0, job.log[-3000:]
    result = job.last_event()
    assert result["event"] == "finished"
    assert set(result) >= FIELDS
    assert all(set(result["sides"][side]) >= FIGURES for side in ("hf", "vllm"))
    assert all(set(event) - {"t", "event"} == SIDE for event in job.events("side"))
    assert states(job, "hf") == ["waiting", "starting", "running", "done"]
    assert states(job, "vllm") == ["waiting", "starting", "running", "done"]
    running = [event["side"] for event in job.events("side") if event["state"] == "starting"]
    assert running == sorted(running), "one after the other, hf first"
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
    report = json.loads((job.output / "compare.json").read_text())
    assert {name: report[name] for name in FIELDS - {"verb"}} == {name: result[name] for name in FIELDS - {"verb"}}
    assert result["parity"]["report"] == str(job.output / "parity.json")
    assert json.loads((job.output / "parity.json").read_text())["layers"] == result["parity"]["layers"]
    assert len(list((job.output / "vllm").glob("hs_*"))) == len(list((job.output / "hf").glob("hs_*"))) == 24
    until(lambda: not job.processes(), "every process of the comparison to end")
    _anew_and_shifted(job)


def _anew_and_shifted(job: Comparison) -> None:
    """Once more into the same folder, with a vLLM whose layers are one off."""
    before = {path.name for path in job.output.iterdir()}
    job.spec = {**job.spec, "keep_files": False}
    assert job.run({"name": "shifted"}) == 0, job.log[-3000:]
    result = job.last_event()
    assert any("done anew" in event["message"] for event in job.events("warning"))
    assert job.side("hf")["startup_s"] > 0, "nothing of the earlier one was gone on with"
    assert result["parity"]["verdict"] == "bad"
    assert "did NOT write the same" in result["verdict"]["sentence"]
    assert any("nearer to the reference's layer id" in reason for reason in result["parity"]["reasons"])
    assert {path.name for path in job.output.iterdir()} == before - {"hf", "vllm"}
    left_nothing(job)


def test_a_side_that_fails_fails_the_comparison_with_its_own_words(make: Make) -> None:
    job = make()
    assert job.run({"name": "fails to start", "words": WORDS}) == 1
    failed = job.last_event()
    assert failed["event"] == "failed"
    assert failed["message"].startswith("the vllm side failed: the vLLM server ended with exit status 1")
    assert failed["remedy"] == "see the log"
    assert WORDS in failed["message"] and WORDS in job.log
    assert (job.side("hf")["state"], job.side("vllm")["state"]) == ("done", "failed")
    assert json.loads((job.output / "compare.json").read_text())["finished"] is False
    left_nothing(job)


def test_together_the_other_side_is_ended_where_one_fails(make: Make) -> None:
    job = make(together=True)
    # vLLM never gets healthy, so that hf is what ends: by a hand that kills its process.
    job.start({"name": "not healthy"})
    try:
        job.until_side("vllm", state="starting")
        job.until_side("hf", state="starting")
        (hf,) = [pid for pid in job.processes() if "/hf.spec.json" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(hf, signal.SIGKILL)
        assert job.wait() == 1
        assert job.last_event()["message"] == "the hf side was killed by signal 9 and did not say why"
        assert any("share" in event["message"] or "same CPU" in event["message"] for event in job.events("warning"))
        left_nothing(job)
    finally:
        job.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_stopped_or_killed_leaves_no_process(make: Make, number: signal.Signals) -> None:
    job = make().start({"name": "not healthy"})
    job.until_side("vllm", state="starting")
    until(lambda: any("serve" in _command(pid) for pid in job.processes()), "the server to be there")
    job.process.send_signal(number)
    status = job.wait()
    until(lambda: not job.processes(), "every process of the comparison to end")
    if number == signal.SIGTERM:
        assert status == 3
        last = job.last_event()
        assert (last["event"], last["done"], last["total"]) == ("interrupted", 24, 48)
        assert "done anew" in last["message"]
        left_nothing(job)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
