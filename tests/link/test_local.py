"""The console's own machine as a node: the same agent over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_tui.fleet.facts import BeatArrived, JobsArrived, LinkState, LogArrived, MetricsArrived
from dflash_tui.link import LinkError, LinkOptions, NodeLink, RequestRefused, new_job_id
from dflash_tui.node.protocol import Launch
from tests.link.conftest import LIMIT_S, Facts, Opener, wait_until


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def live(open_link: Opener, options: LinkOptions | None = None) -> tuple[NodeLink, Facts]:
    link, facts = open_link("local", options)
    link.wait_live(LIMIT_S)
    return link, facts


def test_the_local_node_greets_beats_and_measures(open_link: Opener) -> None:
    link, facts = live(open_link)
    greeted = link.wait_live(LIMIT_S)
    assert psutil.Process(greeted.agent_pid).is_running()
    assert greeted.default_python == sys.executable
    facts.wait(BeatArrived)
    assert facts.wait(JobsArrived, lambda fact: fact.whole).jobs == ()
    metrics = facts.wait(MetricsArrived).metrics
    assert metrics.host.cpu_count and metrics.host.memory_total_bytes


def test_closing_ends_the_agent_and_everything_under_it(open_link: Opener) -> None:
    link, facts = live(open_link)
    facts.wait(MetricsArrived)
    agent = psutil.Process(link.wait_live(LIMIT_S).agent_pid)
    family = [agent, *agent.children(recursive=True)]
    link.close()
    wait_until(lambda: not any(process.is_running() for process in family), "the agent and its reader are gone")


def test_a_killed_agent_is_replaced(open_link: Opener) -> None:
    link, facts = live(open_link)
    start = len(facts.all)
    first = link.wait_live(LIMIT_S).agent_pid
    psutil.Process(first).kill()
    assert "signal 9" in facts.wait_state(LinkState.RETRYING, start=start).detail
    facts.wait_state(LinkState.LIVE, start=start)
    assert link.wait_live(LIMIT_S).agent_pid != first


def test_a_file_is_read_by_position_and_from_its_end(open_link: Opener, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    link, _ = live(open_link)
    position, data = link.read(path=str(path), offset=2, length=3).result(LIMIT_S)
    assert data == b"234"
    assert (position.dev, position.ino) == (path.stat().st_dev, path.stat().st_ino)
    assert (position.offset, position.size) == (2, 10)
    position, data = link.read(path=str(path), offset=-4).result(LIMIT_S)
    assert (data, position.offset) == (b"6789", 6)


def test_what_the_agent_refuses_comes_with_its_code(open_link: Opener, tmp_path: Path) -> None:
    link, _ = live(open_link)
    with pytest.raises(RequestRefused) as caught:
        link.read(path=str(tmp_path / "nowhere")).result(LIMIT_S)
    assert caught.value.code == "not-found"
    assert "nowhere" in str(caught.value)
    with pytest.raises(RequestRefused):
        link.request("no such op").result(LIMIT_S)


def test_a_request_that_is_no_json_fails_alone(open_link: Opener) -> None:
    link, _ = live(open_link)
    with pytest.raises(LinkError) as caught:
        link.request("ping", what=object()).result(LIMIT_S)
    assert caught.value.code == "bad-request"
    assert link.request("ping").result(LIMIT_S).header["time"] > 0


def test_a_job_is_launched_once_told_of_followed_and_stays_when_the_link_goes(
    open_link: Opener, tmp_path: Path
) -> None:
    link, facts = live(open_link)
    conversations = tmp_path / "broken.jsonl"
    conversations.write_text('{"conversations": [\n')
    spec = {"model": str(tmp_path / "model"), "inputs": [str(conversations)], "output": str(tmp_path / "out")}
    launch = Launch(name="broken", verb="prepare", python=sys.executable, spec=spec)
    name = new_job_id("prepare")
    first, second = link.launch(name, launch), link.launch(name, launch)
    assert first.result(LIMIT_S).id == second.result(LIMIT_S).id == name
    ended = facts.wait(JobsArrived, lambda fact: any(job.id == name and job.state.ended for job in fact.jobs))
    (job,) = [job for job in ended.jobs if job.id == name]
    assert job.state == "failed" and job.exit_code == 2
    assert [job.id for job in link.list_jobs().result(LIMIT_S)] == [name]
    tail = link.follow(job=name, file="events", offset=0)
    facts.wait(LogArrived, lambda fact: fact.tail == tail.id and b"failed" in fact.data)
    link.close()
    again, _ = live(open_link)
    assert [job.state for job in again.list_jobs().result(LIMIT_S)] == ["failed"]
    assert len(list((tmp_path / "state" / "dflash-tui" / "jobs").iterdir())) == 1


def test_a_plan_says_what_is_wrong_before_anything_starts(open_link: Opener, tmp_path: Path) -> None:
    link, _ = live(open_link)
    spec = {"model": str(tmp_path), "dataset": str(tmp_path), "output": str(tmp_path / "out")}
    plan = link.plan("extract", spec).result(LIMIT_S)
    assert plan["ok"] is False
    assert "config.json" in str(plan["error"])


def test_ids_of_jobs_sort_by_time_and_do_not_meet() -> None:
    names = [new_job_id("extract") for _ in range(50)]
    assert len(set(names)) > 45
    assert [name[:15] for name in names] == sorted(name[:15] for name in names)
    assert names[0][8] == names[0][15] == "-" and "-extract-" in names[0]


def test_a_console_that_is_killed_takes_its_agent_with_it(tmp_path: Path) -> None:
    program = (
        "import time\nfrom dflash_tui.link import *\nlink = NodeLink(parse_target('local'), lambda fact: None)\n"
        "link.start()\nprint(link.wait_live(100).agent_pid, flush=True)\ntime.sleep(1000)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as console:
        assert console.stdout is not None
        agent = psutil.Process(int(console.stdout.readline()))
        console.kill()
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, "the agent is gone")


def test_importing_the_link_loads_no_paramiko_and_no_console() -> None:
    program = "import sys, json, dflash_tui.link\nprint(json.dumps(sorted(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=env)
    loaded = {name.partition(".")[0] for name in json.loads(ran.stdout)}
    assert not loaded & {"paramiko", "cryptography", "textual", "torch"}


def test_nothing_is_printed_and_the_caller_is_never_blocked(
    open_link: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    link, facts = open_link("local")
    began = time.monotonic()
    futures = [link.request("ping") for _ in range(1000)]
    assert time.monotonic() - began < LIMIT_S
    for future in futures:
        if future.exception(LIMIT_S) is not None:
            assert isinstance(future.exception(), LinkError)
    facts.wait_state(LinkState.LIVE)
    link.close()
    assert capfd.readouterr() == ("", "")
