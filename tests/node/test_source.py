"""The operation `source`, through a real agent: a text file at one of its lines, and every file that is none."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import protocol, sourcefile
from dflash_tui.node.protocol import Refused
from tests.node.client import Client, Refusal

NUMBERED = b"".join(b"line %d\n" % number for number in range(1, 50_001))


def ask(agent: Client, **fields: Any) -> tuple[dict[str, Any], bytes]:
    frame = agent.answer(agent.send("source", **fields))
    return frame.header, frame.payload


def refused(agent: Client, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(agent, **fields)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    path = tmp_path / "numbered.py"
    path.write_bytes(NUMBERED)
    return path


@pytest.mark.parametrize("line", [1, 2, 777, 49_999, 50_000])
def test_the_bytes_begin_with_the_line_that_was_asked_for(agent: Client, numbered: Path, line: int) -> None:
    found, data = ask(agent, path=str(numbered), line=line)
    assert data.split(b"\n")[0] == b"line %d" % line
    assert (found["line"], found["first_line"], found["offset"]) == (line, line, found["line_offset"])
    assert NUMBERED[found["offset"] :].startswith(data)
    assert (found["size"], found["path"]) == (len(NUMBERED), str(numbered))
    assert len(data) == min(protocol.MAX_PAYLOAD, len(NUMBERED) - found["offset"])


def test_what_stands_before_it_begins_at_a_whole_line_whose_number_is_told(agent: Client, numbered: Path) -> None:
    found, data = ask(agent, path=str(numbered), line=30_000, before=1000)
    first = data.split(b"\n")[0]
    assert first == b"line %d" % found["first_line"]
    assert 30_000 - 1000 // 10 <= found["first_line"] < 30_000
    assert data[found["line_offset"] - found["offset"] :].startswith(b"line 30000\n")
    found, data = ask(agent, path=str(numbered), line=3, before=1 << 20)
    assert (found["first_line"], found["offset"]) == (1, 0) and data.startswith(b"line 1\nline 2\nline 3\n")


def test_a_line_without_a_newline_at_the_end_of_the_file_is_one_too(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\nthree")
    assert ask(agent, path=str(path), line=3)[1] == b"three"
    assert ask(agent, path=str(path), line=2)[1] == b"\nthree"
    path.write_bytes(b"")
    assert ask(agent, path=str(path))[1] == b""


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (b"one\ntwo\n", 3, "has no line 3: it has 2 lines: name one from 1 to 2"),
        (b"one\ntwo", 9, "has no line 9: it has 2 lines"),
        (b"one", 2, "it has 1 line: name"),
    ],
)
def test_a_line_beyond_the_end_is_refused_with_how_many_there_are(
    agent: Client, tmp_path: Path, text: bytes, line: int, words: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text)
    error = refused(agent, path=str(path), line=line)
    assert words in str(error) and str(path) in error.message and error.code == protocol.BAD_REQUEST


def test_what_is_no_readable_text_file_is_refused_by_its_kind(agent: Client, tmp_path: Path) -> None:
    binary, pipe, link, name = (tmp_path / part for part in ("model.bin", "pipe", "loop", "socket"))
    binary.write_bytes(b"text at first" + b"\0\1\2")
    os.mkfifo(pipe)
    link.symlink_to(link)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(name))
        for path, words in (
            (binary, "is no text: byte 13 of it is 0"),
            (tmp_path, "is a folder"),
            (pipe, "is a pipe"),
            (name, "is a socket"),
            (Path("/dev/zero"), "is a device"),
            (tmp_path / "none.py", "there is no file"),
            (binary / "below.py", "there is no file"),
            (link, "symbolic links"),
        ):
            error = refused(agent, path=str(path))
            assert words in error.message and str(path) in error.message and error.remedy


def test_a_file_that_only_others_may_read_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def denied(path: str, flags: int, *_: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    path = tmp_path / "secret.py"
    path.write_text("x = 1\n")
    # Root may read everything, and the tests may run as root.
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(Refused, match="Permission denied") as caught:
        sourcefile.locate(str(path), 1, 0)
    assert str(path) in caught.value.message and "rights" in caught.value.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {"line": 0},
        {"line": -3},
        {"line": "7"},
        {"before": -1},
        {"before": 1 << 30},
        {"path": ""},
        {"path": "a\0b"},
        {"path": None},
        {"job": "../etc", "path": None},
        {"job": "j-1", "file": "nothing", "path": None},
        {"of_job": "../etc", "path": "x.py"},
    ],
)
def test_a_request_that_cannot_be_is_refused_and_the_agent_goes_on(
    agent: Client, numbered: Path, fields: dict[str, Any]
) -> None:
    assert refused(agent, **{"path": str(numbered), **fields}).code in (protocol.BAD_REQUEST, protocol.NOT_FOUND)
    assert agent.ask("ping")["time"]


def test_a_line_far_down_in_ten_gigabytes_is_found_without_its_hole_being_read(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "huge.log"
    with path.open("wb") as file:
        file.write(NUMBERED)
        file.seek(10 * 1000**3)
        file.write(b"\nafter the hole\nthe last")
    found, data = ask(agent, path=str(path), line=50_002, before=1 << 20)
    at = found["line_offset"] - found["offset"] - found["gap"]
    assert data[at:] == b"after the hole\nthe last"
    assert found["line_offset"] == 10 * 1000**3 + 1 and found["size"] == 10 * 1000**3 + 24


def test_counting_ends_at_its_limit_and_says_how_far_it_came(numbered: Path) -> None:
    numbered.write_bytes(NUMBERED * 10)
    with pytest.raises(Refused, match=r"line 450000 of .* was not reached within .*: line \d+ is at byte") as caught:
        sourcefile.locate(str(numbered), 450_000, 0, limit_s=-1.0)
    assert caught.value.code == protocol.TIMED_OUT


def test_a_file_of_proc_that_says_it_is_empty_is_read_all_the_same(agent: Client) -> None:
    found, data = ask(agent, path="/proc/self/status", line=2)
    assert data.startswith(b"Umask:") and found["size"] >= len(data) > 100


def test_a_relative_path_of_a_traceback_is_looked_for_where_the_job_was_started_and_in_its_folder(
    connect: Callable[..., Client], bundle: Path, state: Path
) -> None:
    agent = connect()
    agent.launch("j-1", {"do": [["event", "finished", {}]]})
    agent.wait("j-1", "done")
    cwd = json.loads((state / "jobs" / "j-1" / "launch.json").read_text())["cwd"]
    (Path(cwd) / "train.py").write_text("a\nb\n")
    (state / "jobs" / "j-1" / "mine.py").write_text("c\n")
    found, data = ask(agent, path="./train.py", of_job="j-1", line=2)
    assert (data, found["path"]) == (b"b\n", str(Path(cwd) / "train.py"))
    assert ask(agent, path="mine.py", of_job="j-1")[1] == b"c\n"
    error = refused(agent, path="gone/x.py", of_job="j-1")
    assert cwd in error.message and str(state / "jobs" / "j-1") in error.message and "whole path" in error.remedy
    for name in ("<string>", "<frozen importlib._bootstrap>"):
        assert "read from no file" in refused(agent, path=name, of_job="j-1").message
    assert "no job j-9" in refused(agent, job="j-9", file="log").message


def test_the_files_of_a_job_are_read_by_line_too(agent: Client) -> None:
    agent.launch("j-1", {"do": [["print", "first"], ["print", "second"], ["event", "finished", {}]]})
    agent.wait("j-1", "done")
    assert ask(agent, job="j-1", file="log", line=2)[1] == b"second\n"


def test_the_whole_file_can_be_read_on_from_what_is_told(agent: Client, numbered: Path) -> None:
    found, data = ask(agent, path=str(numbered), line=10, before=1 << 20)
    while found["offset"] + len(data) < found["size"]:
        more = agent.answer(agent.send("read", path=found["path"], offset=found["offset"] + len(data)))
        data += more.payload
    assert data == NUMBERED
