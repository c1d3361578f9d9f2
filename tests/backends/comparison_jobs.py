"""A comparison as a real process, for the tests: its spec, its events, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from extraction_jobs import MAIN, PATIENCE_S, alive, until
from fake_servers import PACKAGE

from backends.compare.processes import descendants

VERSION = "0.32.0+cpu"


class Comparison:
    """One `compare` process with the hf backend and the program in vLLM's place, which answers with recorded states."""

    def __init__(self, folder: Path, states: Path, **spec: Any) -> None:
        common = {"dtype": "float32", "min_free_bytes": 0, "pack_tokens": 256, "concurrency": 4, "samples": 24}
        self.spec = {**common, "vllm_python": sys.executable, "output": str(folder / "out"), **spec}
        self.output = Path(self.spec["output"])
        self._folder = folder
        self._states = states
        self._runs = 0
        self._seen: set[int] = set()
        info = folder / "site" / f"vllm-{VERSION}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")

    def environment(self, faults: tuple[dict[str, Any], ...], settings: dict[str, Any]) -> dict[str, str]:
        """What makes the vLLM of this process's own Python the one in its place."""
        memory = self._folder / f"memory-{self._runs}"
        memory.mkdir()
        told = {"folder": str(memory), "recorded": str(self._states), "faults": list(faults), **settings}
        path = os.pathsep.join([str(self._folder / "site"), str(PACKAGE)])
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FAKE_VLLM": json.dumps(told)}

    def start(self, *faults: dict[str, Any], **settings: Any) -> Comparison:
        self._runs += 1
        self.events_path = self._folder / f"events-{self._runs}.jsonl"
        spec = self._folder / f"spec-{self._runs}.json"
        spec.write_text(json.dumps(self.spec))
        self.log_path = self._folder / f"log-{self._runs}"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(MAIN), "compare", str(spec), "--events", str(self.events_path)],
                env=self.environment(faults, settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def wait(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self._seen |= descendants(self.process.pid)
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.05)
        return self.process.returncode

    def run(self, *faults: dict[str, Any], **settings: Any) -> int:
        return self.start(*faults, **settings).wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_bytes().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == name]

    def last_event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.events_path.read_bytes().splitlines()[-1])
        return found

    def side(self, name: str) -> dict[str, Any]:
        """The last that was told of a side, {} before the first."""
        told = [event for event in self.events("side") if event["side"] == name]
        return told[-1] if told else {}

    def until_side(self, name: str, **fields: Any) -> None:
        """Waits until a side is told to be so."""

        def so() -> bool:
            self._seen |= descendants(self.process.pid)
            assert self.process.poll() is None, self.log[-3000:]
            told = self.side(name)
            return all(told.get(field) == value for field, value in fields.items())

        until(so, f"{name} to be {fields}")

    def processes(self) -> set[int]:
        """Those that were seen below it and live still."""
        self._seen |= descendants(self.process.pid) if self.process.poll() is None else set()
        return {pid for pid in self._seen if alive(pid)}

    def end(self) -> None:
        """For a test's `finally`."""
        if self.process.poll() is None:
            self._seen |= descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
