"""Which sessions are ended as a server's: a number that was told once may be another's by now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from extraction_jobs import until

from backends.errors import JobError
from backends.vllm.serving import _start_limit_s
from backends.vllm.session import end_session, members, sessions_in

Start = Callable[..., int]
# A first process that leaves another one in its session, and ends when it is told to.
PARENT = "import os, signal, sys\nif os.fork() == 0: signal.pause()\nprint(flush=True); sys.stdin.read()"


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(folder: Path, *words: str, ends: bool = False) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *words], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        if ends:
            process.stdin.close()
            process.wait()
        return process.pid

    yield run
    for process in started:
        end_session(process.pid, grace_s=0.0)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / ".vllm" / "0" / "empty"
    folder.mkdir(parents=True)
    return folder


def test_a_session_with_the_number_of_a_server_that_ended_is_another_ones(
    start: Start, empty: Path, tmp_path: Path
) -> None:
    other = start(tmp_path)
    assert sessions_in(empty, other) == set()


def test_a_server_whose_first_process_is_gone_is_found_by_those_that_are_left(start: Start, empty: Path) -> None:
    server = start(empty, ends=True)
    assert members(server), "one is left"
    assert sessions_in(empty, server) == {server}
    assert end_session(server, grace_s=0.1)
    until(lambda: sessions_in(empty, server) == set(), "the end")


def test_a_server_that_nobody_told_of_is_found_and_a_shell_beside_it_is_not(start: Start, empty: Path) -> None:
    server, _shell = start(empty, str(empty.parent / "states")), start(empty)
    assert sessions_in(empty) == {server}
    empty.rmdir()
    assert sessions_in(empty) == {server}, "the folder may be swept already"


@pytest.mark.parametrize("text", ["nan", "abc", "inf", "0", "-3"])
def test_a_limit_of_the_start_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DFLASH_TUI_VLLM_START_S", text)
    with pytest.raises(JobError, match=f"DFLASH_TUI_VLLM_START_S is '{text}'"):
        _start_limit_s()
