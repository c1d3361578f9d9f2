"""The commands `read` and `show` through a real local agent: what they print, and how they end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dflash_tui import cli
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.read import Wanted, wanted_lines
from dflash_tui.link import LinkError, LinkOptions, NodeLink, Reply, parse_target, source
from dflash_tui.link.requests import FilePosition

from .conftest import Opener

CODE = "".join(f"line_{number} = {number}\n" for number in range(1, 101))


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "STATE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


def printed(capfdbinary: pytest.CaptureFixture[bytes], *words: str, ends: Exit = Exit.OK) -> bytes:
    assert cli.main(["read", *words]) == ends
    return capfdbinary.readouterr().out


def test_piped_it_prints_the_bytes_of_the_lines_that_were_asked_for(
    code: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    lines = CODE.encode().splitlines(keepends=True)
    assert printed(capfdbinary, f"{code}:50") == b"".join(lines[39:60])
    assert printed(capfdbinary, f"{code}:2", "--context", "1") == b"".join(lines[:3])
    assert printed(capfdbinary, str(code), "--lines", "99-") == b"".join(lines[98:])
    assert printed(capfdbinary, str(code), "--lines", "7") == lines[6]
    assert printed(capfdbinary, str(code)) == printed(capfdbinary, str(code), "--all") == CODE.encode()


def test_for_scripts_it_is_one_document_and_errors_are_told_by_their_codes(
    code: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["read", f"{code}:100", "--json", "--context", "1"]) == Exit.OK
    found = json.loads(capfd.readouterr().out)
    assert found["text"] == "line_99 = 99\nline_100 = 100\n"
    assert (found["file"], found["line"], found["first_line"], found["last_line"]) == (str(code), 100, 99, 100)
    (tmp_path / "model.bin").write_bytes(b"\0\1")
    for words, ends, said in (
        ([f"{code}:101"], Exit.BAD_INPUT, f"{code} has no line 101: it has 100 lines: name one from 1 to 100"),
        ([str(tmp_path)], Exit.FAILED, "is a folder"),
        ([str(tmp_path / "none.py")], Exit.NOT_FOUND, "there is no file"),
        ([str(tmp_path / "model.bin")], Exit.BAD_INPUT, "is no text"),
        (["<frozen importlib._bootstrap>:3"], Exit.NOT_FOUND, "read from no file"),
        (["x.py", "--job", "j-9"], Exit.NOT_FOUND, "no job 'j-9'"),
        ([f"{code}:3", "--all"], Exit.BAD_INPUT, "name different lines"),
    ):
        assert cli.main(["read", *words, "--json"]) == ends
        out, err = capfd.readouterr()
        (line,) = err.splitlines()
        assert said in line and said.split(":")[0] in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("line", "lines", "context", "wanted"),
    [
        (None, "", None, Wanted(1, None)),
        (5, "", None, Wanted(1, 15, 5)),
        (50, "", 0, Wanted(50, 50, 50)),
        (None, "3-9", None, Wanted(3, 9)),
        (None, "-9", None, Wanted(1, 9)),
        (None, "3-", None, Wanted(3, None)),
    ],
)
def test_the_options_say_which_lines(line: int | None, lines: str, context: int | None, wanted: Wanted) -> None:
    assert wanted_lines(line, lines, context, whole=False) == wanted


@pytest.mark.parametrize(
    ("line", "lines", "context"),
    [
        (None, "9-3", None),
        (None, "-", None),
        (None, "x", None),
        (None, "0-3", None),
        (3, "", -1),
        (None, "", 3),
        (1, "2", None),
    ],
)
def test_options_that_say_no_lines_are_refused(line: int | None, lines: str, context: int | None) -> None:
    with pytest.raises(CommandError) as caught:
        wanted_lines(line, lines, context, whole=False)
    assert caught.value.code is Exit.BAD_INPUT and caught.value.remedy


def test_on_a_terminal_it_is_numbered_and_marked_and_nothing_of_the_file_steers_it(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_bytes(b"a = 1\nb = '\x1b]0;title\x07\xc2\x9b2J\xe2\x80\xae'\nc = 3\n")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dflash_tui.cli", "read", f"{odd}:2"]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"}
    ) as process:
        os.close(theirs)
        data = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            data += more
            if not more:
                break
        assert process.wait() == 0
    os.close(ours)
    text = data.decode()
    assert "\x1b[" in text, "it is coloured"
    assert "]0;title" in text and "\x1b]0" not in text
    assert not set(text) & set("\x07\x9b\u202e")
    (marked,) = [row for row in text.splitlines() if "❱" in row]
    assert "2" in marked and "title" in marked


def test_what_crosses_is_what_stands_around_the_line_in_as_many_pieces_as_it_takes(
    tmp_path: Path, open_link: Opener
) -> None:
    path = tmp_path / "large.txt"
    data = b"".join(b"%07d %s\n" % (number, b"x" * 91) for number in range(1, 40_001))
    path.write_bytes(data)
    link, _ = open_link("local")
    link.wait_live(60)
    found = link.source(path=str(path), line=20_000, before=300_000, after=500_000).result(60)
    assert data[found.offset :].startswith(found.data)
    assert found.data.startswith(b"%07d " % found.first_line)
    at = (20_000 - found.first_line) * 100
    assert found.data[at:].startswith(b"0020000 ") and at <= 300_000
    assert len(found.data) == at + 500_000 and found.left_off == found.size - found.end > 0
    whole = link.source(path=str(path)).result(60)
    assert whole.data == data[: source.AROUND] and whole.first_line == 1


def test_over_ssh_it_is_the_one_channel_that_everything_goes_through(
    tmp_path: Path, open_link: Opener, options: LinkOptions
) -> None:
    path = tmp_path / "code.py"
    path.write_text(CODE * 3000)
    link, _ = open_link("node", options)
    link.wait_live(90)
    found = link.source(path=str(path), line=150_000).result(90)
    at = CODE.encode() * 3000
    assert found.data == at[found.offset : found.offset + len(found.data)] and len(found.data) > 2_000_000
    assert found.data.split(b"\n")[150_000 - found.first_line] == b"line_100 = 100"
    with pytest.raises(LinkError, match="has no line 400000: it has 300000 lines"):
        link.source(path=str(path), line=400_000).result(90)


def test_a_hole_of_the_file_is_left_out_and_told(tmp_path: Path, open_link: Opener) -> None:
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.write(b"headers\n" * 1024)  # whole blocks: the rest of one would be zeros that are there
        file.seek(160 * 4096)
        file.write(b"\ntail\n" * 1000)
    link, _ = open_link("local")
    link.wait_live(60)
    found = link.source(path=str(path)).result(60)
    assert found.data.startswith(b"headers\n") and found.data.endswith(b"tail\n")
    assert found.gap_bytes + len(found.data) == found.size == path.stat().st_size
    assert found.gap_bytes > 500_000


def test_a_file_that_becomes_another_while_it_is_read_is_not_mixed_up() -> None:
    def done(value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    header = {"path": "/a", "dev": 1, "ino": 2, "offset": 0, "size": 200_000, "line_offset": 0, "first_line": 1}
    asked = source.ask_source(
        lambda *_, **__: done(Reply(header, b"x" * 65536)),
        lambda *_, offset, length, **__: done((FilePosition(1, 3, offset, 200_000), b"y" * length)),
        job=None,
        file="log",
        path="/a",
        of_job=None,
        line=1,
        before=0,
        after=200_000,
    )
    with pytest.raises(LinkError, match="became another file"):
        asked.result(5)


def test_odd_answers_are_told_or_become_nothing() -> None:
    started = source.started_with(
        {
            "command": {"argv": ["a\x1b[2J", 7, None], "environment": {"A\x07": 3, "B": "b\n"}},
            "servers": [None, 3],
            "versions": [],
        }
    )
    assert started.argv == ("a[2J", "", "") and started.environment == {"A": None, "B": "b\n"}
    assert [server.argv for server in started.servers] == [(), ()] and started.versions == {}
    link = NodeLink(parse_target("local"), lambda fact: None, LinkOptions())
    with pytest.raises(LinkError, match="not connected"):
        link.source(path="/a").result(5)


def test_all_of_a_file_is_printed_past_holes_longer_than_what_one_answer_holds(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"first\n" * 20_000)
        file.seek(1 << 20)
        file.write(b"second\n" * 20_000)
    if path.stat().st_blocks * 512 > path.stat().st_size - (512 << 10):
        pytest.fail("this file system makes no holes")
    assert cli.main(["read", str(path), "--all"]) == Exit.OK
    out, err = capfdbinary.readouterr()
    assert out.startswith(b"first\n" * 20_000) and out.endswith(b"second\n" * 20_000)
    assert b"of the file are a hole, and left out" in err


def test_a_file_that_is_cut_short_while_it_is_read_is_told_and_not_taken_for_whole(
    code: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code.write_text(CODE * 200)
    read = NodeLink.read

    def cut(link: NodeLink, **asked: Any) -> Any:
        code.write_text("")
        return read(link, **asked)

    monkeypatch.setattr(NodeLink, "read", cut)
    assert cli.main(["read", str(code), "--all"]) == Exit.FAILED
    assert "was replaced or cut short while it was read: read it again" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["read", "~no-such-user/x.py:3"], ["diagnose", "~no-such-user/a.log"]])
def test_a_home_that_nobody_has_is_a_file_that_is_not_there(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) in (Exit.NOT_FOUND, Exit.BAD_INPUT)
    (line,) = capfd.readouterr().err.splitlines()
    assert "~no-such-user/" in line
