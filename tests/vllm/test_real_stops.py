"""A real vLLM stopped and killed in every way that was seen: nothing of it is left, and no job is done with samples missing."""

from __future__ import annotations

import json
import signal

import pytest

from backends.fp8 import FLOAT8
from backends.store import read_manifest
from dflash_tui.node import processes
from dflash_tui.node.processes import Identity
from tests.vllm.real_node import Job, Server, Site, poll

# So that requests are in flight whenever somebody looks, and so that a killed server leaves many samples undone.
MANY = 12


def kill(*victims: Identity | None) -> None:
    """All at once: none of them sees another one's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for victim in victims:
            assert victim is not None and processes.send(victim, number)
    # A large process takes its time to be taken apart.
    poll(lambda: not any(map(processes.alive, victims)), "their end")


def all_gone(server: Server) -> None:
    poll(lambda: not server.alive(), "the old server to be gone")


def test_a_stop_while_the_server_starts_ends_it_at_once(site: Site) -> None:
    job = site.extract("starting", site.data.dense, site.data.conversations)
    poll(lambda: any(" serve " in processes.command(stat.pid) for stat in job.processes()), "a server")
    site.agent.ask("stop", job=job.id)
    record = job.wait("interrupted")
    assert (record["exit"], record["killed_processes"]) == ({"code": 3, "signal": None}, 0)
    assert job.files() == 0
    job.nothing_is_left()


@pytest.fixture(scope="module")
def stopped(site: Site) -> Job:
    """An extraction in float8 that was stopped in the middle."""
    job = site.extract("in-flight", site.data.dense, site.data.conversations, concurrency=MANY, file_dtype=FLOAT8)
    server = job.server()
    job.until_written(2 * MANY)
    site.agent.ask("stop", job=job.id)
    job.wait("interrupted")
    assert not server.alive()
    return job


def test_a_stop_with_requests_in_flight_ends_the_client_first_and_keeps_what_is_whole(stopped: Job, site: Site) -> None:
    record = stopped.record
    # The runner ended its server by itself, within its grace: a server waits for ever for a client that is still there.
    assert (record["exit"], record["killed_processes"]) == ({"code": 3, "signal": None}, 0)
    listed = read_manifest(stopped.output).entries
    assert 2 * MANY <= len(listed) < site.data.samples and stopped.files() == len(listed)
    stopped.nothing_is_left()
    assert site.verify(stopped)["verified"] == len(listed)


def test_float8_that_vllm_wrote_is_within_its_own_rounding_of_transformers(stopped: Job, site: Site) -> None:
    reference = site.extract("float8-hf", site.data.dense, site.data.conversations, backend="hf", last=4 * MANY)
    reference.wait("done")
    found = site.run("parity", "float8", reference=str(reference.output), output=str(stopped.output))
    assert found["verdict"] == "good", found["reasons"]
    assert found["samples"] >= MANY and found["output_format"]["file_dtype"] == FLOAT8


class Killed:
    """One extraction that loses its API server, then everybody at once, is gone on with, and loses its engine."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.job = site.extract("killed", site.data.dense, site.data.conversations, concurrency=MANY)
        self.first = self.job.server()
        self.job.until_written(MANY)
        kill(self.first.api)
        all_gone(self.first)
        self.second = self.job.server()
        self.job.until_written(MANY)
        self.after_api = self.job.record
        # Nobody is left who could end the server; with the runner alone gone its client would.
        ours = [processes.identity_of(self.after_api[name]) for name in ("supervisor", "runner")]
        kill(*ours, self.job.client(), self.second.api)
        self.orphaned = self.job.wait("orphaned")
        self.shown = json.loads(site.command("jobs", "--json").stdout)
        self.told = site.command("jobs").stdout
        self.ended = site.command("stop", self.job.id, "--yes")
        self.stopped = self.job.record
        self.left = self.job.files()


@pytest.fixture(scope="module")
def killed(site: Site) -> Killed:
    return Killed(site)


def test_an_api_server_that_was_killed_is_replaced_and_nothing_of_the_old_one_lives(killed: Killed) -> None:
    assert killed.after_api["state"] == "running"
    lost = [event for event in killed.job.events("worker") if event["state"] == "lost"]
    assert len(lost) == 1 and "killed by signal 9" in lost[0]["detail"]
    assert killed.first.alive() == []
    assert killed.second.api != killed.first.api


def test_strays_of_a_killed_api_server_are_found_and_shown_with_the_memory_that_they_hold(killed: Killed) -> None:
    strays = {stray["pid"]: stray for stray in killed.orphaned["strays"]}
    second = killed.second
    assert {second.engine.pid, second.worker.pid} <= set(strays)
    assert set(strays) <= {one.pid for one in (second.engine, second.worker, second.tracker)}
    assert strays[second.engine.pid]["command"].startswith("VLLM::EngineCore")
    assert strays[second.worker.pid]["memory_bytes"] > 200 << 20
    (shown,) = [job for job in killed.shown[0]["jobs"] if job["id"] == killed.job.id]
    assert {stray["pid"]: stray["memory_bytes"] for stray in shown["strays"]}[second.worker.pid] > 200 << 20
    told = " ".join(killed.told.split())
    assert f"still alive: {min(strays)}" in told and "iB of memory; `dflash-tui stop" in told


def test_a_stop_ends_the_strays_and_the_port_is_free(killed: Killed) -> None:
    assert killed.ended.returncode == 0, killed.ended.stderr
    assert killed.stopped["state"] == "killed" and killed.stopped["strays"] == []
    # The server's own folder stays, for nobody was left to remove it; the next extraction into that output does.
    killed.job.nothing_is_left(staging=True)


def test_a_job_is_gone_on_with_after_that_and_a_killed_engine_is_no_end_of_it(killed: Killed, site: Site) -> None:
    """vLLM ends with status 0 when its engine was killed: samples would be missing from a job that believed it."""
    job = site.launch("extract", "killed-on", killed.job.spec)
    server = job.server()
    assert len(list((job.output / ".vllm").iterdir())) == 1
    job.until_written(MANY)
    kill(server.worker)
    all_gone(server)
    job.server()
    record = job.wait("done")
    lost = [event for event in job.events("worker") if event["state"] == "lost"]
    assert len(lost) == 1 and "exit status 0" in lost[0]["detail"]
    assert record["result"]["done"] == record["result"]["total"] == site.data.samples
    assert job.events("started")[0]["already_done"] >= killed.left > 0
    job.nothing_is_left()
    assert site.verify(job)["verified"] == site.data.samples
