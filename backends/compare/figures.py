"""What the record of a side's work says: start-up, steady state, rates, and how sure they are. Loads no torch.

Start-up is the time from the start of the side's process until its first sample was finished (validated and listed).

The steady state begins when every worker runs and as many bursts of finished samples have come as there are workers, and it
ends with the last sample. What was finished up to its beginning is not counted in it. Its end has the last samples of each
worker with others idle beside them; that weighs about as much as what was under way at its beginning.

Samples are unlike in length and those of the start-up are left out, so the rate is taken in tokens; samples/s are samples of
the mean length of all that were compared.

The interval (95 %) is Student's t over the means of blocks of equal time (batch means, as for the output of simulations),
laid on the logarithm of the rate.
Blocks that follow each other and are alike count for fewer: n (1 - r) / (1 + r), r their correlation at lag 1. It tells how
uneven this run was; what differs from run to run (clocks, the disk's other users) it cannot know.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# (monotonic clock in seconds, samples, tokens, bytes): what got done at a moment, as a `progress` event's `steps`.
Step = tuple[float, int, int, int]

_MOST_BLOCKS = 20
_FEWEST_BLOCKS = 5
_BURSTS_EACH = 2
# Two steps are of one burst where less than this part of the mean time between steps is between them.
_TOGETHER = 0.5
# Of all bursts at most so many may pass before the steady state begins.
_SHARE_BEFORE = 0.25
# Where all blocks are alike, the interval is wide enough by their correlation.
_LEAST_FREEDOM = 2.0
# While the work goes on, the steady state's beginning is looked for among so many steps, not among all.
_HEAD = 1000
# As a share of the bursts: a worker that came later than this changed nothing.
_LATE = 3 / 4
# Student's t, 97.5 %, for 1, 2, 3, ... degrees of freedom; beyond them that of the last, which is a little wide.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """How sure a rate is. error: the standard error as a share of the rate; freedom: degrees of freedom."""

    error: float
    freedom: float


@dataclass(frozen=True, slots=True)
class Steady:
    """The steady state: from begin to end (monotonic clock, seconds), what was finished in it, and its spread where known."""

    begin: float
    end: float
    tokens: int
    bytes: int
    spread: Spread | None

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    def interval(self) -> tuple[float, float] | None:
        """Of tokens/s, 95 %; None where there was too little to tell."""
        if self.spread is None:
            return None
        # On the logarithm, as `ratio`: a rate is more than 0, and so is all that it may have been.
        factor = math.exp(student(self.spread.freedom) * self.spread.error)
        return self.tokens_per_s / factor, self.tokens_per_s * factor


def student(freedom: float) -> float:
    """Student's t for an interval of 95 %, at the next lower whole number of degrees of freedom."""
    return _T[min(max(int(freedom), 1), len(_T)) - 1]


def steady(steps: Sequence[Step], *, workers: int = 1, ready: float = -math.inf) -> Steady | None:
    """The steady state of a record; None where there is none yet.

    workers: how many work side by side. ready: when the last of them was ready, by the clock of the steps.
    """
    bursts = _bursts(steps)
    first = max(min(workers, int(len(bursts) * _SHARE_BEFORE)), 1) - 1
    # A worker that came when all was done, or nearly, was none.
    first = next((at for at in range(first, int(len(bursts) * _LATE)) if bursts[at][0] >= ready), first)
    inside = bursts[first + 1 :]
    if not inside or inside[-1][0] <= bursts[first][0]:
        return None
    begin = bursts[first][0]
    tokens, nbytes = sum(step[2] for step in inside), sum(step[3] for step in inside)
    return Steady(begin, inside[-1][0], tokens, nbytes, _spread(begin, inside)) if tokens else None


def _bursts(steps: Sequence[Step]) -> list[Step]:
    """Steps that came together as one, at the time of the last: an engine's batch ends for all its samples at once."""
    if not steps:
        return []
    near = _TOGETHER * (steps[-1][0] - steps[0][0]) / max(len(steps) - 1, 1)
    bursts = [steps[0]]
    for time, samples, tokens, nbytes in steps[1:]:
        last = bursts[-1]
        if time - last[0] < near:
            bursts[-1] = (time, last[1] + samples, last[2] + tokens, last[3] + nbytes)
        else:
            bursts.append((time, samples, tokens, nbytes))
    return bursts


def _spread(begin: float, bursts: Sequence[Step]) -> Spread | None:
    """The spread of the rate, from blocks of equal time; a burst's tokens were made evenly since the burst before."""
    blocks = min(_MOST_BLOCKS, len(bursts) // _BURSTS_EACH)
    if blocks < _FEWEST_BLOCKS:
        return None
    times = np.array([begin, *(burst[0] for burst in bursts)])
    made = np.cumsum([0.0, *(float(burst[2]) for burst in bursts)])
    rates = np.diff(np.interp(np.linspace(begin, times[-1], blocks + 1), times, made))
    rates = rates / rates.mean()
    off = rates - 1.0
    square = float(off @ off)
    if square == 0.0:
        return Spread(0.0, blocks - 1)
    alike = min(max(float(off[:-1] @ off[1:]) / square, 0.0), 0.9)
    count = blocks * (1 - alike) / (1 + alike)
    return Spread(math.sqrt(square / (blocks - 1) / count), max(count - 1, _LEAST_FREEDOM))


class Live:
    """The steps so far, and their rate at a cost that does not grow with them: it is told while the node is being measured.

    The rate is that of `steady` up to a thousand steps; from there on by sums, where a burst that is cut weighs nothing.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._times: list[float] = []
        self._sums: list[tuple[int, int]] = [(0, 0)]
        self._head: tuple[int, int, float] | None = None
        self._begin: float | None = None

    def add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.steps.append(step)
            self._times.append(step[0])
            tokens, nbytes = self._sums[-1]
            self._sums.append((tokens + step[2], nbytes + step[3]))

    def rates(self, *, workers: int = 1, ready: float = -math.inf) -> tuple[float, float] | None:
        """tokens/s and bytes/s of the steady state so far, None where there is none yet. workers, ready: as for `steady`."""
        head = (min(len(self.steps), _HEAD), workers, ready)
        if head != self._head:
            found = steady(self.steps[:_HEAD], workers=workers, ready=ready)
            self._head, self._begin = head, None if found is None else found.begin
        if self._begin is None:
            return None
        at = bisect_right(self._times, self._begin)
        came = bisect_left(self._times, ready)
        if at <= came < int(len(self._times) * _LATE):
            at = came + 1
        seconds = self._times[-1] - self._times[at - 1]
        tokens, nbytes = (end - begin for end, begin in zip(self._sums[-1], self._sums[at], strict=True))
        return (tokens / seconds, nbytes / seconds) if tokens and seconds > 0 else None


def significant(value: float | None, digits: int = 6) -> float | None:
    """Rounded to significant digits, for figures of all sizes."""
    return None if value is None else float(f"{value:.{digits}g}")


def ratio(one: Steady, other: Steady) -> tuple[float, float | None, float | None]:
    """The rate of `one` over that of `other` with its interval of 95 % (None where not known).

    On the logarithms, whose errors add in squares; the degrees of freedom are Welch's.
    """
    value = one.tokens_per_s / other.tokens_per_s
    if one.spread is None or other.spread is None:
        return value, None, None
    squares = [(spread.error**2, spread.freedom) for spread in (one.spread, other.spread)]
    total = sum(square for square, _ in squares)
    if total == 0.0:
        return value, value, value
    freedom = total**2 / sum(square**2 / free for square, free in squares)
    half = student(freedom) * math.sqrt(total)
    return value, value * math.exp(-half), value * math.exp(half)
