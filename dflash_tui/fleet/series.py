"""The last values of one quantity, as a tuple: what a sparkline draws. None stands where the value was not available."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

LENGTH = 120  # two minutes at one value a second

Series = tuple[float | None, ...]


def append(series: Series, value: float | None, *, length: int = LENGTH) -> Series:
    """The series with one more value; the oldest falls out past `length`."""
    return (*series[max(0, len(series) + 1 - length) :], value)


def last(series: Series) -> float | None:
    """The newest value that was available, or None."""
    return next((value for value in reversed(series) if value is not None), None)


def highest(many: Iterable[float | None]) -> float | None:
    """The highest value that was available, or None."""
    return max((value for value in many if value is not None), default=None)


def shrink(series: Series, width: int) -> Series:
    """At most `width` values: the mean of each group of those that stand side by side; None where none was available."""
    if width <= 0 or len(series) <= width:
        return series[:0] if width <= 0 else series
    edges = [place * len(series) // width for place in range(width + 1)]
    groups = ([value for value in series[first:last] if value is not None] for first, last in pairwise(edges))
    return tuple(sum(group) / len(group) if group else None for group in groups)
