"""The metrics child as the agent runs it: a process of its own, under `python -I -S`, a line a second."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from dflash_tui.fleet import facts
from dflash_tui.node import metrics
from dflash_tui.node.metrics import Gpus, GpuThread
from dflash_tui.node.nvml import Nvml
from dflash_tui.node.smi import Smi
from tests.fakes.nvml import RECORDING, SMI, ReplayedNvml

ROOT = Path(__file__).resolve().parents[2]
LONG = 60.0
CHILD = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dflash_tui.node import metrics; sys.exit(metrics.main(sys.argv[1:]))"


@pytest.fixture
def environment(tmp_path):
    """A node with eight recorded cards and a home of its own."""
    return {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": f"{SMI.parent}{os.pathsep}{os.environ['PATH']}",
        "DFLASH_TUI_FAKE_SMI": str(RECORDING),
        "DFLASH_TUI_FAKE_GPUS": "8",
    }


@pytest.fixture
def child(environment):
    started = []

    def start(*arguments, output=subprocess.PIPE, **more):
        command = [sys.executable, "-I", "-S", "-c", CHILD, "--interval", "0.1", *arguments]
        started.append(subprocess.Popen(command, env={**environment, **more}, stdout=output, stdin=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(LONG)
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def until(check, what: str):
    end = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def line_with(process, check):
    for text in process.stdout:
        line = json.loads(text)
        if check(line):
            return line
    raise AssertionError("the lines ended before that")


def names(kind) -> set[str]:
    return {field.name for field in fields(kind)}


def test_the_keys_of_a_line_are_the_field_names_of_the_facts(child):
    line = line_with(child(), lambda line: len(line["gpus"]) == 8)
    assert set(line) == names(facts.Metrics) - {"age_s", "stale"}
    assert set(line["host"]) == names(facts.HostMetrics)
    assert all(set(disk) == names(facts.Disk) for disk in line["host"]["disks"]) and line["host"]["disks"]
    assert all(set(card) == names(facts.Gpu) for card in line["gpus"])
    assert all(set(process) == names(facts.GpuProcess) for card in line["gpus"] for process in card["processes"])
    assert any(card["processes"] for card in line["gpus"])
    assert (line["gpu_source"], line["gpu_error"]) == ("nvidia-smi", None)


def test_lines_come_one_after_another_with_rates_from_the_second_on(child):
    process = child("--count", "3")
    lines = [json.loads(text) for text in process.stdout]
    assert process.wait(LONG) == 0 and len(lines) == 3
    assert lines[0]["time"] < lines[1]["time"] < lines[2]["time"]
    assert lines[0]["host"]["net_receive_bytes_per_s"] is None
    assert abs(lines[2]["time"] - time.time()) < LONG


def test_collect_reads_the_same_here_and_now(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = metrics.collect(gpus=Gpus(open_nvml=lambda: Nvml(ReplayedNvml(cards=2))))
    assert [card["index"] for card in line["gpus"]] == [0, 1] and line["gpu_source"] == "nvml"
    assert line["host"]["memory_total_bytes"] > 0
    assert any(disk["path"] == "/" for disk in line["host"]["disks"])


def test_it_ends_when_nobody_reads_it_any_more(child):
    process = child("--interval", "3000")
    assert process.stdout.readline()
    process.stdout.close()
    # Long before the next line is due.
    assert process.wait(LONG) == 0


def test_it_ends_when_its_parent_dies_even_where_its_output_stays_open(environment, tmp_path):
    lines, pid = tmp_path / "lines", tmp_path / "pid"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time, pathlib\n"
            "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', sys.argv[1], '--interval', '0.1'], stdout=open(sys.argv[2], 'wb'))\n"
            "pathlib.Path(sys.argv[3]).write_text(str(child.pid) + '\\n')\n"
            "child.wait()",
            CHILD,
            str(lines),
            str(pid),
        ],
        env=environment,
    )
    try:
        until(
            lambda: pid.exists() and pid.read_text().endswith("\n") and lines.stat().st_size > 0,
            "it never wrote a line",
        )
    finally:
        parent.kill()
        parent.wait()
    orphan = int(pid.read_text())
    try:
        until(lambda: gone(orphan), "it outlived its parent")
    finally:
        if not gone(orphan):
            os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_while_nvidia_smi_hangs_it_leaves_none_behind(child, number):
    process = child(DFLASH_TUI_FAKE_SMI_MODE="hang")
    hung = []

    def started():
        # Only once it is nvidia-smi by name has it got past what its parent does for it before.
        hung[:] = [
            other.pid
            for other in psutil.Process(process.pid).children()
            if any(word.endswith("nvidia-smi") for word in other.cmdline())
        ]
        return bool(hung)

    until(started, "no nvidia-smi was started")
    process.send_signal(number)
    assert process.wait(LONG) == (0 if number == signal.SIGTERM else -number)
    until(lambda: all(gone(pid) for pid in hung), "nvidia-smi was left behind")


def test_a_hung_nvidia_smi_stops_no_line_about_the_host(child):
    process = child(DFLASH_TUI_FAKE_SMI_MODE="hang")
    line = line_with(process, lambda line: line["gpu_error"] and "did not answer in 5 s" in line["gpu_error"])
    assert line["gpus"] == [] and line["host"]["memory_used_bytes"] > 0
    assert line_with(process, lambda line: True)["time"] > line["time"]


def test_a_lost_card_reaches_the_line_beside_seven_good_ones(child):
    line = line_with(child(DFLASH_TUI_FAKE_SMI_MODE="lost:4"), lambda line: line["gpus"])
    assert [bool(card["error"]) for card in line["gpus"]] == [index == 4 for index in range(8)]
    assert line["gpu_error"] is None


def test_a_call_that_hangs_inside_the_driver_keeps_the_last_cards_and_says_since_when():
    hang, release = threading.Event(), threading.Event()

    class Hanging(ReplayedNvml):
        def nvmlDeviceGetCount(self):
            if hang.is_set():
                release.wait(LONG)
            return super().nvmlDeviceGetCount()

    thread = GpuThread(Gpus(open_nvml=lambda: Nvml(Hanging(cards=2))), interval_s=0.01, overdue_s=0.3)
    thread.start()
    try:
        until(lambda: len(thread.latest().gpus) == 2, "no first reading")
        hang.set()
        until(lambda: thread.latest().error is not None, "the hang was not noticed")
        stale = thread.latest()
        assert "has not answered for" in stale.error and "stale since 20" in stale.error
        assert len(stale.gpus) == 2 and stale.source == "nvml"
        hang.clear()
        release.set()
        until(lambda: thread.latest().error is None, "it did not come back")
    finally:
        release.set()
        thread.stop()


def test_before_its_first_answer_a_slow_driver_is_not_taken_for_no_gpus():
    release = threading.Event()

    def open_slowly():
        release.wait(LONG)
        return Nvml(ReplayedNvml())

    thread = GpuThread(Gpus(open_nvml=open_slowly))
    thread.start()
    try:
        until(lambda: thread.latest().error is not None, "nothing was said")
        assert "has not answered yet" in thread.latest().error
        release.set()
        until(lambda: thread.latest().gpus, "no cards")
        assert thread.latest().error is None
    finally:
        release.set()
        thread.stop()


def test_an_answer_that_nobody_foresaw_is_told_and_reading_goes_on():
    class Odd(ReplayedNvml):
        odd = True

        def nvmlDeviceGetCount(self):
            if self.odd:
                raise RuntimeError("what is this")
            return super().nvmlDeviceGetCount()

    module = Odd()
    thread = GpuThread(Gpus(open_nvml=lambda: Nvml(module)), interval_s=0.01)
    thread.start()
    try:
        until(lambda: thread.latest().error is not None, "nothing was said")
        until(lambda: "what is this" in (thread.latest().error or ""), "the reason was not said")
        module.odd = False
        until(lambda: thread.latest().gpus and thread.latest().error is None, "reading did not go on")
    finally:
        thread.stop()


def test_readings_keep_their_age_when_both_sources_fail(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    module = ReplayedNvml()
    gpus = Gpus(open_nvml=lambda: Nvml(module), smi=Smi(str(program), time_limit_s=LONG))
    good = gpus.read()
    module.count_error = 999
    stale = gpus.read()
    assert stale.gpus == good.gpus
    assert stale.error == f"nvidia-smi: NVIDIA-SMI has failed; stale since {metrics.clock_text(good.time)}"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_a_bad_interval_is_refused_in_one_line_that_names_it(value):
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, f"--interval={value}"], capture_output=True, text=True, timeout=LONG
    )
    assert process.returncode == 2 and value in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
