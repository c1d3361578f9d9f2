"""Tracebacks of a log on the Logs screen: their frames are walked by keys, and one key opens the source of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_tui.app.screens.logs import LogsScreen
from dflash_tui.app.screens.source import SourceScreen
from dflash_tui.app.widgets.log_frames import TracedLog
from dflash_tui.app.widgets.source_view import SourceView
from dflash_tui.fleet.source import Place

from .test_logs_screen import JOB, Driver, Folder, console, lines


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    for name in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("HOME", str(tmp_path))
    return Folder(tmp_path / "state" / "dflash-tui" / "jobs" / JOB)


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Three modules, of which each line tells its module and number."""
    found = []
    for name in ("outer", "middle", "inner"):
        path = tmp_path / f"{name}.py"
        path.write_text("".join(f"{name} = {number}\n" for number in range(1, 61)))
        found.append(path)
    return found


def traceback(sources: list[Path], first: int = 10) -> bytes:
    frames = (f'  File "{path}", line {first + at}, in f\n    f()\n' for at, path in enumerate(sources))
    return ("Traceback (most recent call last):\n" + "".join(frames) + "ValueError: it broke\n").encode()


def log(driver: Driver) -> TracedLog:
    return driver.app.screen.query_one(TracedLog)


async def opened(driver: Driver, text: str) -> None:
    screen = driver.app.screen

    def there() -> bool:
        if not isinstance(driver.app.screen, SourceScreen):
            return False
        view = driver.app.screen.query_one(SourceView)
        marked = None if view.marked is None else view.lines[view.marked - view.first_line].text
        return marked == text

    for _ in range(3000):
        if there():
            return
        await driver.pilot.pause(0.02)
    raise AssertionError(f"{text!r} was not opened from {screen}")


async def test_one_key_opens_the_frame_that_raised_and_escape_comes_back_to_the_same_place(
    job: Folder, sources: list[Path]
) -> None:
    job.write(lines(0, 500) + traceback(sources) + lines(0, 3))
    async with console() as driver:
        await driver.shows("ValueError: it broke")
        before = driver.rows
        await driver.pilot.press("s")
        await opened(driver, "inner = 12")
        await driver.pilot.press("escape")
        assert isinstance(driver.app.screen, LogsScreen)
        assert driver.rows == before


async def test_frames_are_walked_in_the_log_and_in_the_source(job: Folder, sources: list[Path]) -> None:
    job.write(traceback(sources) + lines(0, 500) + traceback(sources, 40))
    # Wide enough for the path of a temporary folder.
    async with console(size=(200, 30)) as driver:
        await driver.shows("ValueError: it broke")
        for row, place in (
            (42, sources[2]),
            (41, sources[1]),
            (40, sources[0]),
            (12, sources[2]),
            (11, sources[1]),
        ):
            await driver.pilot.press("left_square_bracket")
            chosen = log(driver).chosen
            assert chosen is not None and chosen.place == Place(str(place), row)
            assert any(f'File "{place}", line {row}' in text for text in driver.rows), "it is in sight"
        assert not log(driver).following
        await driver.pilot.press("right_square_bracket")
        await driver.pilot.press("s")
        await opened(driver, "inner = 12")
        await driver.pilot.press("left_square_bracket")
        await opened(driver, "middle = 11")
        await driver.pilot.press("right_square_bracket", "right_square_bracket")
        await opened(driver, "outer = 40")


async def test_the_status_line_tells_of_the_chosen_frame_and_of_none(job: Folder, tmp_path: Path) -> None:
    job.write(lines(0, 100) + b'  File "/x.py", line 7, in f\n')
    async with console() as driver:
        await driver.shows("/x.py")
        await driver.pilot.press("left_square_bracket")
        assert "frame /x.py:7" in driver.line("status")
        await driver.pilot.press("left_square_bracket")
        assert "no other frame before this one" in driver.line("status")


async def test_a_log_without_a_traceback_says_so(job: Folder) -> None:
    job.write(lines(0, 30))
    async with console() as driver:
        await driver.shows("line     29")
        await driver.pilot.press("s")
        assert isinstance(driver.app.screen, LogsScreen)
        await driver.pilot.press("right_square_bracket")
        assert "no frame of a traceback" in driver.line("status")


async def test_a_chosen_frame_stays_marked_while_lines_come_at_both_ends(job: Folder, sources: list[Path]) -> None:
    job.write(lines(0, 20_000) + traceback(sources))
    async with console() as driver:
        await driver.shows("ValueError: it broke")
        await driver.pilot.press("left_square_bracket", "left_square_bracket")
        chosen = log(driver).chosen
        assert chosen is not None and chosen.place.line == 11
        job.write(lines(0, 3))
        start = driver.view.text.start
        driver.view.scroll_to(y=0, animate=False)
        await driver.until(lambda: driver.view.text.start < start, "older bytes are there")
        await driver.pilot.press("right_square_bracket")
        after = log(driver).chosen
        assert after is not None and after.place == Place(str(sources[2]), 12)


async def test_a_relative_frame_is_looked_for_where_the_job_ran(job: Folder, tmp_path: Path) -> None:
    cwd = tmp_path / "started here"
    cwd.mkdir()
    (cwd / "train.py").write_text("first\nsecond\n")
    (job.path / "launch.json").write_text(json.dumps({"cwd": str(cwd)}))
    job.write(b'  File "./train.py", line 2, in <module>\n  File "<string>", line 1, in <module>\n')
    async with console() as driver:
        await driver.shows("<string>")
        await driver.pilot.press("left_square_bracket", "left_square_bracket", "s")
        await opened(driver, "second")
        await driver.pilot.press("right_square_bracket")
        for _ in range(3000):
            if "read from no file" in str(driver.app.screen.query_one("#text-status").render()):
                break
            await driver.pilot.pause(0.02)
        else:
            raise AssertionError("it is not said that <string> is no file")
