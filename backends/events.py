"""What a job tells the world: one JSON object a line in `events.jsonl`, written by the runner alone. Loads no torch.

Every line has `t` (seconds since 1970) and `event`:

| event       | fields |
|-------------|--------|
| started     | `verb`, `total` (samples), `already_done`; for extract also `layer_ids`, `hidden_size`, `bytes_per_token`, `workers` |
| phase       | `phase`: one short text ("loading the model") |
| progress    | `done`, `total`, `skipped`, `tokens`, `bytes`, `elapsed_s`, `samples_per_s`, `tokens_per_s`, `bytes_per_s`, `eta_s` (numbers or null), `phase` |
| worker      | `worker` (number), `state`: "starting", "ready", "lost" or "ended"; `device`, `pid`, `detail` |
| warning     | `message` |
| finished    | what came of it: `done`, `total`, `tokens`, `bytes`, `elapsed_s` and what the verb adds; the last line of a job that is done |
| interrupted | `message`, `done`, `total`: stopped on request, nothing half-written |
| failed      | `message`, `remedy`: one line each |

What a person wants to read of it goes to stdout as well, which is the job's log where a supervisor started the runner.

`done` counts samples whose files are validated and listed, those of earlier runs included; the rates count this run only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to a file, each line whole or not at all (one `write` with O_APPEND)."""

    def __init__(self, path: Path | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, event: str, **fields: Any) -> None:
        """Writes one event. Without a file it goes nowhere. Raises OSError (a full disk)."""
        if self._fd is None:
            return
        now = time.time()
        line = json.dumps({"t": round(now, 3), "event": event, **fields}, separators=(",", ":"))
        os.write(self._fd, line.encode() + b"\n")
        if event not in ("failed", "interrupted"):  # these two are said on stderr
            with contextlib.suppress(OSError, ValueError):  # a log that cannot be written must not end the work
                print(readable(now, event, fields), flush=True)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def readable(now: float, event: str, fields: Mapping[str, Any]) -> str:
    """An event as a line of a log: the time (UTC), the event, and its fields where they say something."""
    shown = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in fields.items()
        if value is not None
    )
    return " ".join([time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)), event, *shown])
