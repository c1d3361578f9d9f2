"""How fast each side of a comparison is over time, from what its record tells once a second: samples done at a time."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_tui.fleet.facts import Job, Side
from dflash_tui.fleet.series import LENGTH, Series

# Samples come in packs and batches: over less than this a rate would be all zeros and peaks.
WINDOW_S = 5.0

# (seconds since the side's start, samples done by then), the newest last.
Points = tuple[tuple[float, int], ...]


def with_point(points: Points, side: Side, *, length: int = LENGTH) -> Points:
    """The points with what the side now tells; the same object where that is nothing new. The oldest fall out past `length`."""
    if side.state not in ("starting", "running") or side.elapsed_s is None:
        return points
    if points and side.elapsed_s <= points[-1][0]:
        if side.elapsed_s == points[-1][0]:
            return points
        points = ()  # it was started anew
    return (*points[max(0, len(points) + 1 - length) :], (side.elapsed_s, side.done))


def rates(points: Points, *, window_s: float = WINDOW_S) -> Series:
    """Samples/s at each point but the first, over the `window_s` before it."""
    found: list[float | None] = []
    first = 0
    for place in range(1, len(points)):
        time, done = points[place]
        while first < place - 1 and points[first + 1][0] <= time - window_s:
            first += 1
        found.append(max(0, done - points[first][1]) / (time - points[first][0]))
    return tuple(found)


def points_of(job: Job, before: Mapping[str, Points]) -> Mapping[str, Points]:
    """The points of every side of a comparison, {} of any other job; the same object where nothing is new."""
    after = {name: with_point(before.get(name, ()), side) for name, side in job.sides.items()}
    return before if after == before else after
