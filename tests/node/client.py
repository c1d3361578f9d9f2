"""A small console for tests: the agent as a subprocess, spoken to over its pipes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dflash_tui.node import protocol
from dflash_tui.node.protocol import Frame, FrameReader

REPOSITORY = Path(__file__).resolve().parents[2]
# Generous, for a slow machine must turn no test red.
LIMIT_S = 90.0
T = TypeVar("T")


def until(look: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """What `look` returns once it is true. Raises AssertionError."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {limit_s} s in vain for {what}"
        time.sleep(0.02)


class Refusal(Exception):
    def __init__(self, error: Mapping[str, str]) -> None:
        super().__init__(f"{error['code']}: {error['message']}: {error['remedy']}")
        self.code = error["code"]
        self.message = error["message"]
        self.remedy = error["remedy"]


class Client:
    """One agent. Pushes are kept in `pushes`; answers are waited for."""

    def __init__(
        self,
        bundle: Path,
        env: Mapping[str, str],
        *,
        python: str = sys.executable,
        flags: tuple[str, ...] = ("-I", "-S"),
        default_python: str = sys.executable,
    ) -> None:
        main = bundle / "dflash_tui" / "node" / "__main__.py"
        command = [python, *flags, str(main), "agent", "--bundle", str(bundle), "--hash", "h4sh", "--nonce", "n0nce"]
        self.process = subprocess.Popen(
            [*command, "--default-python", default_python],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=bundle,
        )
        assert self.process.stdin and self.process.stdout
        self._in = self.process.stdin.fileno()
        self._out = self.process.stdout.fileno()
        self._reader = FrameReader()
        self._first = b""
        self._number = 0
        self._answers: dict[int, Frame] = {}
        self.pushes: list[Frame] = []
        self.closed = False
        until(self._greeted, "the nonce line")

    def _greeted(self) -> bool:
        self._first += os.read(self._out, 65536)
        line, newline, rest = self._first.partition(b"\n")
        if not newline:
            return False
        assert line == b"dflash-tui-agent n0nce", line
        self._take(rest)
        return True

    def _take(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if "re" in frame.header:
                self._answers[frame.header["re"]] = frame
            else:
                self.pushes.append(frame)

    def receive(self, timeout_s: float = 0.05) -> bool:
        """Takes what came; False where nothing did. Sets `closed` at the end."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            return False
        data = os.read(self._out, 1 << 20)
        self.closed = self.closed or not data
        self._take(data)
        return True

    def send(self, op: str, **fields: Any) -> int:
        self._number += 1
        data = protocol.encode({"op": op, "id": self._number, **fields})
        while data:
            data = data[os.write(self._in, data) :]
        return self._number

    def answer(self, number: int) -> Frame:
        """Raises Refusal."""
        until(lambda: number in self._answers or (self.receive() and False) or self._check(), f"answer {number}")
        frame = self._answers.pop(number)
        if not frame.header["ok"]:
            raise Refusal(frame.header["error"])
        return frame

    def _check(self) -> bool:
        if self.closed:
            assert self.process.stderr
            raise AssertionError(f"the agent is gone: {self.process.stderr.read()!r}")
        return False

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.answer(self.send(op, **fields)).header

    def push(self, name: str, good: Callable[[dict[str, Any]], Any] = lambda header: True) -> dict[str, Any]:
        """The first push of this name that is `good`, kept or still to come."""

        def find() -> dict[str, Any] | None:
            for index, frame in enumerate(self.pushes):
                if frame.header["ev"] == name and good(frame.header):
                    del self.pushes[index]
                    return frame.header
            self.receive()
            return self._check() or None

        found = until(find, f"a push of {name}")
        assert found is not None
        return found

    def job(self, job: str) -> dict[str, Any]:
        records = {record["job"]: record for record in self.ask("list")["jobs"]}
        return records[job]

    def wait(self, job: str, *states: str) -> dict[str, Any]:
        """The record once the job is in one of the states."""
        record: dict[str, Any] = {}

        def look() -> bool:
            record.clear()
            record.update(self.job(job))
            return record["state"] in states

        until(look, f"{job} to be {states}; it is {json.dumps(record)}")
        return record

    def launch(self, job: str, spec: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """`spec` is that of tests/node/program.py."""
        launch = {"name": job, "verb": "extract", "python": sys.executable, "spec": dict(spec), **fields}
        return dict(self.ask("launch", job=job, launch=launch)["job"])

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.process.stdin.close()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process.stderr.close()
