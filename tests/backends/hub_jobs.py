"""Runs of `backends` in processes of their own, on a machine whose hub is tests/fakes/hub.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.hub import Hub

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
# A job that ends once its names are resolved: nothing of torch is loaded.
RESOLVE = """
import os, sys
import backends.__main__ as main
def resolved(name):
    return lambda spec, events, should_stop: {"spec": spec.to_json(), "environment": dict(os.environ)}
main._verb = resolved
os._exit(main.main(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Done:
    """How a run ended. events: those of its file."""

    status: int
    events: list[dict[str, Any]]
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    @property
    def line(self) -> str:
        """What the job failed with."""
        assert self.last["event"] == "failed", self
        assert "Traceback" not in self.err
        return f"{self.last['message']}: {self.last['remedy']}"


class Machine:
    """A machine with its own cache and home. `model`, `output`: what `spec` names where nothing else is said."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.hub = hub
        self.runs = 0

    @property
    def cache(self) -> Path:
        return self.home / "hf" / "hub"

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        own = {"HOME": str(self.home), "HF_HOME": str(self.home / "hf"), "HF_ENDPOINT": self.hub.url}
        return {**kept, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(more or {})}

    def spec(self, verb: str = "extract", **values: Any) -> dict[str, Any]:
        spec: dict[str, Any] = {"model": "org/tiny", "output": str(self.folder / "out")}
        if verb == "extract":
            spec |= {"dataset": str(self.folder / "dataset"), "min_free_bytes": 0}
        return {name: value for name, value in {**spec, **values}.items() if value is not None}

    def begin(
        self,
        verb: str,
        spec: Mapping[str, Any],
        *,
        whole: bool = False,
        token: str = "",
        env: Mapping[str, str] | None = None,
        around: Sequence[str] = (),
    ) -> Run:
        """Starts a job; `whole`: with the verb's own work, else it ends once its names are resolved. around: runs it."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps(dict(spec)))
        program = [str(ROOT / "backends" / "__main__.py")] if whole else ["-c", RESOLVE]
        words = [
            *around,
            sys.executable,
            *program,
            verb,
            str(folder / "spec.json"),
            "--events",
            str(folder / "events.jsonl"),
        ]
        return Run(words, folder, self._start(words, env, token, None))

    def run(self, verb: str = "extract", spec: Mapping[str, Any] | None = None, **options: Any) -> Done:
        return self.begin(verb, self.spec(verb) if spec is None else spec, **options).wait()

    def plan(self, verb: str, spec: Mapping[str, Any], *, token: str = "", env: Mapping[str, str] | None = None) -> Any:
        words = [sys.executable, str(ROOT / "backends" / "__main__.py"), "plan", "-"]
        process = self._start(words, env, token, subprocess.PIPE)
        out, err = process.communicate(json.dumps({"verb": verb, "spec": dict(spec)}), timeout=LIMIT_S)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1])

    def _start(
        self, words: list[str], env: Mapping[str, str] | None, token: str, stdin: int | None
    ) -> subprocess.Popen[str]:
        given = self.environment(env)
        read = -1
        if token:
            read, write = os.pipe()
            os.write(write, json.dumps({"HF_TOKEN": token}).encode())
            os.close(write)
            given["DFLASH_TUI_SECRETS_FD"] = str(read)
        try:
            return subprocess.Popen(
                words,
                env=given,
                cwd=self.folder,
                stdin=stdin or subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[read] if token else [],
            )
        finally:
            if token:
                os.close(read)


@dataclass(frozen=True, slots=True)
class Run:
    """A job that goes on."""

    words: list[str]
    folder: Path
    process: subprocess.Popen[str]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> Done:
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            self.process.kill()
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return Done(self.process.returncode, [json.loads(line) for line in lines], out, err)


def until(look: Callable[[], Any], what: str) -> None:
    """Waits until something is true. Raises AssertionError."""
    deadline = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
