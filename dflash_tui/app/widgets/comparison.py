"""A comparison as the screens read it: one backend's figures, live or measured, and the verdict. What a node left out is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.spec import BACKENDS
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.comparison import mapping, number, pair
from dflash_tui.fleet.facts import Job, Side
from dflash_tui.fleet.state import NodeView
from dflash_tui.node.protocol import Launch

_SIGNS = {
    "waiting": (".", "dim"),
    "starting": ("+", "accent"),
    "running": (">", "good"),
    "done": ("*", "good"),
    "failed": ("!", "bad"),
    "stopped": ("-", "warn"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend in the result of a comparison that is done. interval: of samples/s, 95 %. Names as in `compare.json`."""

    fields: Mapping[str, Any]

    def number(self, name: str) -> float | None:
        return number(self.fields.get(name))

    def interval(self) -> tuple[float, float] | None:
        return pair(self.fields.get("interval"))

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


def measured(job: Job, side: str) -> Measured | None:
    """What the comparison found of a backend; None before its end."""
    fields = mapping(mapping(job.result).get("sides")).get(side)
    return Measured(fields) if isinstance(fields, Mapping) else None


def model_of(job: Job, launch: Launch | None) -> str:
    """The model that is compared on, as it was given; "" where that is not known yet."""
    spec = {} if launch is None else launch.spec
    return next((str(found["model"]) for found in (mapping(job.result), spec) if found.get("model")), "")


def side_state(node: NodeView, job: Job, side: Side | None) -> tuple[str, str]:
    """The state of a side with its sign ("> running"), and its style. What ended with its job does not run."""
    if side is None:
        return fmt.NOT_AVAILABLE, "dim"
    if job.state.ended and side.state in ("starting", "running", "waiting"):
        return ("- not begun", "dim") if side.state == "waiting" else ("- broken off", "warn")
    sign, style = _SIGNS.get(side.state, ("?", "dim"))
    doubt = "" if node.live or job.state.ended else " (?)"
    return f"{sign} {side.state}{doubt}", style


def share_done(side: Side | None) -> float | None:
    """How much of a side's samples are done, 0 to 1."""
    return None if side is None or not side.total else min(1.0, side.done / side.total)


def seconds_left(side: Side) -> float | None:
    """Until the last sample, at the rate since the start-up; None where no sample is done yet."""
    if side.state != "running" or side.total is None or not side.samples_per_s:
        return None
    return max(0, side.total - side.done) / side.samples_per_s


def summary(job: Job) -> tuple[str, str]:
    """A comparison in a few words and their style: how far it is, or which backend is faster and whether both wrote the same."""
    if job.result is None or not job.result.get("verdict"):
        if job.state.ended:
            return fmt.one_line(job.reason) or str(job.state), "warn"
        return ", ".join(f"{name} {_briefly(job.sides.get(name))}" for name in BACKENDS), ""
    verdict, parity = mapping(job.result.get("verdict")), mapping(job.result.get("parity"))
    faster, ratio = verdict.get("faster"), number(verdict.get("ratio"))
    speed = f"{faster} {times(ratio)}" if faster in BACKENDS else "undecided"
    same, style = parity_word(parity)
    return f"{speed}, parity {same}", style


def _briefly(side: Side | None) -> str:
    if side is None or side.state == "waiting":
        return "waits"
    done = share_done(side)
    return fmt.percent(100 * done) if side.state == "running" and done is not None else side.state


def parity_word(parity: Mapping[str, Any]) -> tuple[str, str]:
    """ "good" or "BAD", and its style."""
    verdict = parity.get("verdict")
    return {"good": ("good", "good"), "bad": ("BAD", "bad")}.get(str(verdict), (fmt.NOT_AVAILABLE, "dim"))


def times(ratio: float | None) -> str:
    """A ratio as "2.41x"."""
    return fmt.NOT_AVAILABLE if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"
