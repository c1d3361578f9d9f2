"""The console in a real terminal, driven by keys alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Shared
from tests.e2e.harness import JobFolder, Site, Terminal, assert_nothing_half, manifest_rows, poll


def start_by_form(terminal: Terminal, state_dir: Path, model: Path, dataset: Path, output: Path) -> JobFolder:
    """Opens the launch form, fills it in, plans and starts."""
    terminal.keys("n")
    terminal.wait_for("f9 Launch")
    terminal.fill("model", str(model))
    terminal.fill("dataset", str(dataset))
    terminal.fill("output", str(output))
    terminal.focus("dtype")
    terminal.keys("Enter")
    terminal.wait_for("bfloat16 +▲")
    terminal.keys("Down", "Down", "Enter")
    terminal.wait_for("dtype +float32")
    terminal.keys("F5")
    terminal.wait_for("planned: it can be launched")
    before = set(folders(state_dir))
    terminal.keys("F9")
    (started,) = poll("the job's folder", lambda: set(folders(state_dir)) - before)
    return JobFolder(state_dir, started)


def folders(state_dir: Path) -> list[str]:
    jobs = state_dir / "jobs"
    return [folder.name for folder in jobs.iterdir() if (folder / "state.json").is_file()] if jobs.is_dir() else []


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_a_job_is_started_watched_read_and_stopped_by_keys(
    width: int,
    height: int,
    terminal: Callable[..., Terminal],
    site: Site,
    state_dir: Path,
    shared: Shared,
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    console = terminal(width, height, "--host", "local")
    console.wait_for("1/1 nodes live")
    console.keys("j")
    console.wait_for(r"\[2 Jobs\]")
    job = start_by_form(console, state_dir, shared.model, shared.long, output)
    console.wait_for(r"\[2 Jobs\](?s:.*)" + re.escape(job.id))
    first = int(console.wait_for(r" ([1-9]\d?)% ")[1])
    moved = poll("the bar to move", lambda: (now := re.search(r" (\d+)% ", console.screen)) and int(now[1]) > first)
    assert moved
    poll("samples in the manifest", lambda: manifest_rows(output))

    console.keys("l")
    console.wait_for(r"\[3 Logs\]")
    console.wait_for(rf"(?s){job.id}.*progress done=\d+")
    console.wait_for("following")
    console.keys("j")
    console.wait_for(r"\[2 Jobs\]")
    console.keys("x")
    console.wait_for(r"Stop out\s+on\s+local")
    console.keys("y")
    assert job.wait_ended() == "interrupted"
    console.wait_for("interrupted")
    assert job.processes() == {}
    assert_nothing_half(output)
    assert 0 < len(manifest_rows(output)) < shared.long_samples

    console.keys("q")
    poll("the console's end", lambda: console.dead)
    assert console.exit_code == 0


def test_a_console_that_is_too_small_still_lives(terminal: Callable[..., Terminal]) -> None:
    console = terminal(30, 8, "--host", "local")
    console.wait_for("local")
    console.keys("j")
    console.wait_for(r"\[2 J")
    console.keys("q")
    poll("the console's end", lambda: console.dead)
    assert console.exit_code == 0
