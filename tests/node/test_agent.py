"""The agent itself: its greeting, its beats, its end, and every Python that it may meet on a node."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tui.node import children, outgoing, processes
from dflash_tui.node.loop import Loop
from dflash_tui.node.protocol import FrameReader
from tests.node.client import LIMIT_S, REPOSITORY, Client, Refusal, until

HANGING = """
import json, sys, time
def main(argv):
    if {reads}:
        print(json.dumps({{"time": 1.0, "host": {{}}, "gpus": [], "gpu_source": "none", "gpu_error": None}}), flush=True)
    while True:
        time.sleep(3600)
"""


@functools.cache
def pythons() -> dict[str, str]:
    """Working interpreters of this machine by version, Python 3.8 and later."""
    names = [sys.executable, "python3", "/usr/bin/python3", *(f"python3.{minor}" for minor in range(8, 16))]
    paths = [found for name in names if (found := shutil.which(name))]
    pyenv = shutil.which("pyenv")
    if pyenv:
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        paths += [str(path) for path in sorted(Path(root).glob("versions/*/bin/python3"))]
    found = {}
    for path in paths:
        ask = [path, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
        major, _, minor = answer.stdout.strip().partition(".")
        if answer.returncode == 0 and (int(major), int(minor)) >= (3, 8):
            found.setdefault(answer.stdout.strip(), path)
    return found


@pytest.mark.parametrize("flags", [("-I", "-S"), ("-I",), ()], ids=lambda flags: "".join(flags) or "plain")
@pytest.mark.parametrize("version", sorted(pythons()))
def test_a_job_runs_under_the_agent_of_every_python_on_this_machine(
    connect: Callable[..., Client], version: str, flags: tuple[str, ...]
) -> None:
    agent = connect(python=pythons()[version], flags=flags)
    hello = agent.push("hello")
    assert hello["python"].startswith(version + ".")
    agent.launch("j-1", {"do": [["print", "hi"], ["event", "finished", {"done": 1}]]})
    assert agent.wait("j-1", "done")["result"]["done"] == 1
    metrics = agent.push("metrics", lambda push: not push["stale"])
    assert metrics["metrics"]["host"]["memory_total_bytes"] > 0


def test_the_greeting_says_who_and_where(agent: Client, state: Path) -> None:
    hello = agent.push("hello")
    assert hello["protocol"] == 1
    assert hello["host"] == socket.gethostname()
    assert hello["boot_id"] == processes.boot_id()
    assert hello["pid"] == agent.process.pid
    assert hello["bundle"] == "h4sh"
    assert hello["state_dir"] == str(state)
    assert hello["default_python"] == sys.executable
    assert abs(hello["time"] - time.time()) < 3600
    assert agent.ask("ping")["time"] >= hello["time"]


def test_where_the_state_folder_cannot_be_written_the_jobs_go_to_a_private_one_in_tmp(
    connect: Callable[..., Client], environment: dict[str, str], tmp_path: Path
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    agent = connect(env={**environment, "XDG_STATE_HOME": str(blocked)})
    folder = Path(agent.push("hello")["state_dir"])
    assert folder == Path(f"/tmp/dflash-tui-{os.getuid()}")
    assert folder.stat().st_mode & 0o777 == 0o700
    agent.close()
    # Only what is empty: the folder may be somebody's in earnest.
    for path in (folder / "jobs", folder):
        with contextlib.suppress(OSError):
            path.rmdir()


def test_the_agent_and_its_reader_of_metrics_end_with_standard_input(agent: Client) -> None:
    agent.push("metrics")
    stats = processes.snapshot()
    below = processes.descendants([agent.process.pid], stats)
    assert below
    agent.close()
    assert agent.process.returncode == 0
    until(lambda: not any(processes.alive(stats[pid].identity) for pid in below), "the reader of metrics to end")


def test_the_agent_ends_when_nobody_reads_its_output(agent: Client) -> None:
    assert agent.process.stdout
    agent.process.stdout.close()
    assert agent.process.wait(LIMIT_S) == 0


def test_what_is_no_frame_ends_the_agent_with_one_line(agent: Client) -> None:
    assert agent.process.stdin and agent.process.stderr
    agent.process.stdin.write(b"GET / HTTP/1.1\n")
    agent.process.stdin.flush()
    assert agent.process.wait(LIMIT_S) == 2
    lines = agent.process.stderr.read().decode().splitlines()
    assert lines == ["dflash-tui agent: not a frame: b'GET / HTTP/1.1'"]


@pytest.mark.parametrize("reads", [True, False], ids=["after a reading", "from the start"])
def test_a_reader_of_metrics_that_hangs_is_told_of_as_stale_and_stops_no_beat(
    connect: Callable[..., Client], bundle: Path, reads: bool
) -> None:
    (bundle / "dflash_tui" / "node" / "metrics.py").write_text(HANGING.format(reads=reads))
    agent = connect()
    if reads:
        assert agent.push("metrics", lambda push: not push["stale"])["metrics"]["time"] == 1.0
    stale = agent.push("metrics", lambda push: push["stale"])
    assert stale["age"] > 2.9
    assert agent.push("metrics", lambda push: push["stale"])["age"] > stale["age"]
    beats = [agent.push("beat")["time"] for _ in range(4)]
    assert beats == sorted(beats)
    assert agent.ask("ping")


def test_a_reader_of_metrics_that_hangs_is_replaced_and_one_that_ends_is_started_again() -> None:
    loop = Loop()
    readings: list[int] = []
    hang = "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(3600)"

    class Hurried(children.MetricsChild):
        REPLACE_AFTER_S = 0.5

    def came() -> None:
        assert child.reading is not None
        readings.append(child.reading["pid"])
        if len(readings) == 2:
            os.kill(readings[1], 9)
        if len(readings) == 3:
            loop.stop()

    def tick() -> None:
        child.tick()
        loop.later(0.05, tick)

    child = Hurried(loop, [sys.executable, "-I", "-S", "-c", hang], came)
    loop.later(LIMIT_S, loop.stop)
    tick()
    try:
        loop.run()
        assert len(set(readings)) == 3
        until(lambda: not any(pid in processes.snapshot() for pid in readings[:2]), "the first two to end")
    finally:
        child.close()


def test_beats_overtake_metrics_and_metrics_overtake_the_bytes_of_files() -> None:
    loop = Loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        out = outgoing.Outgoing(loop, ours.fileno(), loop.stop, lambda: None)
        full = 0
        while out.room_for_bulk():
            out.send({"ev": "tail", "number": full}, bytes(65536), outgoing.BULK)
            full += 1
        out.send({"ev": "metrics"}, rank=outgoing.STATUS)
        out.send({"ev": "beat"})
        reader = FrameReader()
        names: list[str] = []

        def read() -> None:
            names.extend(frame.header["ev"] for frame in reader.feed(theirs.recv(1 << 20)))
            if len(names) == full + 2:
                loop.stop()

        loop.watch(theirs.fileno(), 1, read)
        loop.later(LIMIT_S, loop.stop)
        loop.run()
    # The two frames of bulk that still waited come last; the one that was being written could not be overtaken.
    assert names == ["tail"] * (full - 2) + ["beat", "metrics"] + ["tail"] * 2


def test_a_console_that_takes_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "_STALLED_S", 0.2)
    loop = Loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        broken: list[bool] = []
        out = outgoing.Outgoing(loop, ours.fileno(), lambda: broken.append(True), lambda: None)
        out.check_stalled()
        assert not broken
        while out.room_for_bulk():
            out.send({"ev": "tail"}, bytes(65536), outgoing.BULK)

        def given_up() -> bool:
            out.check_stalled()
            return bool(broken)

        until(given_up, "it to be given up")
        assert not out.room_for_bulk()


def test_the_node_side_needs_no_later_python_than_3_8() -> None:
    run = [sys.executable, "-c", "import vermin; vermin.main()", "-t=3.8-", "--eval-annotations", "--no-tips"]
    command = [*run, str(REPOSITORY / "dflash_tui" / "node")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_node_side_loads_nothing_but_the_standard_library(bundle: Path) -> None:
    modules = sorted(path.stem for path in (bundle / "dflash_tui" / "node").glob("*.py") if path.stem != "__main__")
    lines = ["import sys", f"sys.path.insert(0, {str(bundle)!r})"]
    lines += [f"import dflash_tui.node.{name}" for name in modules]
    lines += ["known = set(sys.stdlib_module_names) | {'__main__', 'dflash_tui'}"]
    lines += ["print(sorted({name.partition('.')[0] for name in sys.modules} - known))"]
    command = [sys.executable, "-I", "-S", "-c", "\n".join(lines)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_a_launch_that_fails_by_a_defect_is_answered_and_so_is_its_repeat(
    bundle: Path, connect: Callable[..., Client]
) -> None:
    with (bundle / "dflash_tui" / "node" / "launching.py").open("a") as file:
        file.write("\ndef with_gpus(spec, cards):\n    raise KeyError('a defect')\n")
    agent = connect()
    for _ in range(2):
        with pytest.raises(Refusal, match="KeyError: 'a defect'") as refused:
            agent.launch("j-1", {"do": []})
        assert refused.value.code == "internal"


def test_a_list_says_whether_it_is_whole(bundle: Path, connect: Callable[..., Client], state: Path) -> None:
    with (bundle / "dflash_tui" / "node" / "requests.py").open("a") as file:
        file.write("\n_LISTED = 2\n")
    agent = connect()
    for number in range(3):
        assert agent.ask("list")["whole"] is True
        (state / "jobs" / f"j-{number}").mkdir(mode=0o700)
    listed = agent.ask("list")
    assert ([record["job"] for record in listed["jobs"]], listed["whole"]) == (["j-1", "j-2"], False)


def test_pushes_of_very_many_jobs_stay_far_below_the_longest_frame(connect: Callable[..., Client], state: Path) -> None:
    event = json.dumps({"t": 1.0, "event": "finished", "words": "x" * 15_000}) + "\n"
    for number in range(60):
        folder = state / "jobs" / f"j-{number:02d}"
        folder.mkdir(mode=0o700, parents=True)
        (folder / "events.jsonl").write_text(event)
    agent = connect()
    seen: set[str] = set()
    while len(seen) < 60:
        push = agent.push("jobs")
        assert len(json.dumps(push)) < 1 << 19
        seen |= {record["job"] for record in push["jobs"]}
