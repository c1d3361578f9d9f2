"""Following and reading files: no byte lost, none twice, and holes, truncation and rotation told of."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import linux, tails
from tests.node.client import LIMIT_S, Client, Refusal, until


class Follower:
    """Takes the pushes of one tail, gives credit in small change, and checks that offsets join."""

    def __init__(self, agent: Client, credit: int = 4096, change: int | None = None, **fields: Any) -> None:
        self.agent = agent
        self.data = bytearray()
        self.gaps: list[int] = []
        self.resets: list[str] = []
        self.errors: list[str] = []
        self.owed = credit
        self.change = credit if change is None else change
        self.number = agent.send("tail", credit=credit, **fields)
        self.start = agent.answer(self.number).header
        self.offset = self.start["offset"]
        self.file = (self.start["dev"], self.start["ino"])

    def take(self) -> bool:
        """Handles what came; always False, to be waited with."""
        self.agent.receive(0.01)
        rest = []
        for frame in self.agent.pushes:
            if frame.header["ev"] == "tail" and frame.header["tail"] == self.number:
                self._one(frame.header, frame.payload)
            else:
                rest.append(frame)
        self.agent.pushes = rest
        return False

    def _one(self, header: dict[str, Any], payload: bytes) -> None:
        if "error" in header:
            self.errors.append(header["error"])
            return
        if "reset" in header:
            self.resets.append(header["reset"])
            self.offset = header["offset"]
            self.file = (header["dev"], header["ino"])
        if "gap" in header:
            self.gaps.append(header["gap"])
            self.offset += header["gap"]
        assert header["offset"] == self.offset
        assert len(payload) <= self.owed, "more came than there was credit for"
        self.owed -= len(payload)
        self.offset += len(payload)
        self.data += payload
        if payload:
            self.agent.send("credit", tail=self.number, bytes=self.change)
            self.owed += self.change

    def until(self, good: Callable[[], Any], what: str) -> None:
        until(lambda: self.take() or good(), what)


def test_what_a_tail_brings_of_a_growing_file_has_the_files_sha256(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(b"")
    size = 3 << 20

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while file.tell() < size:
                file.write(os.urandom(7919))

    writer = threading.Thread(target=grow)
    follower = Follower(agent, path=str(path), offset=0, credit=30_000, change=30_000)
    writer.start()
    try:
        follower.until(lambda: not writer.is_alive() and len(follower.data) == path.stat().st_size, "all of it")
    finally:
        writer.join()
    assert hashlib.sha256(follower.data).hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_without_credit_nothing_comes_and_beats_go_on(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 400)
    follower = Follower(agent, path=str(path), offset=0, credit=1000, change=0)
    follower.until(lambda: len(follower.data) == 1000, "the first thousand")
    for _ in range(2):
        agent.push("beat")
    follower.take()
    assert len(follower.data) == 1000
    agent.send("credit", tail=follower.number, bytes=500)
    follower.owed += 500
    follower.until(lambda: len(follower.data) == 1500, "five hundred more")
    assert bytes(follower.data) == path.read_bytes()[:1500]


def test_a_tail_goes_on_at_device_inode_and_offset_after_the_agent_died(
    connect: Callable[..., Client], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    first = connect()
    follower = Follower(first, path=str(path), offset=0, credit=100_000, change=0)
    follower.until(lambda: len(follower.data) == 100_000, "a part")
    first.process.kill()
    with path.open("ab") as file:
        file.write(os.urandom(50_000))
    dev, ino = follower.file
    again = Follower(connect(), path=str(path), offset=follower.offset, dev=dev, ino=ino, credit=50_000)
    again.until(lambda: len(again.data) == 250_000, "the rest")
    assert not again.resets
    assert bytes(follower.data + again.data) == path.read_bytes()


def test_a_negative_offset_counts_from_the_end(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    follower = Follower(agent, path=str(path), offset=-4)
    follower.until(lambda: bytes(follower.data) == b"6789", "the end")
    assert Follower(agent, path=str(path), offset=-400).start["offset"] == 0


def test_a_file_that_shrank_is_told_of_as_truncated(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a long first text\n")
    follower = Follower(agent, path=str(path), offset=0)
    follower.until(lambda: len(follower.data) == 18, "the first text")
    os.truncate(path, 0)
    follower.until(lambda: follower.resets == ["truncated"], "the truncation")
    with path.open("ab") as file:
        file.write(b"new\n")
    follower.until(lambda: follower.data.endswith(b"new\n"), "the new text")
    assert bytes(follower.data) == b"a long first text\nnew\n"


def test_a_rotated_file_is_read_to_its_end_before_the_new_one(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old\n")
    with path.open("ab", buffering=0) as old:
        follower = Follower(agent, path=str(path), offset=0)
        follower.until(lambda: bytes(follower.data) == b"old\n", "the old text")
        path.rename(tmp_path / "file.1")
        old.write(b"late\n")
        follower.until(lambda: follower.data.endswith(b"late\n"), "what came after the renaming")
    path.write_bytes(b"new\n")
    follower.until(lambda: follower.data.endswith(b"new\n"), "the new text")
    assert bytes(follower.data) == b"old\nlate\nnew\n"
    assert follower.resets == ["rotated"]
    assert follower.file == (path.stat().st_dev, path.stat().st_ino)


def test_a_position_in_another_file_or_past_the_end_is_told_of_at_once(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"new text\n")
    found = path.stat()
    other = Follower(agent, path=str(path), offset=5, dev=found.st_dev, ino=found.st_ino + 1)
    other.until(lambda: bytes(other.data) == b"new text\n", "the whole file")
    assert other.resets == ["rotated"]
    beyond = Follower(agent, path=str(path), offset=500, dev=found.st_dev, ino=found.st_ino)
    beyond.until(lambda: bytes(beyond.data) == b"new text\n", "the whole file")
    assert beyond.resets == ["truncated"]


def test_a_hole_is_told_of_as_a_gap_and_never_sent_as_zeros(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("r+b") as file:
        linux.punch_hole(file.fileno(), 65536, 500_000 // 4096 * 4096)
    follower = Follower(agent, path=str(path), offset=0, credit=50_000)
    hole = 500_000 // 4096 * 4096
    follower.until(lambda: follower.offset == 1 << 20, "all of it")
    text = path.read_bytes()
    assert follower.gaps == [hole]
    assert bytes(follower.data) == text[:65536] + text[65536 + hole :]


def test_a_hole_that_is_punched_into_what_is_just_being_read_is_not_sent_as_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 400_000)
    pread = os.pread

    def punched_meanwhile(fd: int, length: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", pread)
        with path.open("r+b") as file:
            linux.punch_hole(file.fileno(), 65536, 131072)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", punched_meanwhile)
    tail = tails.Tail(1, str(path), 50_000, 1 << 20)
    pushed: list[tuple[int, bytes]] = []
    tail.pump(lambda header, data: pushed.append((header.get("gap", 0), data)), lambda: True)
    tail.close()
    assert sum(gap for gap, _ in pushed) == 131072
    assert b"".join(data for _, data in pushed) == b"x" * (400_000 - 50_000 - 131072)


def test_a_busy_log_keeps_its_head_and_its_end_and_stays_within_its_limit(agent: Client, state: Path) -> None:
    limit = 1 << 20
    agent.launch("j-1", {"do": [["write", 12, 0.01], ["event", "finished", {}]]}, log_limit_bytes=limit)
    agent.wait("j-1", "done")
    log = state / "jobs" / "j-1" / "log"
    found = log.stat()
    assert found.st_size == 12 * 16 * 65536
    assert found.st_blocks * 512 <= 2 * limit, "the middle was not given back"
    follower = Follower(agent, job="j-1", file="log", offset=0, credit=1 << 20)
    follower.until(lambda: follower.offset == found.st_size, "all of it")
    assert sum(follower.gaps) + len(follower.data) == found.st_size
    assert b"\0" not in follower.data
    assert follower.data.startswith(b"00000000 xxx")
    assert b"\n00000191 xxx" in follower.data


def test_a_file_of_a_job_that_is_not_there_yet_is_waited_for(agent: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    agent.launch("j-1", {"do": [["wait_for", str(go)], ["event", "finished", {}]]})
    follower = Follower(agent, job="j-1", file="events", offset=-65536)
    assert (follower.start["ino"], follower.start["size"]) == (0, 0)
    go.touch()
    follower.until(lambda: b"finished" in follower.data, "the event")
    assert not follower.resets


def test_a_position_in_a_file_that_is_away_holds_for_that_file_alone(
    agent: Client, state: Path, tmp_path: Path
) -> None:
    agent.launch("j-1", {"do": [["event", "finished", {}]]})
    agent.wait("j-1", "done")
    path = state / "jobs" / "j-1" / "events.jsonl"
    path.write_bytes(b"0123456789")
    found = path.stat()
    path.rename(tmp_path / "away")
    place = {"job": "j-1", "file": "events", "offset": 4, "dev": found.st_dev, "ino": found.st_ino}
    same, other = Follower(agent, **place), Follower(agent, **{**place, "ino": found.st_ino + 1})
    same.offset = 4
    (tmp_path / "away").rename(path)
    same.until(lambda: bytes(same.data) == b"456789", "the rest of the same file")
    other.until(lambda: bytes(other.data) == b"0123456789", "the whole of another")
    assert (same.resets, other.resets) == ([], ["rotated"])


def test_nothing_comes_after_untail(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    follower = Follower(agent, path=str(path), offset=0)
    follower.until(lambda: bytes(follower.data) == b"one\n", "the first line")
    agent.ask("untail", tail=follower.number)
    with path.open("ab") as file:
        file.write(b"two\n")
    for _ in range(2):
        agent.push("beat")
    follower.take()
    assert bytes(follower.data) == b"one\n"


def test_read_gives_the_bytes_and_the_position(agent: Client, state: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    frame = agent.answer(agent.send("read", path=str(path), offset=2, length=3))
    assert frame.payload == b"234"
    found = path.stat()
    position = {name: frame.header[name] for name in ("dev", "ino", "offset", "size")}
    assert position == {"dev": found.st_dev, "ino": found.st_ino, "offset": 2, "size": 10}
    agent.launch("j-1", {"do": [["event", "finished", {}]]})
    agent.wait("j-1", "done")
    spec = agent.answer(agent.send("read", job="j-1", file="spec"))
    assert spec.payload == (state / "jobs" / "j-1" / "spec.json").read_bytes()


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"path": "/nowhere/file"}, "not-found", "/nowhere/file"),
        ({"path": "/tmp"}, "io-error", "/tmp is a folder, not a regular file"),
        ({"path": "/dev/zero"}, "io-error", "/dev/zero is a device, not a regular file"),
        ({}, "bad-request", "must name a job or a path"),
        ({"path": "/etc/hostname", "offset": "x"}, "bad-request", "offset must be a whole number, not 'x'"),
    ],
)
@pytest.mark.parametrize("op", ["tail", "read"])
def test_a_file_that_cannot_be_read_is_refused_by_name(
    agent: Client, op: str, fields: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(Refusal) as refused:
        agent.ask(op, **fields)
    assert refused.value.code == code
    assert words in refused.value.message


def test_a_job_has_no_other_files_than_its_own(agent: Client) -> None:
    agent.launch("j-1", {"do": [["event", "finished", {}]]})
    with pytest.raises(Refusal) as refused:
        agent.ask("read", job="j-1", file="../../secret")
    assert refused.value.code == "bad-request"
    assert "'../../secret'" in refused.value.message


@pytest.fixture
def hanging(bundle: Path, tmp_path: Path) -> Path:
    """Opening this one hangs, as on a mount whose server is gone: a FIFO without a writer that is opened to wait for one."""
    path = tmp_path / "hangs"
    os.mkfifo(path)
    with (bundle / "dflash_tui" / "node" / "tails.py").open("a") as file:
        file.write(
            "\n_really = open_regular\n"
            "def open_regular(path):\n"
            "    return os.open(path, os.O_RDONLY) if path.endswith('/hangs') else _really(path)\n"
        )
    with (bundle / "dflash_tui" / "node" / "readers.py").open("a") as file:
        file.write("\nSILENT_S = 3.0\nMOST_SILENT = 3\n")
    return path


def test_a_file_that_hangs_holds_up_nothing_and_is_refused_by_name(
    hanging: Path, connect: Callable[..., Client], tmp_path: Path
) -> None:
    agent = connect()
    asked = [agent.send("tail", path=str(hanging)), agent.send("read", path=str(hanging))]
    good = tmp_path / "good"
    good.write_bytes(b"text\n")
    assert agent.answer(agent.send("read", path=str(good))).payload == b"text\n"
    follower = Follower(agent, path=str(good), offset=0)
    follower.until(lambda: bytes(follower.data) == b"text\n", "another file")
    agent.push("beat")
    for number in asked:
        with pytest.raises(Refusal, match=r"hangs does not answer within 3 s: does its mount hang\?") as refused:
            agent.answer(number)
        assert refused.value.code == "timed-out"


def test_no_more_threads_are_started_for_files_while_too_many_hang(
    hanging: Path, connect: Callable[..., Client]
) -> None:
    agent = connect()
    for _ in range(3):
        agent.send("read", path=str(hanging))
    with pytest.raises(Refusal, match="3 files of this node do not answer"):
        agent.ask("read", path="/etc/hostname")
    # One that comes back makes room: its writer is there.
    writer = os.open(hanging, os.O_RDWR)
    try:
        until(lambda: _reads(agent, "/etc/hostname"), "a file to be read again")
    finally:
        os.close(writer)


def _reads(agent: Client, path: str) -> bool:
    try:
        agent.ask("read", path=path)
    except Refusal as refused:
        assert refused.code == "timed-out"
        return False
    return True


def test_an_agent_ends_with_its_console_though_a_file_hangs(hanging: Path, connect: Callable[..., Client]) -> None:
    agent = connect()
    agent.send("tail", path=str(hanging))
    agent.send("read", path=str(hanging))
    agent.ask("ping")
    assert agent.process.stdin
    agent.process.stdin.close()
    assert agent.process.wait(LIMIT_S) == 0


def test_read_skips_a_hole_says_so_and_never_gives_its_zeros(agent: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    text, hole = path.read_bytes(), 131_072
    with path.open("r+b") as file:
        linux.punch_hole(file.fileno(), 65536, hole)
    got, gaps, offset = bytearray(), [], 0
    while offset < len(text):
        frame = agent.answer(agent.send("read", path=str(path), offset=offset, length=50_000))
        head = frame.header
        assert head["offset"] - head["gap"] == offset
        assert head["gap"] + len(frame.payload) <= 50_000
        got += frame.payload
        gaps.append(head["gap"])
        offset = head["offset"] + len(frame.payload)
    assert sum(gaps) == hole
    assert bytes(got) == text[:65536] + text[65536 + hole :]
    end = agent.answer(agent.send("read", path=str(path), offset=len(text) + 5, length=10))
    assert (end.header["offset"], end.header["gap"], end.payload) == (len(text) + 5, 0, b"")
