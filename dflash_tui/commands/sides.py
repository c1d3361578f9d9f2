"""The sides of a comparison that runs, in words."""

from __future__ import annotations

from backends.spec import BACKENDS
from dflash_tui.commands.output import amount, clean, duration, number
from dflash_tui.fleet.facts import Job, Side


def side_words(job: Job) -> str:
    """How far each side is, in a line."""
    return "; ".join(f"{name} {side_figures(job.sides[name])}" for name in BACKENDS if name in job.sides) or "not begun"


def side_figures(side: Side) -> str:
    """A side in words: its state or phase, samples, rate."""
    phase = side.phase if side.state in ("starting", "running") and side.phase else side.state
    parts = [clean(phase)]
    if side.total and side.state != "waiting":
        parts.append(f"{side.done:,} of {side.total:,} samples")
    if side.samples_per_s:
        parts.append(number(side.samples_per_s, "samples/s", 1))
    if side.bytes_per_s:
        parts.append(f"{amount(side.bytes_per_s)}/s")
    if side.state == "starting" and side.elapsed_s is not None:
        parts.append(duration(side.elapsed_s))
    return ", ".join(parts)
