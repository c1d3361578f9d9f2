"""The last values of one quantity, as a tuple: what a sparkline draws. None stands where the value was not available."""

from __future__ import annotations

from collections.abc import Iterable

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
