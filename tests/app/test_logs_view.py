"""The log viewer follows without taking the reader's place, and costs what is on the screen, not what is in the log."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.events import MouseScrollUp
from textual.pilot import Pilot

from dflash_tui.fleet.logtext import LINE_COST, LogText
from tests.app.log_viewer import ROOT, ViewApp, draw, lines, screen, viewer
from tests.app.scripted import until

LOG = ROOT / "tests" / "data" / "logs" / "v0.26.0-h200-hybrid-ok-then-stopped.log"


async def test_it_follows_the_end_until_the_reader_scrolls_up_and_again_with_g_or_end() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 100))
        assert screen(app.view)[-1] == "line     99"
        await pilot.press("pageup")
        before = screen(app.view)
        assert not app.view.following
        await draw(pilot, app, lines(100, 200))
        assert screen(app.view) == before
        for key in ("G", "end"):
            await pilot.press("up", key)
            assert app.view.following
            assert screen(app.view)[-1] == "line    199"
        await draw(pilot, app, lines(200, 201))
        assert screen(app.view)[-1] == "line    200"


async def test_scrolling_back_to_the_last_line_follows_again() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 100))
        await pilot.press("up", "up")
        assert not app.view.following
        await pilot.press("down", "down")
        assert app.view.following


async def test_the_wheel_stops_following() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 100))
        await pilot._post_mouse_events([MouseScrollUp], app.view)
        await until(pilot, lambda: not app.view.following)


async def test_following_keeps_the_horizontal_place() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"".join(b"%d " % number + b"x" * 200 + b"\n" for number in range(50)))
        await pilot.press(*["right"] * 5)
        await until(pilot, lambda: app.view.scroll_offset.x == 5)
        await draw(pilot, app, b"short\n" * 50)
        assert app.view.following
        assert app.view.scroll_offset.x == 5
        await pilot.press("home")
        assert app.view.scroll_offset.x == 0


async def test_the_readers_place_stays_when_old_lines_are_dropped() -> None:
    async with viewer(limit=200 * (LINE_COST + 12)) as (app, pilot):
        await draw(pilot, app, lines(0, 190))
        await pilot.press("pageup")
        before = screen(app.view)
        await draw(pilot, app, lines(190, 200))
        for start in range(200, 2000, 50):
            await draw(pilot, app, lines(start, start + 50))
        assert screen(app.view) == before
        assert len(app.view.text) <= 250
        assert app.view.behind > 0


async def test_what_came_while_the_reader_was_elsewhere_is_asked_for_at_the_bottom() -> None:
    async with viewer(limit=100 * (LINE_COST + 12)) as (app, pilot):
        log = lines(0, 1000)
        await draw(pilot, app, log[: 100 * 12])
        await pilot.press("up")
        await draw(pilot, app, log[100 * 12 :])
        end = app.view.text.end
        assert app.view.behind == len(log) - end
        await pilot.press("down")
        assert not app.view.following
        assert app.wanted == [("newer", end)]
        app.view.newer(log[end:], end)
        await pilot.pause()
        assert app.view.behind == 0
        await pilot.press("G")
        assert screen(app.view)[-1] == "line    999"
        await draw(pilot, app, lines(1000, 1001))
        assert screen(app.view)[-1] == "line   1000"


async def test_the_end_of_a_log_that_went_far_ahead_is_asked_for_at_once() -> None:
    async with viewer(limit=100 * (LINE_COST + 12)) as (app, pilot):
        await draw(pilot, app, lines(0, 100))
        await pilot.press("up")
        await draw(pilot, app, lines(100, 1000))
        await pilot.press("G")
        assert app.wanted == [("end", 12_000)]


async def test_older_bytes_are_asked_for_at_the_top_and_come_in_above_the_readers_place() -> None:
    log = lines(0, 1000)
    async with viewer() as (app, pilot):
        await draw(pilot, app, log[6005:], 6005)
        await pilot.press("up")
        while app.view.scroll_offset.y:
            await pilot.press("pageup")
        assert app.wanted == [("older", 6012)]
        app.view.older(log[3000:6012], 3000)
        await pilot.pause()
        # The line that had been cut in the middle is whole now.
        assert screen(app.view)[:2] == ["line    500", "line    501"]
        assert not app.view.following
        await pilot.press("pageup")
        assert screen(app.view)[-1] == "line    500"


async def test_a_hole_above_ends_the_asking() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 100), 200_000)
        await pilot.press("up")
        while app.view.scroll_offset.y:
            await pilot.press("pageup")
        [(where, end)] = app.wanted
        assert where == "older"
        app.view.older(bytes(65536), end - 65536)
        await pilot.press("pageup", "pageup")
        assert len(app.wanted) == 1
        assert app.view.text.start == 200_000


async def test_g_goes_to_the_first_byte_of_the_file() -> None:
    log = lines(0, 1000)
    async with viewer() as (app, pilot):
        await draw(pilot, app, log[6000:], 6000)
        await pilot.press("g")
        assert app.wanted == [("head", 0)]
        app.view.restart(0, stream_end=app.view.stream_end)
        app.view.newer(log[:3000], 0)
        await pilot.pause()
        assert screen(app.view)[0] == "line      0"
        assert not app.view.following
        assert app.view.behind == 9000


async def test_a_hundred_thousand_lines_stay_usable_because_only_visible_rows_are_rendered() -> None:
    async with viewer() as (app, pilot):
        log = lines(0, 100_000)
        drawings = 0
        before = app.view.rendered
        for start in range(0, len(log), 65536):
            await draw(pilot, app, log[start : start + 65536])
            drawings += 1
        assert len(app.view.text) == 100_000
        # Each drawing renders the 24 rows of the screen a few times at most, however long the log is.
        assert app.view.rendered - before <= 24 * 6 * drawings
        before = app.view.rendered
        await pilot.press("pageup")
        await pilot.pause()
        assert 0 < app.view.rendered - before <= 24 * 6
        assert screen(app.view)[-1] == "line  99976"


async def test_a_batch_measures_its_own_lines_and_no_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with viewer() as (app, pilot):
        app.view.wrap = True
        await draw(pilot, app, lines(0, 50_000))
        asked: list[int] = []
        original = LogText.__getitem__

        def counted(self: LogText, index: int) -> object:
            asked.append(index)
            return original(self, index)

        monkeypatch.setattr(LogText, "__getitem__", counted)
        await draw(pilot, app, lines(50_000, 50_010))
        assert len(asked) <= 24 * 6 + 30
        assert min(asked) >= 50_010 - 40


async def test_carriage_returns_draw_a_progress_bar_in_place() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"start\n 10%|#         |\r")
        assert screen(app.view)[:2] == ["start", " 10%|#         |"]
        await draw(pilot, app, b" 50%|#####     |\r")
        assert screen(app.view)[:3] == ["start", " 50%|#####     |", ""]
        await draw(pilot, app, b"100%|##########|\nend\n")
        assert screen(app.view)[:3] == ["start", "100%|##########|", "end"]


async def test_nothing_of_a_hostile_log_reaches_the_terminal() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"\x1b]52;c;ZXZpbA==\x07a\x1b[2Jb\x1bc\x07\x9b31m[link=x]c[/]\n")
        assert screen(app.view)[0] == "ab\ufffd31m[link=x]c[/]"


async def test_colours_of_a_log_are_those_of_the_theme() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"\x1b[31mbad\x1b[0m \x1b[38;2;1;2;3mown\x1b[0m\n")
        styles = {segment.text: segment.style for segment in app.view.render_line(0) if segment.text.strip()}
        assert styles["bad"].color.get_truecolor().hex == app.theme_variables["text-error"].lower()
        assert styles["own"].color.triplet == (1, 2, 3)
        app.theme = "chalk"
        await pilot.pause()
        after = {segment.text: segment.style for segment in app.view.render_line(0)}
        assert after["bad"].color.get_truecolor().hex == app.theme_variables["text-error"].lower()
        assert after["bad"].color != styles["bad"].color


async def test_wrapping_shows_the_whole_line_and_keeps_the_top_line_in_place() -> None:
    async with viewer(size=(41, 10)) as (app, pilot):
        await draw(pilot, app, b"".join(b"%02d" % number + b"abcdefgh" * 12 + b"\n" for number in range(30)))
        await pilot.press("g", *["down"] * 7)
        assert screen(app.view)[0] == "07" + "abcdefgh" * 4 + "abcdef"
        await pilot.press("w")
        await pilot.pause()
        rows = screen(app.view)
        assert rows[0] == "07" + "abcdefgh" * 4 + "abcdef"
        assert "".join(rows[:3]) == "07" + "abcdefgh" * 12
        assert rows[3].startswith("08")
        await pilot.press("G")
        assert screen(app.view)[-1].endswith("abcdefgh")
        await pilot.press("w")
        await pilot.pause()
        assert screen(app.view)[-1].startswith("29")


async def test_wide_characters_are_neither_cut_in_two_nor_lost_when_wrapped() -> None:
    async with viewer(size=(12, 10)) as (app, pilot):
        await draw(pilot, app, "日本語日本語日本語 end\n".encode())
        await pilot.press("w")
        await pilot.pause()
        assert "".join(screen(app.view)) == "日本語日本語日本語 end"


async def test_a_wrapped_view_follows_a_resized_terminal() -> None:
    async with viewer(size=(41, 10)) as (app, pilot):
        await pilot.press("w")
        await draw(pilot, app, b"".join(b"%02d" % number + b"x" * 98 + b"\n" for number in range(30)))
        await pilot.resize_terminal(101, 10)
        await pilot.pause()
        assert screen(app.view)[-1].startswith("29")
        assert app.view.virtual_size.height == 30


async def test_a_very_long_line_is_cut_and_marked() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"x" * 10_000 + b"\n")
        app.view.scroll_to(x=8190, animate=False)
        await pilot.pause()
        assert screen(app.view)[0].endswith("xx … 1,808 more characters")


async def test_gaps_and_resets_are_told_in_the_view() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"one\n")
        await draw(pilot, app, b"two\n", gap=5 * 1024 * 1024)
        assert screen(app.view)[:3] == ["one", "… 5.0 MiB given back to the disk …", "two"]
        app.view.restart(0, "the file was truncated")
        await draw(pilot, app, b"new\n", 0)
        assert screen(app.view)[:3] == ["the file was truncated", "new", ""]


async def test_selected_text_is_the_text_of_the_log() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 5))
        await pilot.mouse_down(app.view, offset=(5, 1))
        await pilot.hover(app.view, offset=(4, 2))
        await pilot.mouse_up(app.view, offset=(4, 2))
        selected = app.screen.get_selected_text()
        assert selected is not None
        assert selected.startswith("     1\nline")


@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=["80x24", "200x60"])
def test_snapshot_of_a_real_log(size: tuple[int, int], snap_compare: Callable[..., bool]) -> None:
    app = ViewApp()

    async def run_before(pilot: Pilot[None]) -> None:
        await draw(pilot, app, LOG.read_bytes() + b"\x1b[33mWARNING\x1b[0m \x1b[1;31mred\x1b[0m\n 50%|#####     |\r")
        app.view.look_for("engine")

    assert snap_compare(app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("wrap", [False, True])
async def test_bars_under_one_another_take_one_line_each(wrap: bool) -> None:
    async with viewer(size=(40, 12)) as (app, pilot):
        app.view.wrap = wrap
        await draw(pilot, app, b"before\n")
        for number in range(5):
            bar = b"\repochs %d" % number + b"\n\rsteps %d " % number + b"#" * 60 + b"\x1b[A"
            await draw(pilot, app, bar)
        shown = [line for line in screen(app.view) if line]
        assert shown[:2] == ["before", "epochs 4"] and shown[2].startswith("steps 4 ###")
        assert len(shown) == (4 if wrap else 3)
        app.view.look_for("steps 4")
        await draw(pilot, app, b"\n\nafter\n")
        assert [line for line in screen(app.view) if line][-1] == "after"
