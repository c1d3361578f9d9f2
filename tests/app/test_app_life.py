"""The life of the console: how it starts, what it says when it is left, and that it ends with its terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from textual.screen import Screen

from dflash_tui.app.crash import write_report
from dflash_tui.app.screens.fleet import FleetScreen
from dflash_tui.app.screens.help import HelpScreen
from dflash_tui.app.screens.launch import LaunchScreen
from dflash_tui.fleet.facts import JobsArrived

from .scripted import ScriptedLink, console, gpu_node, live, running_job, until_open, until_shown, until_told

ROOT = Path(__file__).parents[2]
RUN_CONSOLE = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from app.scripted import ScriptedLink, gpu_node
from dflash_tui.app import run
from dflash_tui.config import Settings
sys.exit(run([ScriptedLink("gpu-1", gpu_node("gpu-1"))], Settings()))
"""


def console_process(tty: int, before: str = "") -> subprocess.Popen[bytes]:
    """The console in a process of its own on `tty`, which is not its controlling terminal: no SIGHUP will come."""
    script = before + RUN_CONSOLE.format(root=str(ROOT), tests=str(ROOT / "tests"))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, stdin=tty, stdout=tty, stderr=tty, env=env, start_new_session=True, cwd=ROOT)


def read_until(fd: int, wanted: bytes) -> bytes:
    """Reads a terminal's other side until `wanted` was printed or it is closed."""
    seen, deadline = b"", time.monotonic() + 120
    while wanted not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([fd], [], [], 1.0)[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            if not data:
                break
            seen += data
    return seen


def test_a_console_whose_terminal_vanishes_ends() -> None:
    ours, theirs = pty.openpty()
    process = console_process(theirs)
    os.close(theirs)
    try:
        assert b"gpu-1" in read_until(ours, b"gpu-1")
        os.close(ours)
        assert process.wait(120) in (128 + signal.SIGHUP, -signal.SIGHUP)
    finally:
        process.kill()
        process.wait()


def test_a_console_whose_own_leaving_never_ends_is_ended_all_the_same() -> None:
    ours, theirs = pty.openpty()
    # What was seen on a terminal that was gone: the last write waited for ever.
    stuck = (
        "from textual.drivers._writer_thread import WriterThread; WriterThread.stop = lambda self: time.sleep(10**6)"
    )
    process = console_process(theirs, before=f"import time; {stuck}")
    os.close(theirs)
    try:
        assert b"gpu-1" in read_until(ours, b"gpu-1")
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_console_and_gives_the_terminal_back(number: signal.Signals) -> None:
    ours, theirs = pty.openpty()
    process = console_process(theirs)
    os.close(theirs)
    try:
        assert b"gpu-1" in read_until(ours, b"gpu-1")
        process.send_signal(number)
        assert b"\x1b[?1049l" in read_until(ours, b"\x1b[?1049l")  # the screen that was there before
        assert process.wait(120) == 128 + number
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_without_a_terminal_one_line_says_what_to_do() -> None:
    script = RUN_CONSOLE.format(root=str(ROOT), tests=str(ROOT / "tests"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "dflash-tui: the console needs a terminal; use `dflash-tui status` in a script\n"


def test_importing_the_screens_loads_neither_torch_nor_paramiko() -> None:
    code = (
        "import dflash_tui.app, sys; assert 'textual' not in sys.modules\n"
        "import dflash_tui.app.app\n"
        "print([name for name in ('torch', 'paramiko', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


async def test_links_are_started_after_the_first_screen_and_closed_with_the_last() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"))
    app = console(link)
    assert not link.started
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "1/1 nodes live")
        assert link.started and not link.closed
        await pilot.press("q")
    assert link.closed and app.return_code == 0


async def test_leaving_says_that_jobs_run_on() -> None:
    facts = [*live("gpu-1"), JobsArrived("gpu-1", (running_job(), running_job("another")), whole=True)]
    app = console(ScriptedLink("gpu-1", facts))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "2 jobs active")
        await pilot.press("q")
        left = list(app._exit_renderables)
    assert left == ["2 jobs run on without the console; `dflash-tui jobs` shows them."]


@pytest.mark.parametrize("screen", [HelpScreen, LaunchScreen])
async def test_leaving_in_the_moment_in_which_a_screen_opens_is_no_fault(
    screen: type[Screen[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    app = console(ScriptedLink("gpu-1", live("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "1/1 nodes live")
        app.push_screen(screen())
        app.exit(return_code=0)
    assert app.return_code == 0
    assert "failed" not in capsys.readouterr().err


async def test_a_fault_of_the_console_goes_to_a_file_and_one_line_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: FleetScreen, fleet: object) -> None:
        raise RuntimeError("what nobody\nthought of")

    monkeypatch.setattr(FleetScreen, "show_fleet", fails)
    with pytest.raises(RuntimeError):
        async with console(ScriptedLink("gpu-1", live("gpu-1"))).run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.5)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    (report,) = (tmp_path / "xdg" / "state" / "dflash-tui").glob("crash-*.txt")
    assert f"RuntimeError: what nobody thought of; jobs run on; please report it with {report}" in printed.err
    assert "in fails" in report.read_text()


def test_a_report_that_cannot_be_written_still_gives_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    line = write_report(ValueError("no"))
    assert "ValueError: no; its report could not be written" in line and "\n" not in line


async def test_a_theme_that_does_not_exist_is_told_and_another_is_taken() -> None:
    app = console(ScriptedLink("gpu-1", live("gpu-1")), theme="no-such-theme")
    async with app.run_test(size=(80, 24)) as pilot:
        await until_told(pilot, "no theme is called 'no-such-theme'")
        await until_shown(pilot, "1/1 nodes live")


async def test_numbers_and_letters_change_screens_and_a_question_mark_helps() -> None:
    app = console(ScriptedLink("gpu-1", live("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        for key, title in (
            ("j", "[2 Jobs]"),
            ("3", "[3 Logs]"),
            ("c", "[4 Compare]"),
            ("1", "[1 Fleet]"),
            ("2", "[2 Jobs]"),
            ("f", "[1 Fleet]"),
        ):
            await pilot.press(key)
            await until_shown(pilot, title)
        await pilot.press("question_mark")
        await until_open(pilot, HelpScreen)
        await pilot.press("escape")
        await until_shown(pilot, "[1 Fleet]")
