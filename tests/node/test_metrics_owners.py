"""Whose a process on a GPU is, with real processes."""

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_tui.node import gpus, owners
from dflash_tui.node.owners import Owners
from dflash_tui.node.protocol import Refused

NO_SUCH_PID = (1 << 22) + 1  # above the kernel's largest
LONG = 60.0
READY = "print('ready', flush=True); import sys; sys.stdin.read()"
# What setproctitle does to its own process: the title is written over the arguments and on into the environment.
WIPED = """
import ctypes, sys
start, end = [int(field) for field in open('/proc/self/stat').read().rpartition(')')[2].split()[47:49]]
ctypes.memset(start, 0, end - start)
"""


@pytest.fixture
def process(tmp_path):
    started = []

    def start(code=READY, output=None, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_TUI_JOB")}
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**kept, **environment},
            stdin=subprocess.PIPE,
            stdout=output or subprocess.PIPE,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def job_folder(root, job):
    folder = root / "jobs" / job
    folder.mkdir(parents=True)
    return folder


def described(reader, pid):
    cards = [{"processes": [{"pid": pid, "memory_bytes": 5}]}, {"processes": None}]
    reader.describe(cards)
    return cards[0]["processes"][0]


def test_a_process_gets_its_command_its_user_and_the_job_of_its_environment(process, tmp_path):
    child = process(DFLASH_TUI_JOB_DIR=str(tmp_path / "jobs" / "20261130-025500-extract-3f9a"))
    assert child.stdout.readline() == b"ready\n"
    found = described(Owners(str(tmp_path), holds=lambda pid: True), child.pid)
    assert found["job"] == "20261130-025500-extract-3f9a"
    assert found["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert sys.executable in found["command"] and "sys.stdin.read()" in found["command"]
    assert (found["pid"], found["memory_bytes"]) == (child.pid, 5)


def test_a_process_whose_environment_was_wiped_is_known_by_the_log_that_it_writes_to(process, tmp_path):
    job_folder(tmp_path, "20261130-020000-extract-0000")
    log = job_folder(tmp_path, "20261130-030000-extract-ffff") / "log"
    with log.open("ab") as output:
        child = process(WIPED + READY, output=output, DFLASH_TUI_JOB="wiped")
    end = time.monotonic() + LONG
    while b"ready" not in log.read_bytes():
        assert time.monotonic() < end and child.poll() is None
    assert b"DFLASH_TUI_JOB" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    reader = Owners(str(tmp_path), holds=lambda pid: True)
    assert described(reader, child.pid)["job"] == "20261130-030000-extract-ffff"


def test_a_process_that_is_no_job_of_ours_has_none(process, tmp_path):
    (job_folder(tmp_path, "20261130-030000-extract-ffff") / "log").touch()
    child = process()
    assert child.stdout.readline() == b"ready\n"
    found = described(Owners(str(tmp_path), holds=lambda pid: True), child.pid)
    assert found["job"] is None and found["command"]


def test_a_job_of_another_state_folder_is_none_of_ours_and_keeps_its_gpu_busy(process, tmp_path):
    child = process(DFLASH_TUI_JOB="j-1", DFLASH_TUI_JOB_DIR=str(tmp_path / "theirs" / "jobs" / "j-1"))
    assert child.stdout.readline() == b"ready\n"
    ours = tmp_path / "ours"
    job_folder(ours, "j-1")
    process_of_card = described(Owners(str(ours), holds=lambda pid: True), child.pid)
    assert process_of_card["job"] is None
    card = {"index": 0, "uuid": "GPU-0", "processes": [process_of_card]}
    with pytest.raises(Refused, match=f"GPU 0 is busy: process {child.pid}"):
        gpus.check_free(str(ours), [card], False, lambda uuid: None)


def test_of_a_pid_that_our_namespace_does_not_show_nothing_is_said():
    assert described(Owners(), NO_SUCH_PID) == {
        "pid": NO_SUCH_PID,
        "memory_bytes": 5,
        "command": None,
        "user": None,
        "job": None,
    }


def test_a_pid_of_the_host_that_here_means_another_process_is_not_taken_for_it(process):
    child = process(DFLASH_TUI_JOB="not-on-a-gpu")
    assert child.stdout.readline() == b"ready\n"
    # The real question, to a process that has no GPU open.
    assert owners.holds_gpu(child.pid) is False
    found = described(Owners(), child.pid)
    assert (found["command"], found["user"], found["job"]) == (None, None, None)


def test_a_process_with_a_gpu_device_open_is_known_by_it(process, tmp_path, monkeypatch):
    device = tmp_path / "nvidia0"
    device.touch()
    child = process(f"file = open({str(device)!r})\n" + READY)
    assert child.stdout.readline() == b"ready\n"
    monkeypatch.setattr(owners, "DEVICES", (str(tmp_path / "nvidia"),))
    assert owners.holds_gpu(child.pid) is True
    assert described(Owners(), child.pid)["command"]


def test_where_we_may_not_look_the_answer_is_unknown():
    assert owners.holds_gpu(NO_SUCH_PID) is None
    assert owners.user_of(NO_SUCH_PID) is None


def test_answers_are_kept_for_some_seconds_and_a_pid_given_to_another_is_asked_anew(process):
    looks, now = [], [0.0]

    def holds(pid):
        looks.append(pid)
        return True

    reader = Owners(holds=holds, clock=lambda: now[0])
    child = process()
    child.stdout.readline()
    for _ in range(5):
        described(reader, child.pid)
    assert looks == [child.pid]
    now[0] += owners.REMEMBERED_S
    described(reader, child.pid)
    assert looks == [child.pid] * 2
    other = process()
    other.stdout.readline()
    described(reader, other.pid)
    assert looks[-1] == other.pid
