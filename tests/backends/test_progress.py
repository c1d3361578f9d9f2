"""What a job tells of its pace."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.events import EventLog
from backends.progress import WINDOW_S, Progress


class Told:
    """A Progress with a clock of the test's own, and what it last told."""

    def __init__(self, path: Path, **how: Any) -> None:
        self.now = 100.0
        self.path = path
        self.progress = Progress(EventLog(path), clock=lambda: self.now, **how)

    def after(self, seconds: float, samples: int) -> dict[str, Any]:
        self.now += seconds
        self.progress.add(samples=samples, tokens=10 * samples, nbytes=100 * samples)
        self.progress.tell()
        told: dict[str, Any] = json.loads(self.path.read_text().splitlines()[-1])
        return told


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "events.jsonl", total=1000)


def test_nothing_is_known_before_the_first_sample(told: Told) -> None:
    first = told.after(2, samples=0)
    assert first["samples_per_s"] is first["eta_s"] is None


def test_a_rate_is_that_of_the_last_window(told: Told) -> None:
    for _ in range(int(WINDOW_S)):
        slow = told.after(1, samples=1)
    for _ in range(int(WINDOW_S)):
        fast = told.after(1, samples=9)
    assert slow["samples_per_s"] == pytest.approx(1)
    assert fast["samples_per_s"] == pytest.approx(9)
    assert fast["tokens_per_s"] == pytest.approx(90)
    assert fast["bytes_per_s"] == pytest.approx(900)
    assert fast["eta_s"] == pytest.approx((1000 - 10 * WINDOW_S) / 9, abs=0.1)
    assert told.progress.rates()["samples_per_s"] == pytest.approx(5)


def test_a_stall_shows_as_no_rate_and_no_end(told: Told) -> None:
    told.after(1, samples=10)
    for _ in range(int(WINDOW_S) + 1):
        stalled = told.after(1, samples=0)
    assert stalled["samples_per_s"] == 0
    assert stalled["eta_s"] is None
    assert stalled["done"] == 10


def test_loading_the_model_spoils_no_rate(told: Told) -> None:
    told.after(500, samples=0)
    told.progress.begin()
    assert told.after(1, samples=7)["samples_per_s"] == pytest.approx(7)


def test_samples_of_an_earlier_run_count_as_done_and_not_as_pace(tmp_path: Path) -> None:
    resumed = Told(tmp_path / "events.jsonl", total=100, already_done=60)
    later = resumed.after(2, samples=10)
    assert later["done"] == 70
    assert later["samples_per_s"] == pytest.approx(5)
    assert later["eta_s"] == pytest.approx(6)


def test_steps_tell_what_got_done_when_and_only_where_they_are_wanted(tmp_path: Path) -> None:
    clock = [100.0]
    events = EventLog(tmp_path / "events.jsonl", steps=True)
    progress = Progress(events, total=10, clock=lambda: clock[-1])
    for moment, samples in ((101.0, 2), (101.25, 1), (102.5, 0), (103.0, 4)):
        clock.append(moment)
        progress.add(samples=samples, tokens=samples * 10, nbytes=samples * 100)
        progress.tell()
    progress.tell(now=True)
    events.close()
    told = [json.loads(line)["steps"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told == [[[101.0, 2, 20, 200]], [[101.25, 1, 10, 100]], [[103.0, 4, 40, 400]]]
    plain = Told(tmp_path / "plain.jsonl", total=10)
    assert "steps" not in plain.after(1, samples=1)
