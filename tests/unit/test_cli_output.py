"""What commands print: nothing that a node wrote steers a terminal, and figures carry their units."""

from __future__ import annotations

import io
import json
import sys
from types import MappingProxyType

import pytest

from dflash_tui.commands.output import TerminalCleaner, amount, clean, duration, number, print_json, to_json
from dflash_tui.fleet.facts import Job, JobState, Progress

NASTY = (
    b"plain \x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1bP1;2qsixel\x1b\\"
    b"\x1b(B\x1b7\x1bc bell\x07 back\x08space del\x7f \xc2\x9b31mc1 \xe2\x80\xae rtl \xff bad tab\tend\r\nnext \xc3\xa4\n"
)
CLEAN = "plain red link  bell backspace del 31mc1  rtl \ufffd bad tab\tend\r\nnext \xe4\n"


def test_escape_sequences_and_control_characters_of_a_log_do_not_reach_the_terminal() -> None:
    assert TerminalCleaner().feed(NASTY, final=True) == CLEAN


def test_it_does_not_matter_where_the_bytes_are_cut() -> None:
    for cut in range(len(NASTY)):
        cleaner = TerminalCleaner()
        assert cleaner.feed(NASTY[:cut]) + cleaner.feed(NASTY[cut:]) + cleaner.feed(b"", final=True) == CLEAN, cut
    cleaner = TerminalCleaner()
    assert "".join(cleaner.feed(bytes([byte])) for byte in NASTY) + cleaner.feed(b"", final=True) == CLEAN


def test_a_sequence_that_never_ends_holds_nothing_back_for_ever() -> None:
    cleaner = TerminalCleaner()
    shown = cleaner.feed(b"\x1b]0;" + b"x" * 10_000)
    assert shown.endswith("x" * 1000)
    assert "\x1b" not in shown


def test_text_of_a_node_in_a_line_stays_one_line() -> None:
    assert clean("a\nb\r\x1b[2Jc\x00  d") == "a b c d"


def test_facts_become_json(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(
        "j", "n", "extract", JobState.RUNNING, 1.0, progress=Progress(done=3), result=MappingProxyType({"ids": (1, 2)})
    )
    print_json({"job": job})
    shown = json.loads(capsys.readouterr().out)["job"]
    assert shown["state"] == "running"
    assert shown["progress"]["done"] == 3
    assert shown["result"] == {"ids": [1, 2]}
    assert to_json(None) is None


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (amount(None), "n/a"),
        (amount(0), "0 B"),
        (amount(1536), "1.5 KiB"),
        (amount(40 * 2**40), "40.0 TiB"),
        (amount(2**51), "2.0 PiB"),
        (number(None, "W"), "n/a"),
        (number(30_800.4, "tokens/s"), "30,800 tokens/s"),
        (number(35.21, "samples/s", 1), "35.2 samples/s"),
        (duration(None), "n/a"),
        (duration(8.2), "8 s"),
        (duration(125), "2:05"),
        (duration(11229), "3:07:09"),
    ],
)
def test_figures_carry_their_units_and_what_is_not_known_is_not_0(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_json_document_holds_nothing_that_steers_a_terminal_and_says_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = {"text": "a\x9b31m\u202eb\x1b[2J\x7f\u2066 \ud83d é 日本", "lines": ["one\ntwo\r\x85"]}
    print_json(document)
    printed = capsys.readouterr().out
    assert not [char for char in printed if not char.isprintable() and char != "\n"]
    assert "é 日本" in printed, "what a person may read stays readable"
    assert json.loads(printed) == document


def test_a_json_document_fits_into_a_stdout_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    print_json({"name": "日本 \udc80"})
    assert json.loads(stdout.buffer.getvalue()) == {"name": "日本 \udc80"}


def test_half_a_surrogate_pair_is_not_in_a_line_for_a_person() -> None:
    assert clean("a\ud83db") == "ab"
