"""How fast the sides of a comparison are over time."""

from __future__ import annotations

import pytest

from dflash_tui.fleet.facts import Job, JobsArrived, JobState, Side
from dflash_tui.fleet.series import LENGTH
from dflash_tui.fleet.sides import rates, with_point
from dflash_tui.fleet.state import Fleet, reduce


def side(elapsed_s: float | None, done: int, state: str = "running") -> Side:
    return Side("hf", state, done=done, total=1000, elapsed_s=elapsed_s)


def comparison(*sides: Side, state: JobState = JobState.RUNNING) -> JobsArrived:
    job = Job("c1", "c", "compare", state, 50.0, sides={one.side: one for one in sides})
    return JobsArrived("a", (job,))


def test_a_rate_is_taken_over_five_seconds_so_that_packs_make_no_peaks() -> None:
    points = tuple((float(second), 40 * (second // 4)) for second in range(25))
    settled = rates(points)[5:]
    assert all(rate is not None and 8 <= rate <= 16 for rate in settled)
    assert rates(points, window_s=1.0)[5:9] == (0.0, 0.0, 40.0, 0.0)


def test_one_point_is_no_rate_and_two_are_the_rate_between_them() -> None:
    assert rates(()) == () and rates(((1.0, 5),)) == ()
    assert rates(((1.0, 5), (3.0, 25))) == (10.0,)


def test_points_are_bounded_and_begin_anew_where_the_side_does() -> None:
    points: tuple[tuple[float, int], ...] = ()
    for second in range(3 * LENGTH):
        points = with_point(points, side(float(second), second))
    assert len(points) == LENGTH and points[-1] == (3 * LENGTH - 1.0, 3 * LENGTH - 1)
    assert with_point(points, side(1.0, 0)) == ((1.0, 0),)


@pytest.mark.parametrize("told", [side(None, 7), side(9.0, 7, "done"), side(9.0, 7, "waiting"), side(2.0, 7)])
def test_what_is_nothing_new_adds_no_point(told: Side) -> None:
    points = ((2.0, 5),)
    assert with_point(points, told) is points


def test_the_fleet_keeps_the_points_of_both_sides_while_the_comparison_runs() -> None:
    fleet = Fleet.of(["a"], 100.0)
    for second in range(1, 4):
        hf, vllm = side(float(second), 10 * second), Side("vllm", "waiting")
        fleet = reduce(fleet, comparison(hf, vllm))
    assert fleet.nodes[0].side_points == {"c1": {"hf": ((1.0, 10), (2.0, 20), (3.0, 30)), "vllm": ()}}
    again = reduce(fleet, comparison(side(3.0, 30), Side("vllm", "waiting")))
    assert again is fleet
    ended = reduce(fleet, comparison(side(4.0, 40, "done"), state=JobState.DONE))
    assert ended.nodes[0].side_points == fleet.nodes[0].side_points
    assert reduce(ended, JobsArrived("a", (), gone=("c1",))).nodes[0].side_points == {}
