"""Bytes of a log become lines that a terminal would show, bounded, and the same however they were cut."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from tqdm import tqdm

from dflash_tui.fleet.logline import PLAIN, Line, Span, Style
from dflash_tui.fleet.logtext import LINE_COST, MOST_UP, LogText

LOGS = sorted((Path(__file__).parent.parent / "data" / "logs").glob("*.log"))

# Everything that a log has been seen to hold, and what somebody might put there on purpose.
NASTY = (
    b"plain\r\n\x1b[31mred\x1b[0m and \x1b[1;38;5;208morange\nstill orange\x1b[m\n"
    b"  0%|          | 0/10\r 50%|#####     | 5/10\r100%|##########| 10/10\ndone\n"
    b"\x1b]0;a title\x07after\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n\x1bP+q\x1b\\\x1b(B\x1b[?25l\x1b[2J\x1b[10;5Hmoved\n"
    b"caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xff\xfe half \xe6\x97\n\tone\ttwo\x08\x08xx\n\x00\x07bell\n\n"
    b"\xe2\x80\xae evil \xc2\x9b31mno\n\x1b]0;never ended\nwriting\x1b[2K\rnew\n"
    b"outer 0\n\rinner 0\x1b[A\router 1\n\rinner 1 \xe6\x97\xa5\x1b[A\x1b[31m\router 2\n\n\x1b[2Flast\x1b[0m\n\nup\x1b[99Atop\n\n\n"
    b"long: " + b"x" * 9000 + b"\n" + b"y" * 9000 + b"\rY\n" + b"the last, open \x1b[3"
)


def lines_of(data: bytes, **options: int) -> list[Line]:
    text = LogText(**options)
    text.feed(data)
    return [text[index] for index in range(len(text))]


def texts(data: bytes) -> list[str]:
    return [line.text for line in lines_of(data)]


def test_lines_know_their_text_and_their_place_in_the_file() -> None:
    assert lines_of(b"one\n\ntwo\nopen") == [Line("one", 0), Line("", 4), Line("two", 5), Line("open", 9)]


def test_a_line_that_is_still_open_can_grow() -> None:
    text = LogText()
    text.feed(b"half")
    assert (len(text), text.finished, text[0].text) == (1, 0, "half")
    text.feed(b" and half\nmore")
    assert (len(text), text.finished, text[0].text, text[1].text) == (2, 1, "half and half", "more")


@pytest.mark.parametrize("seed", range(60))
def test_the_same_bytes_give_the_same_lines_however_they_are_cut(seed: int) -> None:
    whole = lines_of(NASTY)
    chance = random.Random(seed)
    text = LogText()
    position = 0
    while position < len(NASTY):
        step = chance.choice((1, 1, 2, 3, 7, 50, 4000))
        text.feed(NASTY[position : position + step])
        position += step
    assert [text[index] for index in range(len(text))] == whole


def test_no_control_character_and_no_escape_comes_through() -> None:
    forbidden = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
    chance = random.Random(7)
    noise = bytes(chance.choice(b"\x1b[]();0123m?KJH\x07\x9b\xc2\x90\x80\r\n\t\\ab\xe2\xae") for _ in range(50_000))
    for data in (NASTY, noise, chance.randbytes(50_000)):
        for line in lines_of(data):
            assert forbidden.search(line.text) is None, line


def test_a_progress_bar_overwrites_its_line() -> None:
    assert texts(b" 10%|#   |\r 50%|##  |\r100%|####|\nend\n") == ["100%|####|", "end"]


def test_bars_under_one_another_stay_one_line_each() -> None:
    outer = [f"\repochs: {k}" for k in range(3)]
    inner = [f"\n\rsteps: {k}\x1b[A" for k in range(50)]
    data = "before\n" + "".join(bar + "".join(inner) for bar in outer)
    assert texts(data.encode()) == ["before", "epochs: 2", "steps: 49"]
    assert texts((data + "\n\nafter\n").encode()) == ["before", "epochs: 2", "steps: 49", "after"]


def test_real_nested_tqdm_bars_stay_one_line_each() -> None:
    out = io.StringIO()
    for _ in tqdm(range(3), desc="epochs", file=out, mininterval=0, ascii=True):
        for _ in tqdm(range(20), desc="steps", file=out, mininterval=0, ascii=True, leave=False):
            pass
    found = [line for line in texts(out.getvalue().encode()) if line.strip()]
    assert len(found) == 1 and found[0].startswith("epochs: 100%"), found


def test_the_cursor_goes_up_no_further_than_the_window_and_its_bound() -> None:
    assert texts(b"one\n\x1b[99Atwo")[0] == "two"
    data = b"".join(b"%d\n" % number for number in range(200)) + b"\x1b[999Fhere\n"
    assert texts(data)[200 - MOST_UP] == "here"


def test_what_the_cursor_went_up_into_is_told_from_what_was_kept() -> None:
    text = LogText()
    text.feed(b"a\nb\nc\nd")
    text.mark()
    text.feed(b"\x1b[2AB")
    assert (text.kept, text.finished, len(text)) == (1, 1, 4)
    assert [text[index].text for index in range(4)] == ["a", "bB", "c", "d"]


def test_a_shorter_text_after_a_carriage_return_leaves_the_rest_of_the_longer_one_as_a_terminal_does() -> None:
    assert texts(b"abcdef\rXY\n") == ["XYcdef"]
    assert texts(b"abcdef\rXY\x1b[K\n") == ["XY"]
    assert texts(b"abcdef\x1b[2K\rXY\n") == ["XY"]


def test_a_carriage_return_before_a_newline_is_a_newline() -> None:
    assert texts(b"dos\r\nold\r\r\nunix\n") == ["dos", "old", "unix"]


def test_backspaces_tabs_and_cursor_moves_act_within_the_line() -> None:
    assert texts(b"12\x08\x08ab\n\ta\n") == ["ab", "        a"]
    assert texts(b"abc\x1b[2DX\x1b[CY\n\x1b[5Gx\n") == ["aXcY", "    x"]
    assert texts(b"\x1b[99999999999999999999Dok\x1b[Am\n") == ["okm"]


def test_bytes_that_are_not_utf8_are_replaced_one_by_one() -> None:
    assert texts(b"caf\xe9!\n\xe6\x97\nok\n") == ["caf\ufffd!", "\ufffd", "ok"]


@pytest.mark.parametrize(
    ("codes", "style"),
    [
        (b"31", Style(colour=1)),
        (b"91;44", Style(colour=9, background=4)),
        (b"1;3;4", Style(bold=True, italic=True, underline=True)),
        (b"1;22;2", Style(dim=True)),
        (b"7;9", Style(reverse=True, strike=True)),
        (b"38;5;208", Style(colour=208)),
        (b"48;2;1;2;3;1", Style(background=(1, 2, 3), bold=True)),
        (b"38:2::10:20:30", Style(colour=(10, 20, 30))),
        (b"38:2:10:20:30", Style(colour=(10, 20, 30))),
        (b"38:5:9;4:3", Style(colour=9, underline=True)),
        (b"103", Style(background=11)),
        (b"31;39", PLAIN),
        (b"1;;", PLAIN),
        (b"999;38;7;999999", PLAIN),
        (b"4;4:0", PLAIN),
        (b"38;5", Style(colour=0)),
    ],
)
def test_colours_are_kept_as_styles(codes: bytes, style: Style) -> None:
    [line] = lines_of(b"\x1b[" + codes + b"mtext\n")
    assert line.text == "text"
    assert line.spans == (() if style == PLAIN else (Span(0, 4, style),))


def test_a_colour_goes_on_over_a_newline_until_it_is_taken_back() -> None:
    first, second, third = lines_of(b"a\x1b[32mb\nc\x1b[0md\ne\n")
    assert first.spans == (Span(1, 2, Style(colour=2)),)
    assert second.spans == (Span(0, 1, Style(colour=2)),)
    assert third.spans == ()


def test_a_title_that_never_ends_swallows_no_later_line() -> None:
    assert texts(b"\x1b]0;title\nnext\n") == ["0;title", "next"]
    assert texts(b"\x1b]0;" + b"t" * 5000 + b"\x07x\nnext\n")[1] == "next"


def test_a_very_long_line_is_cut_and_says_by_how_much() -> None:
    [line] = lines_of(b"x" * 25 + b"\n", line_limit=10)
    assert (line.text, line.cut) == ("x" * 10, 15)
    [line] = lines_of(b"x" * 25 + b"\ry", line_limit=10)
    assert (line.text, line.cut) == ("y" + "x" * 9, 15)


def test_a_line_without_end_takes_no_more_memory_than_a_line() -> None:
    text = LogText(line_limit=100)
    for _ in range(200):
        text.feed(b"z" * 10_000)
    assert (len(text[0].text), text[0].cut, text.end) == (100, 1_999_900, 2_000_000)


def test_the_window_drops_its_oldest_lines_and_knows_where_it_starts() -> None:
    text = LogText(limit=100 * (LINE_COST + 10))
    data = b"".join(b"line %5d\n" % number for number in range(5000))
    lost = 0
    for position in range(0, len(data), 1000):
        lost -= text.feed(data[position : position + 1000]).top
    assert 100 <= len(text) <= 115
    assert lost == 5000 - len(text)
    assert data[text.start :].startswith(text[0].text.encode() + b"\n")
    assert text[len(text) - 1].text == "line  4999"


def test_empty_lines_are_bounded_too() -> None:
    text = LogText(limit=100_000)
    text.feed(b"\n" * 1_000_000)
    assert len(text) <= 100_000 // LINE_COST + 1


def test_older_bytes_come_before_and_mend_a_line_that_had_been_cut() -> None:
    data = b"".join(b"line %d\n" % number for number in range(100))
    text = LogText()
    text.feed(data[503:], 503)
    assert text[0].text != text[1].text[:6]
    while text.start:
        end = text.older_end
        start = max(0, end - 64)
        text.prepend(data[start:end], start)
    assert [text[index].text for index in range(len(text))] == [f"line {number}" for number in range(100)]
    assert [text[index].offset for index in range(3)] == [0, 7, 14]


def test_older_bytes_that_do_not_fit_are_refused() -> None:
    text = LogText()
    text.feed(b"abc\n", 100)
    with pytest.raises(ValueError, match="do not end at 100"):
        text.prepend(b"abc\n", 10)


def test_a_full_window_that_grows_at_the_top_loses_lines_at_the_bottom_and_can_go_on_there() -> None:
    data = b"".join(b"line %5d\n" % number for number in range(1000))
    text = LogText(limit=100 * (LINE_COST + 10))
    text.feed(data[-500:] + b"open", len(data) - 500)
    cut = False
    while text.start:
        end = text.older_end
        start = max(0, end - 700)
        cut |= text.prepend(data[start:end], start).bottom_cut
    assert cut
    assert text[0].text == "line     0"
    assert len(text) <= 115
    before = text.end
    text.feed(data[before : before + 22])
    assert text[len(text) - 1].text == data[before + 11 : before + 21].decode()


def test_a_gap_is_a_line_with_its_size_and_the_offsets_go_on_behind_it() -> None:
    text = LogText()
    text.feed(b"one\nhalf")
    text.gap(3 * 1024 * 1024)
    text.feed(b"two\n")
    assert [text[index].text for index in range(4)] == ["one", "half", "… 3.0 MiB given back to the disk …", "two"]
    assert text[2].kind == "gap"
    assert text[3].offset == 8 + 3 * 1024 * 1024


def test_bytes_that_arrive_twice_are_taken_once_and_missing_ones_are_told() -> None:
    text = LogText()
    text.feed(b"one\ntwo\n")
    text.feed(b"two\nthree\n", 4)
    text.feed(b"old\n", 0)
    text.feed(b"five\n", 1014)
    assert [text[index].text for index in range(len(text))] == [
        "one", "two", "three", "… 1000 B not shown …", "five",
    ]  # fmt: skip


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_a_real_log_comes_out_line_by_line_as_it_is(path: Path) -> None:
    data = path.read_bytes()
    expected = data.decode().removesuffix("\n").split("\n")
    lines = lines_of(data)
    assert [line.text for line in lines] == [line.expandtabs(8) for line in expected]
    assert all(data[line.offset :].startswith(line.text[:20].encode()) for line in lines if "\t" not in line.text)


def test_there_are_real_logs() -> None:
    assert len(LOGS) >= 2
