"""What a side tells while it runs: at a cost that does not grow with what is done, by the clock that nobody sets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.compare import figures, run
from backends.compare.energy import Meter
from backends.compare.figures import Live, Step, steady
from backends.compare.processes import Ended
from backends.compare.sides import Side
from backends.events import EventLog
from backends.progress import Progress
from backends.spec import BACKENDS, CompareSpec, ExtractSpec


def work(count: int, *, every: float = 0.01, tokens: int = 50, start: float = 10.0) -> list[Step]:
    return [(start + place * every, 1, tokens, tokens * 100) for place in range(count)]


def spec_of(folder: Path) -> CompareSpec:
    return CompareSpec(model="/m", dataset="/d", output=str(folder))


def comparison(folder: Path, events: Any) -> run._Comparison:
    spec = spec_of(folder)
    specs = {name: spec.side(name) for name in BACKENDS}
    sides = {name: SimpleNamespace(warnings=()) for name in BACKENDS}
    plan: Any = SimpleNamespace(spec=spec, specs=specs, sides=sides, samples=8, tokens=80)
    of: Any = SimpleNamespace(output=folder, path=lambda name: folder / name)
    return run._Comparison(plan, of, Meter(()), events, lambda: False)


def side_with(folder: Path, *events: dict[str, Any]) -> Side:
    """One that has told these events, and runs."""
    spec = ExtractSpec(model="/m", dataset="/d", output=str(folder / "hf"))
    side = Side(spec, folder, total=100, tokens_each=50.0)
    (folder / "hf.events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    side.process = SimpleNamespace(poll=lambda: None, pid=0)
    side.state = "starting"
    side.look()
    return side


@pytest.mark.parametrize(("workers", "ready"), [(1, 0.0), (3, 0.0), (4, 12.0)])
@pytest.mark.parametrize("count", [2, 40, 999, 5000])
def test_the_rate_of_a_side_that_runs_is_that_of_its_steady_state(count: int, workers: int, ready: float) -> None:
    slow = [(float(place), 1, 10, 1000) for place in range(10)]
    steps = [*slow, *work(count)]
    live = Live()
    for at in range(0, len(steps), 7):
        live.add(steps[at : at + 7])
    found = steady(steps, workers=workers, ready=ready)
    assert found is not None
    assert live.rates(workers=workers, ready=ready) == pytest.approx((found.tokens_per_s, found.bytes_per_s), rel=0.01)


def test_a_worker_that_comes_after_a_thousand_samples_begins_the_steady_state_anew() -> None:
    live = Live()
    live.add([*work(2000), *work(4000, every=0.005, start=30.0)])
    assert live.rates(workers=2, ready=30.0) == pytest.approx((10_000, 1_000_000), rel=0.01)


def test_a_hundred_thousand_samples_are_not_gone_through_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    bursts = figures._bursts

    def counted(steps: Any) -> Any:
        nonlocal seen
        seen += len(steps)
        return bursts(steps)

    monkeypatch.setattr(figures, "_bursts", counted)
    live = Live()
    for second in range(100):
        live.add(work(1000, start=10.0 * second))
        assert live.rates() is not None
    assert seen <= 2000


def test_figures_are_computed_once_a_second_and_at_every_new_state(
    events: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(run.time, "monotonic", lambda: now)
    found = comparison(tmp_path, events)
    computed: list[str] = []
    fields = Side.fields
    monkeypatch.setattr(Side, "fields", lambda side: (computed.append(side.name), fields(side))[1])
    for tenth in range(30):
        now = 100.0 + tenth / 10
        found._tell()
    assert computed == ["hf", "vllm"] * 3
    found.sides["hf"].state = "starting"
    found._tell()
    assert computed[6:] == ["hf"]
    assert [event["state"] for event in events.of("side") if event["side"] == "hf"] == ["waiting", "starting"]


def test_what_a_side_that_has_ended_did_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"done": 100, "tokens": 5000, "bytes": 1}
    side = side_with(tmp_path, {"event": "progress", **counts, "steps": work(100)})
    assert side.state == "running"
    side.process = SimpleNamespace(poll=lambda: 0, pid=0)
    with (tmp_path / "hf.events.jsonl").open("a") as file:
        file.write('{"event": "finished"}\n')
    side.look()
    assert side.state == "done"
    monkeypatch.setattr("backends.compare.sides.steady", None)
    monkeypatch.setattr("backends.compare.figures.steady", None)
    first, again = side.fields(), side.fields()
    assert first == again
    assert first["tokens_per_s"] == pytest.approx(5000)


def test_when_a_worker_was_ready_is_told_by_the_clock_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "told.jsonl", steps=True)
    before = time.monotonic()
    with monkeypatch.context() as changed:
        changed.setattr("backends.events.time.time", lambda: 7.0)  # a clock that was just set
        log.emit("worker", worker=0, state="ready")
    progress = Progress(log, total=100)
    progress.add(samples=1, tokens=50, nbytes=1)
    progress.tell(now=True)
    log.close()
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert before <= told[0]["at"] <= told[1]["steps"][0][0]
    side = side_with(tmp_path, *told)
    assert side._ready == {0: told[0]["at"]}
    plain = EventLog(tmp_path / "plain.jsonl")
    plain.emit("worker", worker=0, state="ready")
    plain.close()
    assert "at" not in json.loads((tmp_path / "plain.jsonl").read_text())


def test_a_very_slow_side_has_a_rate_that_is_not_zero(tmp_path: Path) -> None:
    steps = [(place * 2500.0, 1, 50, 5000) for place in range(10)]
    side = side_with(tmp_path, {"event": "progress", "done": 10, "tokens": 500, "bytes": 5, "steps": steps})
    assert side.fields()["samples_per_s"] == pytest.approx(0.0004)


@pytest.mark.parametrize("state", ["done", "starting"])
def test_processes_that_do_not_end_at_all_are_told_also_where_they_were_asked_to(
    events: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    found = comparison(tmp_path, events)
    monkeypatch.setattr(run, "end_all_below", lambda known: Ended(2, (41, 42)))
    monkeypatch.setattr(run, "_END_S", 0.0)
    found.sides["hf"].state = state
    monkeypatch.setattr(Side, "look", lambda side: None)
    found._end([found.sides["hf"]])
    (warning,) = [event["message"] for event in events.of("warning") if "live on" in event["message"]]
    assert "2 processes of the hf side live on after SIGKILL" in warning
    assert "pid 41, 42" in warning


def test_a_comparison_that_is_stopped_tells_what_was_done_of_both(events: Any, tmp_path: Path) -> None:
    found = comparison(tmp_path, events)
    found.sides["hf"].done, found.sides["vllm"].done = 8, 3
    stopped = found._interrupted()
    assert (stopped.done, stopped.total) == (11, 16)
    assert "with 11 of 16 samples done" in str(stopped)
