"""Numbers as people read them, units beside them. A value that is None is "N/A", never 0."""

from __future__ import annotations

from datetime import datetime, tzinfo

NOT_AVAILABLE = "N/A"

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T")


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def size(value: float | None) -> str:
    """Bytes with a binary unit: 1536 is "1.5 KiB"."""
    if value is None:
        return NOT_AVAILABLE
    step = 0
    while abs(value) >= 1024 and step < len(_BINARY) - 1:
        value /= 1024
        step += 1
    return f"{value:.0f} B" if step == 0 else f"{_three_digits(value)} {_BINARY[step]}"


def size_of(used: float | None, total: float | None) -> str:
    """Used and total bytes in the unit of the total: "12.0/80.0 GiB"."""
    if used is None or total is None:
        return NOT_AVAILABLE if total is None else f"{NOT_AVAILABLE} of {size(total)}"
    step, scale = 0, 1.0
    while total / scale >= 1024 and step < len(_BINARY) - 1:
        scale *= 1024
        step += 1
    return f"{_three_digits(used / scale)}/{_three_digits(total / scale)} {_BINARY[step]}"


def count(value: float | None) -> str:
    """A count or a rate, shortened from 10,000 on: "9,812", "38.7k"."""
    if value is None:
        return NOT_AVAILABLE
    if abs(value) < 100:
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    step = 0
    while abs(value) >= 1000 and step < len(_DECIMAL) - 1:
        value /= 1000
        step += 1
    return f"{_three_digits(value)}{_DECIMAL[step]}"


def megabytes_per_s(value: float | None) -> str:
    """Bytes per second in MB/s (10^6), the unit of disks."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value / 1e6:.2f}" if value < 1e6 else _three_digits(value / 1e6)


def percent(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0f}%"


def number(value: float | None, unit: str = "") -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0f}{unit}"


def watts(used: float | None, limit: float | None) -> str:
    """Power and its limit: "312/700 W"."""
    if used is None and limit is None:
        return NOT_AVAILABLE
    return f"{number(used)}/{number(limit)} W"


def duration(seconds: float | None) -> str:
    """Seconds in at most two units: "42s", "3m 10s", "5h 2m", "12d 3h"."""
    if seconds is None:
        return NOT_AVAILABLE
    whole = max(0, round(seconds))
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{names[0]} {rest}{names[1]}" if rest else f"{whole // large}{names[0]}"
    return f"{whole}s"


def clock(time: float | None, *, now: float, zone: tzinfo | None = None) -> str:
    """A time (seconds since 1970) in the user's zone; with its day where that is not today's."""
    if time is None:
        return NOT_AVAILABLE
    when, today = datetime.fromtimestamp(time, zone), datetime.fromtimestamp(now, zone)
    return when.strftime("%H:%M:%S" if when.date() == today.date() else "%Y-%m-%d %H:%M")


def one_line(text: str) -> str:
    """What a node wrote, on one line and without control characters."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def unit_of(verb: str) -> str:
    """What the progress of a job counts."""
    return "packages" if verb == "setup" else "samples"
