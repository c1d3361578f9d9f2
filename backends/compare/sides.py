"""One side of a comparison: an extraction as a process of its own, and what its events tell. Loads no torch."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from backends.compare.figures import Live, Steady, significant, steady
from backends.errors import JobError, WorkerError, one_line
from backends.flattening import write_json
from backends.spec import ExtractSpec
from backends.store import unwritable

_MAIN = Path(__file__).parent.parent / "__main__.py"
_NEWS_BYTES = 1 << 20


class Side:
    """state: waiting, starting (until its first sample is done), running, done, failed, or stopped where it was asked to end.

    error: why it failed.

    tokens_each: mean length of the samples, by which a rate of tokens becomes one of samples.
    done, tokens, bytes: finished so far. began, ended: of its process, by the monotonic clock. steady: once it has ended.
    """

    def __init__(self, spec: ExtractSpec, folder: Path, total: int, tokens_each: float) -> None:
        self.name = spec.backend
        self.spec = spec
        self.total = total
        self.tokens_each = tokens_each
        self.state = "waiting"
        self.phase: str | None = None
        self.done = self.tokens = self.bytes = 0
        self.restarts = 0
        self.warnings: list[str] = []
        self.finished: dict[str, Any] = {}
        self.error: JobError | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._asked = False
        self.began = self.ended = 0.0
        self.live = Live()
        self.steady: Steady | None = None
        self._spec_file = folder / f"{self.name}.spec.json"
        self._events = folder / f"{self.name}.events.jsonl"
        self._read = 0
        self._last: dict[str, Any] = {}
        self._ready: dict[int, float] = {}

    def start(self) -> None:
        """Starts its process; what that prints goes where our own goes. Raises JobError."""
        try:
            write_json(self._spec_file, self.spec.to_json(), mode=0o600)  # the server's arguments may hold a key
        except OSError as error:
            raise unwritable(self._spec_file.parent, error) from None
        command = [sys.executable, "-u", str(_MAIN), "extract", str(self._spec_file), "--events", str(self._events)]
        gpus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(self.spec.gpus)}
        self.began = time.monotonic()
        try:
            self.process = subprocess.Popen(
                [*command, "--side-of", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(gpus if self.spec.gpus else {})},
            )
        except OSError as error:
            raise WorkerError(
                f"the {self.name} side cannot be started: {one_line(error)}", "see whether the node is short of memory"
            ) from None
        self.state = "starting"

    @property
    def running(self) -> bool:
        return self.state in ("starting", "running")

    @property
    def elapsed_s(self) -> float | None:
        if not self.began:
            return None
        return (self.ended or time.monotonic()) - self.began

    @property
    def startup_s(self) -> float | None:
        """From the start of its process until its first sample was validated and listed."""
        steps = self.live.steps
        return steps[0][0] - self.began if steps else None

    def _rates(self) -> tuple[float, float] | None:
        if not self.running:
            return None if self.steady is None else (self.steady.tokens_per_s, self.steady.bytes_per_s)
        return self.live.rates(**self._workers())

    def _workers(self) -> dict[str, Any]:
        """How many work, and when the last was ready, as the steady state wants it."""
        return {"workers": len(self._ready) or 1, "ready": max(self._ready.values(), default=-math.inf)}

    def look(self) -> None:
        """Takes in what it told, and its end."""
        if not self.running:
            return
        assert self.process is not None
        status = self.process.poll()
        while self._take_news():
            continue
        if status is not None:
            self.ended = time.monotonic()
            self.steady = steady(self.live.steps, **self._workers())
            self._end(status)

    def ask_to_end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self._asked = True
            self.process.send_signal(signal.SIGTERM)

    def fields(self) -> dict[str, Any]:
        """Those of a `side` event."""
        tokens_per_s, bytes_per_s = self._rates() or (None, None)
        return {
            "side": self.name,
            "state": self.state,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "elapsed_s": significant(self.elapsed_s),
            "startup_s": significant(self.startup_s),
            "samples_per_s": significant(None if tokens_per_s is None else tokens_per_s / self.tokens_each),
            "tokens_per_s": significant(tokens_per_s),
            "bytes_per_s": significant(bytes_per_s),
            "gpus": list(self.spec.gpus),
        }

    # --- what it told -----------------------------------------------------------------------------------------------

    def _take_news(self) -> bool:
        """Reads whole lines that were added, some at a time; whether there may be more."""
        try:
            with self._events.open("rb") as file:
                file.seek(self._read)
                data = file.read(_NEWS_BYTES)
        except OSError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
                self._take(event)
            except (ValueError, KeyError, TypeError):
                continue  # the half line of a full disk
        return bool(whole)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self._last = event
        if kind == "phase":
            self.phase = str(event["phase"])
        elif kind == "progress" and event.get("unit") is None:
            self._progress(event)
        elif kind == "worker":
            if event["state"] == "lost":
                self.restarts += 1
            elif event["state"] == "ready":
                self._ready.setdefault(int(event["worker"]), float(event["at"]))
        elif kind == "warning":
            self.warnings.append(str(event["message"]))
        elif kind == "finished":
            self.finished = event

    def _progress(self, event: dict[str, Any]) -> None:
        self.done, self.tokens, self.bytes = (int(event[name]) for name in ("done", "tokens", "bytes"))
        self.phase = event.get("phase") or self.phase
        self.live.add((float(at), int(samples), int(tokens), int(size)) for at, samples, tokens, size in event["steps"])
        if self.live.steps and self.state == "starting":
            self.state = "running"

    def _end(self, status: int) -> None:
        kind = self._last.get("event")
        self.state = "failed"
        if status == 0 and kind == "finished":
            missing = self.total - self.done - int(self.finished.get("skipped") or 0)
            if missing == 0:
                self.state = "done"
                return
            self.error = WorkerError(
                f"the {self.name} side says that it finished, and {missing} of {self.total} samples have no file",
                "see the log above",
            )
        elif kind == "failed":
            error = JobError if status == JobError.status else WorkerError
            # An extraction goes on; a comparison is done anew.
            remedy = str(self._last.get("remedy") or "").replace(": it goes on where it stopped", "")
            self.error = error(f"the {self.name} side failed: {self._last.get('message')}", remedy)
        elif self._asked and (kind == "interrupted" or status == -signal.SIGTERM):
            self.state = "stopped"
        elif kind == "interrupted":
            self.error = WorkerError(f"the {self.name} side was stopped from outside", "start the comparison anew")
        else:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            self.error = WorkerError(f"the {self.name} side {how} and did not say why", "see the log above")
