"""Progress events, once a second at most. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from backends.events import EventLog


class Progress:
    """Counts what this run does and tells it once a second; the first time at the first chance.

    done, total: samples, those of earlier runs included. tokens, bytes and the rates: of this run only.
    The clock of the rates starts with `begin()`, so that loading the model does not spoil them.
    """

    def __init__(
        self,
        events: EventLog,
        *,
        total: int,
        already_done: int = 0,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.done = already_done
        self.skipped = 0
        self.tokens = 0
        self.bytes = 0
        self.phase = ""
        self._events = events
        self._already_done = already_done
        self._every_s = every_s
        self._clock = clock
        self._began = clock()
        self._told: float | None = None

    def begin(self) -> None:
        """Starts the clock of the rates anew: the first pack is on its way."""
        self._began = self._clock()

    def add(self, *, samples: int, tokens: int, nbytes: int) -> None:
        self.done += samples
        self.tokens += tokens
        self.bytes += nbytes

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def rates(self) -> dict[str, float | None]:
        """samples/s, tokens/s, bytes/s and the seconds to go; null where nothing is known yet."""
        elapsed = self.elapsed_s
        fresh = self.done - self._already_done
        if fresh <= 0 or elapsed <= 0:
            return {"samples_per_s": None, "tokens_per_s": None, "bytes_per_s": None, "eta_s": None}
        left = max(self.total - self.done - self.skipped, 0)
        return {
            "samples_per_s": round(fresh / elapsed, 3),
            "tokens_per_s": round(self.tokens / elapsed, 1),
            "bytes_per_s": round(self.bytes / elapsed, 1),
            "eta_s": round(left * elapsed / fresh, 1),
        }

    def tell(self, *, now: bool = False) -> None:
        """Writes a `progress` event if a second has passed since the last one, or if `now`."""
        moment = self._clock()
        if not now and self._told is not None and moment - self._told < self._every_s:
            return
        self._told = moment
        self._events.emit(
            "progress",
            done=self.done,
            total=self.total,
            skipped=self.skipped,
            tokens=self.tokens,
            bytes=self.bytes,
            elapsed_s=round(self.elapsed_s, 3),
            phase=self.phase,
            **self.rates(),
        )
