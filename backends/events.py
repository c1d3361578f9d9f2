"""What a job tells the world: one JSON object a line in `events.jsonl`, written by the runner alone. Loads no torch.

Every line has `t` (seconds since 1970) and `event`:

| event       | fields |
|-------------|--------|
| started     | `verb`, `total` (samples), `already_done`; for extract also `layer_ids`, `hidden_size`, `bytes_per_token`, `workers`; `versions`: of the Python that runs it and of its packages, and of vLLM's where one is used |
| phase       | `phase`: one short text ("loading the model") |
| progress    | `done`, `total`, `skipped`, `tokens`, `bytes`, `elapsed_s`, `samples_per_s`, `tokens_per_s`, `bytes_per_s`, `eta_s` (numbers or null), `phase`; `unit`: "bytes" where `done` and `total` count those of a download |
| worker      | `worker` (number), `state`: "starting", "ready", "lost" or "ended"; `device`, `pid`, `detail`; of a vLLM server that is started its `command`, `cwd`, `environment` (what was set beside the job's own, no secrets) and `port`, and its own `pid` |
| side        | of a comparison, once a second at most: `side` ("hf", "vllm"), `state` ("waiting", "starting", "running", "done", "failed", "stopped"), `phase`, `done`, `total`, `tokens`, `bytes`, `elapsed_s`, `startup_s`, `samples_per_s`, `tokens_per_s`, `bytes_per_s` (null where not known), `gpus` (UUIDs) |
| warning     | `message` |
| finished    | what came of it: `done`, `total`, `tokens`, `bytes`, `elapsed_s` and what the verb adds; the last line of a job that is done; extract with skipped samples adds `message` and `skipped_rows` (the first 100) |
| interrupted | `message`, `done`, `total`: stopped on request, nothing half-written |
| failed      | `message`, `remedy`: one line each |

What a person wants to read of it goes to stdout as well, which is the job's log where a supervisor started the runner.

`done` counts samples whose files are validated and listed, those of earlier runs included; `tokens`, `bytes` and the rates count
this run only.

Where the runner was started with `--side-of`, a `progress` event also has `steps`: what got done since the last one, as
[[monotonic clock of the machine in seconds, samples, tokens, bytes], ...]; and `worker` has `at`, by the same clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backends.errors import JobError, one_line

ENDINGS = ("finished", "interrupted", "failed")
NO_VERSIONS: Mapping[str, str | None] = MappingProxyType({})


class EventLog:
    """Appends events to a file. Half a line, left by a full disk or a killed writer, is ended before the next.

    steps: whether `progress` tells when each part of the work was done, and `worker` when it was so. versions: told with `started`.
    quiet: events that the log does not repeat.
    """

    def __init__(
        self, path: Path | None, *, steps: bool = False, versions: Mapping[str, str | None] = NO_VERSIONS
    ) -> None:
        self.steps = steps
        self.quiet: frozenset[str] = frozenset()
        self._versions = versions
        self._path = path
        self._torn = path is not None and _ends_torn(path)
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, event: str, **fields: Any) -> None:
        """Writes one event. Without a file it goes nowhere.

        Raises JobError where the last event of a job cannot be written (a full disk); for the others the work goes on.
        """
        if self._fd is None:
            return
        if event == "started" and self._versions:
            fields["versions"] = {**self._versions, **fields.get("versions", {})}
        if event == "worker" and self.steps:
            fields["at"] = round(time.monotonic(), 6)
        now = time.time()
        line = json.dumps({"t": round(now, 3), "event": event, **fields}, separators=(",", ":"))
        data = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
                self._torn = bool(data)
        except OSError as error:
            if event in ENDINGS:
                raise JobError(
                    f"the last event ({event}) cannot be written to {self._path}: {one_line(error)}",
                    "free some space and run it again: it goes on where it stopped",
                ) from None
        if event not in ("failed", "interrupted") and event not in self.quiet:  # the first two are said on stderr
            with contextlib.suppress(OSError, ValueError):  # a log that cannot be written must not end the work
                print(readable(now, event, fields), flush=True)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it is not there, or empty
        return False


def readable(now: float, event: str, fields: Mapping[str, Any]) -> str:
    """An event as a line of a log: the time (UTC), the event, and its fields where they say something."""
    shown = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in fields.items()
        if value is not None
    )
    return " ".join([time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)), event, *shown])
