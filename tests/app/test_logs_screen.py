"""The Logs screen against a real agent of this machine, whose files the tests write."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from dflash_tui.app.app import ConsoleApp
from dflash_tui.app.screens.logs import JobChooser, LogsScreen
from dflash_tui.app.widgets.log_view import LogView
from dflash_tui.config import Settings
from dflash_tui.link import LinkOptions, NodeLink, parse_target

JOB = "20261130-025500-extract-3f9a"


class Folder:
    """The folder of a job on the node."""

    def __init__(self, path: Path, state: str = "done") -> None:
        self.path = path
        path.mkdir(parents=True)
        record = {"job": path.name, "name": "a job", "verb": "extract", "state": state, "created": 1_796_000_000.0}
        (path / "state.json").write_text(json.dumps(record))
        self.log = path / "log"
        self.events = path / "events.jsonl"

    def write(self, data: bytes) -> None:
        with self.log.open("ab") as file:
            file.write(data)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the jobs of a node whose state lies in the test's own folder."""
    for name in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "state" / "dflash-tui" / "jobs"


@pytest.fixture
def job(jobs: Path) -> Folder:
    return Folder(jobs / JOB)


@pytest.fixture
def held(jobs: Path) -> Iterator[Folder]:
    """A job that runs, as its held lock says."""
    folder = Folder(jobs / JOB, "running")
    with (folder.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


class Driver:
    """The console and what is seen of it."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def view(self) -> LogView:
        return self.app.screen.query_one(LogView)

    @property
    def rows(self) -> list[str]:
        return [self.view.render_line(row).text.rstrip() for row in range(self.view.scrollable_content_region.height)]

    def line(self, name: str) -> str:
        return str(self.app.screen.query_one(f"#log-{name}", Static).content)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(6000):
            if condition():
                return
            await self.pilot.pause(0.02)
        raise AssertionError(f"waited in vain until {what}: {self.rows} {self.line('status')}")

    async def shows(self, text: str) -> None:
        await self.until(lambda: any(text in row for row in self.rows), f"the log shows {text!r}")


@asynccontextmanager
async def console(*, opened: bool = True, size: tuple[int, int] = (100, 30)) -> AsyncIterator[Driver]:
    link = NodeLink(parse_target("local"), lambda fact: None, LinkOptions())
    app = ConsoleApp([link], Settings(hosts=("local",), screen="logs"))
    try:
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.until(lambda: app.fleet.job("local", JOB) is not None, "the job is known")
            if opened:
                app.open_log("local", JOB)
                await driver.until(lambda: isinstance(app.screen, LogsScreen) and bool(app.screen.shown), "it opens")
            yield driver
    finally:
        link.close()


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %6d\n" % number for number in range(first, last))


async def test_a_job_is_chosen_from_the_list_and_its_log_is_followed(job: Folder) -> None:
    job.write(lines(0, 100))
    async with console(opened=False) as driver:
        chooser = driver.app.screen.query_one(JobChooser)
        await driver.until(lambda: ("local", JOB) in chooser.rows, "the job is listed")
        await driver.pilot.press("enter")
        await driver.shows("line     99")
        assert f"log of a job ({JOB}) on local  * done" in driver.line("header")
        assert driver.line("status").startswith("following  lines ")
        job.write(b"and one more\n")
        await driver.shows("and one more")
        await driver.pilot.press("escape")
        assert driver.app.screen.focused is chooser


async def test_the_two_files_of_a_job_are_one_key_apart(job: Folder) -> None:
    job.write(b"printed\n")
    job.events.write_text('{"t":1,"event":"started"}\n')
    async with console() as driver:
        await driver.shows("printed")
        await driver.pilot.press("e")
        await driver.shows('"event":"started"')
        assert driver.line("header").startswith("events of")
        await driver.pilot.press("e")
        await driver.shows("printed")


async def test_a_long_log_opens_at_its_end_and_loads_the_rest_as_one_scrolls_up(job: Folder) -> None:
    job.write(lines(0, 20_000))
    async with console() as driver:
        await driver.shows("line  19999")
        start = driver.view.text.start
        assert start >= 20_000 * 12 - 65_536
        await driver.pilot.press("up")
        driver.view.scroll_to(y=0, animate=False)
        await driver.until(lambda: driver.view.text.start < start, "older bytes are there")
        texts = [driver.view.text[index].text for index in range(len(driver.view.text))]
        numbers = [int(text.split()[1]) for text in texts[1:]]
        assert numbers == list(range(numbers[0], 20_000))


async def test_g_shows_the_beginning_of_the_file_and_capital_g_its_end_again(job: Folder) -> None:
    job.write(lines(0, 20_000))
    async with console() as driver:
        await driver.shows("line  19999")
        await driver.pilot.press("g")
        await driver.until(lambda: driver.rows[0] == "line      0", "the first line is on top")
        assert "newer not loaded" in driver.line("status")
        await driver.pilot.press("G")
        await driver.shows("line  19999")
        job.write(b"the very last\n")
        await driver.shows("the very last")


async def test_reading_on_from_the_beginning_comes_to_the_end_without_a_line_lost(job: Folder) -> None:
    job.write(lines(0, 12_000))
    async with console(size=(100, 60)) as driver:
        await driver.shows("line  11999")
        await driver.pilot.press("g")
        await driver.until(lambda: driver.rows[0] == "line      0", "the first line is on top")
        while not driver.view.following:
            driver.view.scroll_to(y=driver.view.max_scroll_y, animate=False)
            await driver.pilot.pause(0.02)
        await driver.shows("line  11999")
        texts = [driver.view.text[index].text for index in range(len(driver.view.text))]
        assert texts == [f"line {number:6d}" for number in range(12_000)]


async def test_a_lost_agent_keeps_the_place_and_no_line_is_lost_or_shown_twice(job: Folder) -> None:
    job.write(lines(0, 500))
    async with console() as driver:
        await driver.shows("line    499")
        await driver.pilot.press("pageup")
        before = driver.rows
        node = driver.app.fleet.node("local")
        assert node is not None and node.agent is not None
        first = node.agent.agent_pid
        os.kill(first, signal.SIGKILL)
        job.write(lines(500, 1000))
        await driver.until(lambda: driver.view.stream_end == 12_000, "the rest has come")
        assert driver.rows == before
        texts = [driver.view.text[index].text for index in range(len(driver.view.text))]
        assert texts == [f"line {number:6d}" for number in range(1000)]


async def test_truncation_and_rotation_are_told_in_the_view(job: Folder) -> None:
    job.write(lines(0, 50))
    async with console() as driver:
        await driver.shows("line     49")
        job.log.write_bytes(b"fresh\n")
        await driver.shows("fresh")
        assert any("the file was truncated" in row for row in driver.rows)
        other = job.path / "other"
        other.write_bytes(b"rotated in\n")
        other.replace(job.log)
        await driver.shows("rotated in")
        assert any("another file took this one's place" in row for row in driver.rows)


async def test_a_hole_in_the_log_is_told_with_its_size(job: Folder) -> None:
    async with console() as driver:
        job.write(b"the cause\n")
        await driver.shows("the cause")
        # A file that is written beyond its end has a hole, as a log whose middle was given back to the disk.
        with job.log.open("r+b") as file:
            file.seek(8 * 1024 * 1024)
            file.write(b"the end\n")
        await driver.shows("the end")
        assert any("given back to the disk" in row for row in driver.rows)


async def test_a_file_that_is_not_there_yet_is_waited_for_while_the_job_runs(held: Folder) -> None:
    held.write(b"printed\n")
    async with console() as driver:
        await driver.shows("printed")
        await driver.pilot.press("e")
        held.events.write_text('{"t":1,"event":"started"}\n')
        await driver.shows('"event":"started"')


async def test_search_says_in_the_status_line_what_came_of_it(job: Folder) -> None:
    job.write(lines(0, 500))
    async with console() as driver:
        await driver.shows("line    499")
        await driver.pilot.press("slash", *"123", "enter")
        await driver.shows("line    123")
        assert driver.app.screen.focused is driver.view
        await driver.pilot.press("slash")
        driver.app.screen.query_one(Input).value = "["
        await driver.pilot.press("enter")
        await driver.until(lambda: "not a regular expression" in driver.line("status"), "the fault is told")


async def test_bytes_that_were_drawn_are_acknowledged_so_that_more_than_one_window_comes(job: Folder) -> None:
    async with console() as driver:
        job.write(b"start\n")
        await driver.shows("start")
        for start in range(0, 300_000, 50_000):
            job.write(lines(start, start + 50_000))
        await driver.shows("line 299999")
        assert driver.view.stream_end == 6 + 300_000 * 12
