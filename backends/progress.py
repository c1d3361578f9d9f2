"""Progress events, once a second at most. Loads no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from backends.events import EventLog

# A rate is taken over the last so many seconds: long enough for packs of unlike sizes, short enough to show a stall.
WINDOW_S = 30.0


class Progress:
    """Counts what this run does and tells it once a second; the first time at the first chance.

    done, total: samples, those of earlier runs included. tokens, bytes and the rates: of this run only.
    unit: what `done` and `total` count, "samples" or "bytes"; a download has no rate of samples and of tokens.
    The rates told are those of the last `WINDOW_S` seconds, 0 where nothing got done in them; `rates` are those since
    `begin()`, so that loading the model spoils neither. Where the events want steps, each `add` is told with its time.
    """

    def __init__(
        self,
        events: EventLog,
        *,
        total: int,
        already_done: int = 0,
        every_s: float = 1.0,
        unit: str = "samples",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.done = already_done
        self.skipped = 0
        self.tokens = 0
        self.bytes = 0
        self.phase = ""
        self.unit = unit
        self._events = events
        self._already_done = already_done
        self._every_s = every_s
        self._clock = clock
        self._began = clock()
        self._told: float | None = None
        self._steps: list[tuple[float, int, int, int]] = []
        # (time, done, tokens, bytes) at every telling; the first is the last one that is at least a window old.
        self._marks: deque[tuple[float, int, int, int]] = deque([(self._began, already_done, 0, 0)])

    def begin(self) -> None:
        """Starts the clock of the rates anew: the first pack is on its way."""
        self._began = self._clock()
        self._marks.clear()
        self._marks.append((self._began, self.done, self.tokens, self.bytes))

    def add(self, *, samples: int, tokens: int, nbytes: int) -> None:
        self.done += samples
        self.tokens += tokens
        self.bytes += nbytes
        if self._events.steps and samples:
            self._steps.append((round(self._clock(), 6), samples, tokens, nbytes))

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def rates(self) -> dict[str, float | None]:
        """samples/s, tokens/s and bytes/s since the start; null where nothing is known yet."""
        return self._rates((self._began, self._already_done, 0, 0))

    def _rates(self, since: tuple[float, int, int, int]) -> dict[str, float | None]:
        began, done, tokens, nbytes = since
        seconds = self._clock() - began
        if self.done <= self._already_done or seconds <= 0:
            return {"samples_per_s": None, "tokens_per_s": None, "bytes_per_s": None}
        return {
            "samples_per_s": round((self.done - done) / seconds, 3),
            "tokens_per_s": round((self.tokens - tokens) / seconds, 1),
            "bytes_per_s": round((self.bytes - nbytes) / seconds, 1),
        }

    def _eta_s(self, samples_per_s: float | None) -> float | None:
        left = max(self.total - self.done - self.skipped, 0)
        return round(left / samples_per_s, 1) if samples_per_s else None

    def tell(self, *, now: bool = False) -> None:
        """Writes a `progress` event if a second has passed since the last one, or if `now`."""
        moment = self._clock()
        if not now and self._told is not None and moment - self._told < self._every_s:
            return
        self._told = moment
        while len(self._marks) > 1 and moment - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()
        rates = self._rates(self._marks[0])
        eta_s = self._eta_s(rates["samples_per_s"])
        if self.unit != "samples":
            rates |= {"samples_per_s": None, "tokens_per_s": None}
        self._marks.append((moment, self.done, self.tokens, self.bytes))
        steps, self._steps = self._steps, []
        self._events.emit(
            "progress",
            done=self.done,
            total=self.total,
            skipped=self.skipped,
            tokens=self.tokens,
            bytes=self.bytes,
            elapsed_s=round(self.elapsed_s, 3),
            phase=self.phase,
            **rates,
            eta_s=eta_s,
            **({} if self.unit == "samples" else {"unit": self.unit}),
            **({"steps": steps} if self._events.steps else {}),
        )
