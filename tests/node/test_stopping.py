"""Stopping is proved: whatever a job has become, none of its processes is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tui.node import processes, stopping
from tests.node.client import Client, Refusal, until
from tests.node.conftest import of_state

# Each by the means with which real servers and trainers get away.
FIGHTERS = [
    ["child", ["ignore_term_and_wait"], True],
    ["daemon"],
    ["child", ["retitle"]],
    ["child", ["exec_as", "VLLM::Worker"], True],
    ["child", ["spawner"]],
]


def workers(state: Path, job: str) -> list[processes.Stat]:
    """Living processes of the job, its supervisor not among them."""
    folder = state / "jobs" / job
    log = (folder / "log").stat()
    return processes.of_job(str(folder), {"dev": log.st_dev, "ino": log.st_ino})


def fight(agent: Client, state: Path, *last: list[object]) -> None:
    """A job with one of each fighter, all of them up."""
    agent.launch("j-1", {"do": [*FIGHTERS, ["child", ["wait"], False, "/dev/null"], *last]}, stop_grace_s=1)
    log = state / "jobs" / "j-1" / "log"
    until(lambda: b"daemon" in log.read_bytes() and b"retitled" in log.read_bytes(), "the fighters to be up")
    until(lambda: len(workers(state, "j-1")) >= 8, "all processes")
    until(
        lambda: any(processes.command(stat.pid).startswith("VLLM::Worker") for stat in workers(state, "j-1")), "exec -a"
    )


def test_a_runner_that_obeys_sigterm_is_interrupted_with_its_own_words(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": [["obey"]]})
    until(lambda: agent.job("j-1")["last_event"], "the runner to listen")
    answer = agent.ask("stop", job="j-1", force=False)
    assert answer["job"]["job"] == "j-1"
    record = agent.wait("j-1", "interrupted")
    assert record["exit"] == {"code": 3, "signal": None}
    assert record["reason"] == "stopped on request"
    assert record["stop"]["force"] is False
    assert record["killed_processes"] == 0
    assert not of_state(state)


def test_a_runner_that_dies_of_the_request_to_stop_is_interrupted(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": [["wait"]]})
    agent.wait("j-1", "running")
    agent.ask("stop", job="j-1")
    record = agent.wait("j-1", "interrupted")
    assert record["exit"] == {"code": None, "signal": signal.SIGTERM}


def test_a_runner_that_finishes_within_its_grace_is_done(agent: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    agent.launch(
        "j-1", {"do": [["ignore_term"], ["event", "phase", {}], ["wait_for", str(go)], ["event", "finished", {}]]}
    )
    until(lambda: agent.job("j-1")["last_event"], "the runner to ignore")
    agent.ask("stop", job="j-1")
    agent.wait("j-1", "stopping")
    go.touch()
    assert agent.wait("j-1", "done")["stop"] is not None


def test_a_process_tree_that_fights_back_is_ended_to_the_last(agent: Client, state: Path) -> None:
    fight(agent, state, ["ignore_term"], ["event", "phase", {}], ["wait"])
    until(lambda: agent.job("j-1")["last_event"], "the runner to ignore")
    agent.ask("stop", job="j-1")
    record = agent.wait("j-1", "killed")
    assert not of_state(state)
    assert record["killed_processes"] >= 3
    assert "did not end within 1 s" in record["reason"]


def test_what_a_finished_job_leaves_behind_is_ended_before_it_counts_as_done(
    agent: Client, state: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    fight(agent, state, ["wait_for", str(go)], ["event", "finished", {}])
    go.touch()
    record = agent.wait("j-1", "done")
    assert not workers(state, "j-1")
    assert record["killed_processes"] >= 2


def test_a_second_stop_with_force_skips_the_grace(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": [["ignore_term"], ["event", "phase", {}], ["wait"]]}, stop_grace_s=3600)
    until(lambda: agent.job("j-1")["last_event"], "the runner to ignore")
    agent.ask("stop", job="j-1")
    assert agent.wait("j-1", "stopping")["stop"]["force"] is False
    agent.ask("stop", job="j-1", force=True)
    record = agent.wait("j-1", "killed")
    assert record["stop"]["force"] is True
    assert record["reason"] == "killed on request (force)"
    assert not of_state(state)


def test_sigterm_to_the_supervisor_itself_stops_the_job_kindly(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": [["obey"]]})
    until(lambda: agent.job("j-1")["last_event"], "the runner to listen")
    os.kill(agent.job("j-1")["supervisor"]["pid"], signal.SIGTERM)
    assert agent.wait("j-1", "interrupted")["exit"] == {"code": 3, "signal": None}


def test_a_stop_of_a_job_that_is_over_is_refused_with_its_state(agent: Client) -> None:
    agent.launch("j-1", {"do": [["event", "finished", {}]]})
    agent.wait("j-1", "done")
    with pytest.raises(Refusal) as refused:
        agent.ask("stop", job="j-1")
    assert refused.value.code == "not-running"
    assert "it is done" in refused.value.message


def test_strays_of_a_killed_supervisor_are_listed_and_ended_on_request(agent: Client, state: Path) -> None:
    fight(agent, state, ["wait"])
    os.kill(agent.job("j-1")["supervisor"]["pid"], signal.SIGKILL)
    record = agent.wait("j-1", "orphaned")
    strays = {stray["pid"]: stray for stray in record["strays"]}
    assert set(strays) == {stat.pid for stat in workers(state, "j-1")}
    assert record["runner"]["pid"] in strays
    assert any(stray["command"].startswith("VLLM::") for stray in strays.values())
    assert strays[record["runner"]["pid"]]["memory_bytes"] >= 1 << 20
    assert "supervisor is gone" in record["reason"]
    number = agent.send("stop", job="j-1")
    agent.push("beat")
    agent.push("beat")
    answered = agent.answer(number).header["job"]
    assert answered["state"] == "killed"
    assert "supervisor was gone" in answered["reason"]
    assert not of_state(state)
    assert agent.job("j-1")["state"] == "killed"


def test_an_orphaned_runner_still_gets_its_grace_and_its_last_word(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": [["obey"]]})
    until(lambda: agent.job("j-1")["last_event"], "the runner to listen")
    os.kill(agent.job("j-1")["supervisor"]["pid"], signal.SIGKILL)
    agent.wait("j-1", "orphaned")
    record = agent.ask("stop", job="j-1")["job"]
    assert record["state"] == "interrupted"
    assert record["last_event"]["event"] == "interrupted"


def test_a_job_whose_supervisor_and_processes_are_gone_is_lost_and_stays_so(
    connect: Callable[..., Client], state: Path
) -> None:
    agent = connect()
    agent.launch("j-1", {"do": [["wait"]]})
    record = agent.wait("j-1", "running")
    os.kill(record["supervisor"]["pid"], signal.SIGKILL)
    os.kill(record["runner"]["pid"], signal.SIGKILL)
    record = agent.wait("j-1", "lost")
    assert "nobody saw how it ended" in record["reason"]
    assert connect().job("j-1")["state"] == "lost"
    with pytest.raises(Refusal) as refused:
        agent.ask("stop", job="j-1")
    assert refused.value.code == "not-running"


def test_a_job_of_an_earlier_boot_is_lost_and_none_of_todays_processes_is_taken_for_its(
    agent: Client, state: Path
) -> None:
    agent.launch("j-1", {"do": [["wait"]]})
    running = agent.wait("j-1", "running")
    path = state / "jobs" / "j-2"
    path.mkdir()
    # The same runner, log and mark, but of another boot: a pid and ticks alone would find them.
    text = (state / "jobs" / "j-1" / "state.json").read_text()
    (path / "state.json").write_text(text.replace(running["boot_id"], "0" * 8))
    record = agent.job("j-2")
    assert (record["state"], record["reason"], record["strays"]) == ("lost", "the node was rebooted", [])
    assert agent.job("j-1")["state"] == "running"
    agent.ask("stop", job="j-1", force=True)
    agent.wait("j-1", "interrupted", "killed")


def test_a_pid_that_another_process_got_meanwhile_is_not_signalled() -> None:
    me = processes.me()
    assert processes.alive(me)
    other = processes.Identity(me.pid, me.ticks + 1)
    assert not processes.alive(other)
    assert not processes.send(other, signal.SIGKILL)


def test_the_memory_of_a_process_is_what_the_machine_gave_it_and_unknown_once_it_is_gone() -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; held = bytearray(100 << 20); print(len(held), flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == b"104857600"
        held = processes.resident_bytes(child.pid)
        assert held is not None and 100 << 20 <= held < 400 << 20 and held % (1 << 20) == 0
    finally:
        child.communicate()
    assert processes.resident_bytes(child.pid) is None


def test_a_zombie_counts_as_dead() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        until(lambda: (found := processes.stat_of(pid)) is not None and found.state == "Z", "a zombie")
        found = processes.stat_of(pid)
        assert found is not None
        assert not processes.alive(found.identity)
        assert pid not in processes.snapshot()
    finally:
        os.waitpid(pid, 0)


def test_shared_memory_of_processes_that_had_to_be_killed_is_given_back(
    agent: Client, state: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    agent.launch("j-1", {"do": [["child", ["share_memory", str(told)], True], ["obey"]]})
    until(lambda: told.exists() and agent.job("j-1")["last_event"], "shared memory")
    segment = Path("/dev/shm") / told.read_text()
    assert segment.exists()
    agent.ask("stop", job="j-1")
    assert agent.wait("j-1", "interrupted")["killed_processes"] == 1
    assert not segment.exists()
    assert not of_state(state)


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_resource_tracker_that_does_not_end_by_itself_is_killed_too() -> None:
    now = [0.0]
    # Its pipe is held by somebody else: this process.
    read, write = os.pipe()
    tracker = subprocess.Popen(
        [sys.executable, "-c", f"from multiprocessing.resource_tracker import main; main({read})"], pass_fds=[read]
    )
    os.close(read)
    try:
        until(lambda: ignores_sigterm(tracker.pid), "the tracker to be up")
        assert processes.is_resource_tracker(tracker.pid)

        def members() -> list[processes.Stat]:
            found = processes.stat_of(tracker.pid)
            return [] if found is None or found.dead else [found]

        ladder = stopping.Ladder(members, None, grace_s=0.0, clock=lambda: now[0])
        ladder.ask(force=True)
        for now[0] in (0.0, 6.0, 7.0):
            assert not ladder.step()
        assert members()
        now[0] = 20.0
        until(ladder.step, "its end")
        assert tracker.wait() == -signal.SIGKILL
    finally:
        os.close(write)
        tracker.kill()
        tracker.wait()


def test_a_runner_whose_first_thread_ended_before_the_others_is_waited_for(
    agent: Client, state: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    agent.launch("j-1", {"do": [["end_in_another_thread", str(go)]]})
    until(lambda: agent.job("j-1")["last_event"], "the runner to listen")
    runner = processes.identity_of(agent.job("j-1")["runner"])
    assert runner is not None
    agent.ask("stop", job="j-1")
    until(lambda: (found := processes.stat_of(runner.pid)) is not None and found.state == "Z", "its first thread's end")
    assert processes.alive(runner)
    assert agent.wait("j-1", "stopping")["exit"] is None
    go.touch()
    record = agent.wait("j-1", "interrupted")
    assert record["exit"] == {"code": 3, "signal": None}
    assert record["reason"] == "stopped on request"
    assert not of_state(state)


def test_a_job_that_was_halted_hears_of_the_stop(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": [["obey"]]})
    until(lambda: agent.job("j-1")["last_event"], "the runner to listen")
    os.kill(agent.job("j-1")["runner"]["pid"], signal.SIGSTOP)
    agent.ask("stop", job="j-1")
    assert agent.wait("j-1", "interrupted")["exit"] == {"code": 3, "signal": None}


def test_a_process_that_sigkill_does_not_end_is_named_and_never_counted_as_gone() -> None:
    now = [0.0]
    # A process that cannot be signalled stands in for one that the kernel holds: ours, with another start.
    held = processes.Stat(os.getpid(), 1, "D", -1, "nfs-reader")
    ladder = stopping.Ladder(lambda: [held], held.identity, grace_s=10.0, clock=lambda: now[0])
    ladder.ask(force=True)
    for now[0] in (0.0, 6.0, 7.0, 20.0):
        assert not ladder.step()
    assert "waiting for 1 process that SIGKILL does not end" in ladder.stuck()
    assert f"pid {os.getpid()} nfs-reader, state D" in ladder.stuck()
    assert not ladder.killed
