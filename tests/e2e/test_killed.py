"""Whatever is killed, a restart finishes the job with no sample lost and none done twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dflash_tui.commands.outcome import Exit
from tests.e2e.conftest import Launcher, Shared
from tests.e2e.harness import JobFolder, Site, assert_whole, children, manifest_rows, poll


def worker_of(job: JobFolder) -> int:
    """The worker of an extraction on the CPU, as its own events name it."""
    pids = [event["pid"] for event in job.events if event["event"] == "worker" and event["state"] == "starting"]
    assert pids[-1] in children(job.process("runner"))
    return int(pids[-1])


def test_a_killed_worker_is_replaced_and_the_job_is_done(
    launch: Launcher, site: Site, shared: Shared, tmp_path: Path
) -> None:
    job = launch(*shared.extract(tmp_path / "out"))
    job.wait_done(10)
    os.kill(worker_of(job), signal.SIGKILL)
    assert job.wait_ended() == "done"
    assert any(event["event"] == "worker" and event["state"] == "lost" for event in job.events)
    assert_whole(job.output, shared.samples)
    assert len(manifest_rows(job.output)) == shared.samples


def test_a_worker_that_is_not_replaced_fails_the_job_and_a_restart_goes_on(
    launch: Launcher, site: Site, shared: Shared, tmp_path: Path
) -> None:
    job = launch(*shared.extract(tmp_path / "out"), "--worker-restarts", 0)
    job.wait_done(10)
    os.kill(worker_of(job), signal.SIGKILL)
    assert job.wait_ended() == "failed"
    assert_resumed(site, shared.samples, job)


@pytest.mark.parametrize("role", ["runner", "supervisor"])
def test_a_job_whose_runner_or_supervisor_was_killed_is_resumed(
    role: str, launch: Launcher, site: Site, shared: Shared, tmp_path: Path
) -> None:
    # An orphan runs on while it is asked about: long enough that a fast machine does not get to its end.
    rows = shared.samples if role == "runner" else shared.long_samples // 4
    job = launch(*shared.extract_long(tmp_path / "out", "--last", rows))
    job.wait_done(10)
    os.kill(job.process(role), signal.SIGKILL)
    state = poll("the end as the node tells it", lambda: ended(site, job))
    assert state in {"runner": ("killed",), "supervisor": ("lost", "orphaned")}[role]
    if state == "orphaned":
        (listed,) = site.run("jobs", "--json").json
        (record,) = [one for one in listed["jobs"] if one["id"] == job.id]
        assert {stray["pid"] for stray in record["strays"]} == set(job.processes())
        refused = site.run("restart", job.id, code=Exit.BAD_INPUT)
        assert "dflash-tui stop" in refused.line
        stopped = site.run("stop", job.id, "--wait", "--json").json
        assert stopped["strays"] == []
    assert job.processes() == {}
    assert_resumed(site, rows, job)


def ended(site: Site, job: JobFolder) -> str | None:
    (listed,) = site.run("jobs", "--json").json
    (record,) = [one for one in listed["jobs"] if one["id"] == job.id]
    return None if record["state"] in ("starting", "running", "stopping") else str(record["state"])


def assert_resumed(site: Site, rows: int, job: JobFolder) -> None:
    kept = manifest_rows(job.output)
    stamps = {row: (job.output / f"hs_{row}.safetensors").stat().st_mtime_ns for row in kept}
    assert 10 <= len(kept) < rows, "the job was not caught in the middle"
    resumed = site.run("restart", job.id, "--wait", "--json").json
    assert resumed["state"] == "done"
    assert resumed["job"] != job.id
    assert_whole(job.output, rows)
    assert {row: (job.output / f"hs_{row}.safetensors").stat().st_mtime_ns for row in kept} == stamps, "done twice"
    verified = site.run("verify", job.output, "--json").json
    assert verified["result"]["verified"] == rows
