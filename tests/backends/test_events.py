"""Events on a disk that takes no more: no two lines in one, and the last one is written or its absence told."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.errors import JobError
from backends.events import EventLog


@contextmanager
def full_disk() -> Iterator[None]:
    """A file may have 200 bytes; a limit on the size stands for the full disk: the same half writes, the same error.

    Within a test alone: what pytest itself prints may go to a file too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def lines(path: Path) -> list[object]:
    found: list[object] = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["event"])
        except ValueError:
            found.append(None)
    return found


def test_a_progress_that_cannot_be_written_does_not_end_the_work_and_spoils_no_later_event(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    with full_disk():
        for _ in range(5):
            events.emit("progress", phase="x" * 60)
    assert path.stat().st_size == 200
    events.emit("finished", done=1)
    events.close()
    assert lines(path) == ["progress", None, "finished"]


def test_a_last_event_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    said = r"the last event \(finished\) cannot be written to .*events\.jsonl: .*too large"
    with full_disk(), pytest.raises(JobError, match=said):
        events.emit("progress", phase="x" * 60)
        events.emit("finished", message="y" * 200)
    events.close()


def test_half_a_line_of_a_killed_writer_is_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":1.0,"event":"progr')
    for _ in range(2):
        events = EventLog(path)
        events.emit("started")
        events.close()
    assert lines(path) == [None, "started", "started"]


def test_versions_are_told_once_with_started_and_those_of_a_server_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, versions={"python": "3.12.3", "torch": None})
    events.emit("phase", phase="checking")
    events.emit("started", verb="extract", versions={"vllm": "0.26.0"})
    events.emit("finished", done=1)
    events.close()
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("versions") for line in told] == [
        None,
        {"python": "3.12.3", "torch": None, "vllm": "0.26.0"},
        None,
    ]
