"""Stopping an extraction by vLLM: by request, by signals to its processes, and by SIGKILL of each of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extraction_jobs import Job, alive, until
from fake_servers import Bench, a_dataset, a_model, first_token

from backends.vllm.session import members


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("inputs")
    return a_model(root / "model"), a_dataset(root / "dataset", 24)


@pytest.fixture
def bench(inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, *inputs, monkeypatch.setenv)
    bench.set({"name": "leaves a process"}, seconds=0.1)
    try:
        yield bench
    finally:
        for start in bench.starts():
            for pid in members(start["pid"]):
                os.kill(pid, signal.SIGKILL)


def job_of(bench: Bench, **fields: Any) -> Job:
    return Job(bench.root / "job", **bench.spec(**fields).to_json())


def until_all_gone(bench: Bench, job: Job) -> None:
    until(lambda: not any(members(start["pid"]) for start in bench.starts()), "the servers' end")
    until(lambda: not any(map(alive, job.worker_pids())), "the workers' end")


@pytest.mark.parametrize("who", ["the runner", "the worker", "the server"])
def test_whoever_is_killed_nothing_is_left_and_the_job_goes_on(bench: Bench, who: str) -> None:
    job = job_of(bench).start()
    try:
        job.until_files(3)
        server = bench.starts()[0]["pid"]
        worker = next(pid for pid in job.worker_pids() if pid != server)
        assert job.process is not None
        os.kill({"the runner": job.process.pid, "the worker": worker, "the server": server}[who], signal.SIGKILL)
        if who == "the runner":
            job.wait()
            until_all_gone(bench, job)
            until(lambda: not (bench.output / ".vllm").exists(), "the sweep of what the server left")
            job = job_of(bench).start()
        assert job.wait() == 0, job.stderr
        until_all_gone(bench, job)
        bench.check()
        lost = [event for event in job.events("worker") if event["state"] == "lost"]
        assert len(lost) == (0 if who == "the runner" else 1)
    finally:
        job.end()


def test_sigterm_while_the_server_starts_ends_it_at_once(bench: Bench) -> None:
    bench.set({"name": "not healthy"}, {"name": "leaves a process"})
    job = job_of(bench).start()
    try:
        until(bench.starts, "the server's start")
        assert job.process is not None
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 3
        assert "stopped on request with 0 of 24 samples done" in job.stderr
        until_all_gone(bench, job)
        assert not (bench.output / ".vllm").exists()
    finally:
        job.end()


def test_sigterm_to_all_at_once_leaves_nothing(bench: Bench) -> None:
    bench.set({"name": "leaves a process"}, {"name": "slow", "seconds": 30, "tokens": [first_token(7)]}, seconds=0.1)
    job = job_of(bench).start()
    try:
        job.until_files(3)
        assert job.process is not None
        for pid in [*job.worker_pids(), job.process.pid, *members(bench.starts()[0]["pid"])]:
            os.kill(pid, signal.SIGTERM)
        assert job.wait() in (1, 3)
        until_all_gone(bench, job)
    finally:
        job.end()
