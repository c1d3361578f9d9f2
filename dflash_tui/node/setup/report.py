"""The events of a setup, in the format of `backends/events.py`: lines of JSON for the console, lines of text for the log."""

import json
import os
import time
from typing import Any, Optional

from dflash_tui.node.setup.spec import Refusal

_EVERY_S = 1.0


class Report:
    """Appends to events.jsonl; without a path it only prints."""

    def __init__(self, path: Optional[str]) -> None:
        self._fd = None if not path else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._began = time.monotonic()
        self._phase = ""
        self._told = 0.0
        self._last = (0.0, 0)

    @property
    def elapsed_s(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def emit(self, event: str, **fields: Any) -> None:
        """One event. Raises Refusal where the last one cannot be written; the others are not worth the job."""
        now = time.time()
        if self._fd is not None:
            line = json.dumps(dict({"t": round(now, 3), "event": event}, **fields), separators=(",", ":"))
            try:
                os.write(self._fd, line.encode() + b"\n")
            except OSError as error:
                if event in ("finished", "failed", "interrupted"):
                    raise Refusal(
                        "the last event (%s) cannot be written: %s" % (event, error.strerror), "free some space"
                    ) from None
        if event != "progress":
            shown = ["%s=%s" % (name, value) for name, value in fields.items() if isinstance(value, (str, int))]
            say(" ".join([time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)), event, *shown]))

    def phase(self, phase: str) -> None:
        self.emit("phase", phase=phase)
        self._phase = phase
        self._told = 0.0
        self.progress(0, None)

    def progress(self, done: int, total: Optional[int], size: int = 0, phase: str = "") -> None:
        """So many packages of all (None: not known yet); size: bytes on the disk by now. At most one a second is told."""
        now = time.monotonic()
        phase = phase or self._phase
        if now - self._told < _EVERY_S:
            return
        before, bytes_before = self._last
        rate = (size - bytes_before) / (now - before) if before and size > bytes_before else None
        self._told, self._last = now, (now, size)
        self.emit(
            "progress",
            done=done,
            total=total,
            skipped=0,
            tokens=0,
            bytes=size,
            elapsed_s=self.elapsed_s,
            samples_per_s=None,
            tokens_per_s=None,
            bytes_per_s=None if rate is None else round(rate),
            eta_s=None,
            phase=phase,
        )


def say(line: str) -> None:
    """A line of the log; one that cannot be written is no reason to stop."""
    try:
        os.write(1, line.encode("utf-8", "replace") + b"\n")
    except OSError:
        return
