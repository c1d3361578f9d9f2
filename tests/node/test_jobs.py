"""Launching, ending and listing jobs, with real agents, supervisors and processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tui.node import jobs, processes
from tests.node.client import Client, Refusal, until

Connect = Callable[..., Client]
DONE = [["print", "hello"], ["event", "progress", {"done": 1, "total": 2}], ["event", "finished", {"done": 2}]]


def test_a_job_that_finishes_is_done_and_shows_its_last_events(agent: Client, state: Path) -> None:
    launched = agent.launch("j-1", {"do": DONE})
    assert launched["state"] in ("running", "done")
    record = agent.wait("j-1", "done")
    assert record["exit"] == {"code": 0, "signal": None}
    assert record["reason"] == ""
    assert record["progress"]["done"] == 1
    assert record["result"]["done"] == 2
    assert record["last_event"]["event"] == "finished"
    assert record["created"] <= record["started"] <= record["ended"]
    log = state / "jobs" / "j-1" / "log"
    assert log.read_bytes() == b"hello\n"
    assert record["log_size"] == 6
    assert (record["log"]["dev"], record["log"]["ino"]) == (log.stat().st_dev, log.stat().st_ino)


def test_the_sides_of_a_comparison_stand_in_its_record_as_each_was_last_told(agent: Client, connect: Connect) -> None:
    told = [("hf", "starting", 0), ("vllm", "waiting", 0), ("hf", "running", 5), ("vllm", "starting", 0)]
    sides = [["event", "side", {"side": side, "state": state, "done": done}] for side, state, done in told]
    names = [
        ["event", "side", {"side": name, "state": "running"}]
        for name in ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
    ]
    agent.launch("j-1", {"do": [*sides, ["event", "side", {"side": 3, "state": "done"}], ["event", "side", {}], *DONE]})
    agent.launch("j-2", {"do": DONE})
    agent.launch("j-3", {"do": [*names, *names, *DONE]})
    agent.wait("j-3", "done")
    for console in (agent, connect()):
        found = console.wait("j-1", "done")["sides"]
        assert {side: (last["state"], last["done"]) for side, last in found.items()} == {
            "hf": ("running", 5),
            "vllm": ("starting", 0),
        }
        assert console.wait("j-2", "done")["sides"] == {}
        assert len(console.job("j-3")["sides"]) == 8, "a file cannot make a record grow without end"


def test_the_folder_of_a_job_is_for_its_user_alone(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": DONE})
    agent.wait("j-1", "done")
    folder = state / "jobs" / "j-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.name != "events.jsonl"}
    assert set(modes) == {"spec.json", "launch.json", "command.json", "state.json", "log", "lock"}
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    ("steps", "became", "words"),
    [
        (
            [["event", "failed", {"message": "no config.json", "remedy": "give the model's folder"}], ["exit", 2]],
            "failed",
            "no config.json: give the model's folder",
        ),
        ([["exit", 7]], "failed", "status 7"),
        ([["event", "progress", {"done": 1}]], "failed", "last event is 'progress', not 'finished'"),
        ([], "failed", "wrote no event"),
        ([["event", "finished", {}], ["exit", 1]], "failed", "status 1"),
        ([["die", 9]], "killed", "SIGKILL from outside"),
        ([["die", 11]], "killed", "SIGSEGV"),
        ([["event", "interrupted", {"message": "asked to stop"}], ["exit", 3]], "interrupted", "asked to stop"),
    ],
)
def test_what_became_of_a_job_is_said_in_one_line(agent: Client, steps: list[object], became: str, words: str) -> None:
    agent.launch("j-1", {"do": steps})
    record = agent.wait("j-1", "done", "failed", "killed", "interrupted")
    assert record["state"] == became
    assert words in record["reason"]
    assert "\n" not in record["reason"]


def test_the_same_launch_twice_starts_one_job_even_from_two_consoles(
    connect: Callable[..., Client], state: Path
) -> None:
    one, two = connect(), connect()
    spec = {"do": [["print", "started"], *DONE]}
    launch = {"name": "j", "verb": "extract", "python": sys.executable, "spec": spec}
    asked = [(client, client.send("launch", job="j-1", launch=launch)) for client in (one, two, one, two)]
    records = [client.answer(number).header["job"] for client, number in asked]
    assert {record["created"] for record in records} == {records[0]["created"]}
    one.wait("j-1", "done")
    later = two.ask("launch", job="j-1", launch=launch)["job"]
    assert later["state"] == "done"
    # Whoever started it again would have written to the same log and the same events.
    assert (state / "jobs" / "j-1" / "log").read_text() == "started\nhello\n"
    assert (state / "jobs" / "j-1" / "events.jsonl").read_text().count("finished") == 1
    assert len(one.ask("list")["jobs"]) == 1


def test_a_job_outlives_its_console_and_another_console_finds_it(
    connect: Callable[..., Client], tmp_path: Path
) -> None:
    first = connect()
    go = tmp_path / "go"
    first.launch("j-1", {"do": [["wait_for", str(go)], *DONE]})
    first.process.kill()
    first.process.wait()
    second = connect()
    assert second.job("j-1")["state"] == "running"
    go.touch()
    assert second.wait("j-1", "done")["result"]["done"] == 2


def test_a_worker_gets_its_environment_its_arguments_and_an_empty_standard_input(
    agent: Client, state: Path, tmp_path: Path
) -> None:
    shown = tmp_path / "env.json"
    agent.launch("j-1", {"do": [["environment", str(shown)], *DONE]}, env={"HF_HOME": "/models"})
    agent.wait("j-1", "done")
    environment = json.loads(shown.read_text())
    wanted = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "DFLASH_TUI_JOB": "j-1",
        "PYTHONUNBUFFERED": "1",
        "TERM": "dumb",
        "COLUMNS": "4000",
        "HF_HOME": "/models",
    }
    assert {name: environment.get(name) for name in wanted} == wanted


def test_a_program_that_cannot_be_started_makes_a_failed_job_with_the_reason(
    agent: Client, bundle: Path, state: Path
) -> None:
    # The folder in which it would run goes away between the launch and the start.
    go = state / "jobs" / "j-1"
    agent.launch("j-0", {"do": DONE})
    agent.wait("j-0", "done")
    launch = json.loads((state / "jobs" / "j-0" / "launch.json").read_text())
    record = json.loads((state / "jobs" / "j-0" / "state.json").read_text())
    go.mkdir(0o700)
    (go / "launch.json").write_text(json.dumps({**launch, "cwd": "/nowhere"}))
    (go / "state.json").write_text(json.dumps({**record, "job": "j-1", "state": "starting"}))
    (go / "spec.json").write_text("{}")
    main = bundle / "dflash_tui" / "node" / "__main__.py"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-I", "-S", str(main), "supervise", str(go)]) == 0
    record = agent.wait("j-1", "failed")
    assert "cannot start" in record["reason"]
    assert "/nowhere" in record["reason"]


@pytest.mark.parametrize("job", ["", "../up", "a/b", ".hidden", "a b", "x" * 101, None, 7])
def test_a_job_id_that_is_no_safe_name_is_refused(agent: Client, job: object) -> None:
    with pytest.raises(Refusal) as refused:
        agent.ask("launch", job=job, launch={"name": "x", "verb": "extract", "python": "", "spec": {}})
    assert refused.value.code == "bad-request"
    assert repr(job) in refused.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spec": "x"}, "spec cannot be 'x'"),
        ({"verb": "../extract"}, "verb cannot be '../extract'"),
        ({"stop_grace_s": -1}, "stop_grace_s cannot be -1"),
        ({"stop_target": "everyone"}, "stop_target cannot be 'everyone'"),
        ({"log_limit_bytes": 10}, "log_limit_bytes cannot be 10"),
        ({"env": {"A": 1}}, "env cannot be"),
        ({"gpus": 3}, "gpus must be a list"),
        ({"colour": "red"}, "no field 'colour'"),
    ],
)
def test_a_launch_with_a_field_that_cannot_be_is_refused_and_leaves_nothing(
    agent: Client, state: Path, change: dict[str, object], words: str
) -> None:
    launch = {"name": "x", "verb": "extract", "python": sys.executable, "spec": {}, **change}
    with pytest.raises(Refusal) as refused:
        agent.ask("launch", job="j-1", launch=launch)
    assert refused.value.code == "bad-request"
    assert words in refused.value.message
    assert list((state / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", "is not on this node"),
        ("no-such-python", "is not on this node's PATH"),
        ("/bin/false", "does not run"),
        ("/bin/echo", "does not run"),
        ("/tmp", "is not on this node"),
    ],
)
def test_a_python_that_is_missing_or_no_python_is_refused_and_leaves_nothing(
    agent: Client, state: Path, python: str, words: str
) -> None:
    for ask in (
        lambda: agent.launch("j-1", {"do": DONE}, python=python),
        lambda: agent.ask("plan", python=python, spec={"verb": "extract", "spec": {}}),
    ):
        with pytest.raises(Refusal) as refused:
            ask()
        assert refused.value.code == "python-unusable"
        assert python in refused.value.message
        assert words in refused.value.message
        assert "--python" in refused.value.remedy
    assert list((state / "jobs").iterdir()) == []


def test_without_a_python_the_agents_default_is_used(agent: Client) -> None:
    agent.launch("j-1", {"do": DONE}, python="")
    assert agent.wait("j-1", "done")["python"] == sys.executable


def test_changed_jobs_are_pushed_and_removed_ones_are_told_gone(agent: Client, state: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    agent.launch("j-1", {"do": [["wait_for", str(go)], *DONE]})

    def about(wanted: str) -> Callable[[dict[str, object]], bool]:
        return lambda push: any(job["job"] == "j-1" and job["state"] == wanted for job in push["jobs"])

    agent.push("jobs", about("running"))
    go.touch()
    agent.push("jobs", about("done"))
    for path in (state / "jobs" / "j-1").iterdir():
        path.unlink()
    (state / "jobs" / "j-1").rmdir()
    agent.push("jobs", lambda push: push["gone"] == ["j-1"])


def test_a_plan_is_what_the_worker_python_prints_last(agent: Client) -> None:
    plan = agent.ask("plan", python="", spec={"verb": "extract", "spec": {"do": [], "gpus": []}})["plan"]
    assert plan == {"ok": True, "verb": "extract", "spec": {"do": [], "gpus": []}}


def test_a_plan_that_crashes_is_refused_with_its_last_line(agent: Client) -> None:
    with pytest.raises(Refusal) as refused:
        agent.ask("plan", python="", spec={"verb": "extract", "spec": {"do": [["no such step"]]}})
    assert refused.value.code == "plan-refused"
    assert "KeyError: 'no such step'" in refused.value.message


def test_a_plan_that_hangs_stops_no_beat_and_ends_at_its_limit(agent: Client) -> None:
    number = agent.send("plan", python="", spec={"verb": "extract", "spec": {"do": [["wait"]]}}, timeout_s=3)
    for _ in range(3):
        agent.push("beat")
    with pytest.raises(Refusal) as refused:
        agent.answer(number)
    assert refused.value.code == "timed-out"
    script = str(agent.process.args[-3])
    until(
        lambda: (
            not [
                pid
                for pid in processes.snapshot()
                if "plan -" in processes.command(pid) and script in processes.command(pid)
            ]
        ),
        "no plan",
    )


def test_an_unknown_operation_and_an_unknown_job_are_refused_by_name(agent: Client) -> None:
    for op, fields, words in (
        ("dance", {}, "'dance'"),
        ("stop", {"job": "j-9"}, "no job j-9"),
        ("read", {"job": "j-9", "file": "log"}, "no job j-9"),
        ("tail", {"job": "j-9"}, "no job j-9"),
    ):
        with pytest.raises(Refusal) as refused:
            agent.ask(op, **fields)
        assert words in refused.value.message


def test_the_folder_of_a_launch_that_was_cut_off_is_no_job(agent: Client, state: Path) -> None:
    (state / "jobs" / ".new-j-1-77").mkdir()
    (state / "jobs" / "j-2").mkdir()
    jobs = {job["job"]: job for job in agent.ask("list")["jobs"]}
    assert list(jobs) == ["j-2"]
    assert jobs["j-2"]["state"] == "lost"
    assert "no state.json" in jobs["j-2"]["reason"]


def test_a_launch_that_was_cut_off_before_its_supervisor_started_is_lost(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": DONE})
    record = agent.wait("j-1", "done")
    (state / "jobs" / "j-2").mkdir()
    cut_off = {"job": "j-2", "state": "starting", "boot_id": record["boot_id"], "log": None}
    (state / "jobs" / "j-2" / "state.json").write_text(json.dumps(cut_off))
    found = agent.job("j-2")
    assert (found["state"], found["reason"]) == ("lost", "its supervisor never started")


def test_a_lost_job_that_had_said_finished_says_so_but_is_not_done(agent: Client) -> None:
    agent.launch("j-1", {"do": [["event", "finished", {"done": 2}], ["wait"]]})
    until(lambda: agent.job("j-1")["result"], "the event")
    record = agent.wait("j-1", "running")
    os.kill(record["supervisor"]["pid"], 9)
    os.kill(record["runner"]["pid"], 9)
    assert agent.wait("j-1", "lost")["reason"].endswith("(its last word was 'finished')")


def test_a_job_of_another_node_in_a_shared_home_is_not_written_to(agent: Client, state: Path) -> None:
    (state / "jobs" / "j-1").mkdir()
    text = json.dumps({"job": "j-1", "state": "running", "boot_id": "another", "host": "node-17"})
    (state / "jobs" / "j-1" / "state.json").write_text(text)
    record = agent.job("j-1")
    assert (record["state"], record["reason"]) == ("lost", "it ran on node node-17")
    assert (state / "jobs" / "j-1" / "state.json").read_text() == text


def test_a_message_with_line_breaks_stays_one_line(agent: Client) -> None:
    agent.launch("j-1", {"do": [["event", "failed", {"message": "one\ntwo", "remedy": "do\nthis"}], ["exit", 2]]})
    assert agent.wait("j-1", "failed")["reason"] == "one two: do this"


def abandoned(store: jobs.JobStore, job: str) -> Path:
    """The folder of a job that was running and whose supervisor is gone."""
    folder = Path(store.root) / "jobs" / job
    folder.mkdir()
    record = dict(jobs.blank(job), state="running", boot_id=store.boot_id, host=store.host)
    (folder / "state.json").write_text(json.dumps(record))
    return folder


def test_a_job_that_began_after_the_last_look_at_the_processes_is_not_called_lost(tmp_path: Path) -> None:
    store = jobs.JobStore(str(tmp_path))
    abandoned(store, "j-1")
    store.refresh(True)  # an abandoned job is what makes the store look at the processes
    folder = abandoned(store, "j-2")
    stray = subprocess.Popen(["sleep", "600"], env={**os.environ, processes.MARK: str(folder)})
    try:
        assert store.look("j-2")["state"] == "orphaned"
        assert [found["pid"] for found in store.look("j-2")["strays"]] == [stray.pid]
    finally:
        stray.kill()
        stray.wait()


def test_a_launch_that_gets_its_name_while_an_agent_starts_does_not_end_that_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs" / f"{jobs.STAGING}j-1-1").mkdir(parents=True)
    listdir = os.listdir

    def then_renamed(path: str) -> list[str]:
        names = listdir(path)
        for name in names:
            if name.startswith(jobs.STAGING):
                (tmp_path / "jobs" / name).rename(tmp_path / "jobs" / "j-1")
        return names

    monkeypatch.setattr(os, "listdir", then_renamed)
    jobs.JobStore(str(tmp_path))
    assert (tmp_path / "jobs" / "j-1").is_dir()
