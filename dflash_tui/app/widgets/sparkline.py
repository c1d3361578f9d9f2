"""Charts of one line, as text."""

from __future__ import annotations

from collections.abc import Sequence

_STEPS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float | None], width: int, *, high: float | None = None) -> str:
    """The newest `width` values, the newest on the right; a blank where a value was not available.

    high: the value of a full column; the highest value shown where it is None.
    """
    shown = values[-width:] if width > 0 else ()
    top = high if high is not None else max((value for value in shown if value is not None), default=0.0)
    cells = (" " if value is None else _column(value, top) for value in shown)
    return "".join(cells).rjust(width)


def _column(value: float, top: float) -> str:
    share = 0.0 if top <= 0 else min(1.0, max(0.0, value / top))
    return _STEPS[round(share * (len(_STEPS) - 1))]


def bar(fraction: float | None, width: int) -> str:
    """A bar of `width` columns in steps of an eighth; dots where the value is not available."""
    if fraction is None:
        return "·" * width
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)[:width]
