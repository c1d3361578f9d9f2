"""Searching in a log: forth, back, round the end, in both directions of the screen, and what cannot be found."""

from __future__ import annotations

import pytest

from dflash_tui.fleet.logtext import LINE_COST
from tests.app.log_viewer import draw, lines, screen, viewer


async def test_search_goes_forth_and_back_and_round_the_end() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 1000))
        await pilot.press("g")
        assert app.view.look_for(r"\b\d*99$")
        assert "line     99" in screen(app.view)
        await pilot.press("n")
        assert "line    199" in screen(app.view)
        await pilot.press("N", "N")
        assert "line    999" in screen(app.view)
        assert app.view.search.message == "went on from the other end"
        assert not app.view.following


async def test_search_finds_each_match_of_one_line_and_brings_it_into_sight() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"a" + b"." * 200 + b"a" + b"." * 200 + b"a\n")
        starts = []
        app.view.look_for("a")
        for _ in range(3):
            assert app.view.search.match is not None
            starts.append(app.view.search.match.start)
            assert app.view.scroll_offset.x <= starts[-1] < app.view.scroll_offset.x + 79
            app.view.action_find(1)
        assert starts == [0, 201, 402]


async def test_search_without_a_capital_matches_both_cases_and_with_one_only_its_own() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"an error\nAn Error\n")
        app.view.look_for("error")
        assert [len(app.view.search.matches(line)) for line in (0, 1)] == [1, 1]
        app.view.look_for("Error")
        assert [len(app.view.search.matches(line)) for line in (0, 1)] == [0, 1]


async def test_matches_are_highlighted_and_the_current_one_otherwise() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, b"hit miss hit\n")
        app.view.look_for("hit")
        first, _, second = [segment for segment in app.view.render_line(0) if segment.text.strip()]
        assert (first.text, second.text) == ("hit", "hit")
        assert first.style.bold and not first.style.underline
        assert second.style.underline
        app.view.look_for("")
        assert app.view.render_line(0).text.startswith("hit miss hit")
        assert len([segment for segment in app.view.render_line(0) if segment.text.strip()]) == 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[", "not a regular expression"),
        ("nowhere", "not found"),
        ("x*", "not found"),
        ("(", "not a regular expression"),
    ],
)
async def test_what_cannot_be_found_says_so_and_moves_nothing(pattern: str, message: str) -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 100))
        before = screen(app.view)
        assert not app.view.look_for(pattern)
        assert message in app.view.search.message
        assert screen(app.view) == before
        assert app.view.following


async def test_search_in_an_empty_log_finds_nothing() -> None:
    async with viewer() as (app, _):
        assert not app.view.look_for("x")
        assert app.view.search.message == "not found"


async def test_a_match_stays_on_its_line_when_older_lines_are_dropped() -> None:
    async with viewer(limit=100 * (LINE_COST + 12)) as (app, pilot):
        await draw(pilot, app, lines(0, 100))
        app.view.look_for("line     90")
        app.view.action_follow()
        await draw(pilot, app, lines(100, 150))
        match = app.view.search.match
        assert match is not None
        assert app.view.text[match.line].text == "line     90"


async def test_what_is_not_found_says_how_much_of_the_file_was_not_searched() -> None:
    async with viewer() as (app, pilot):
        await draw(pilot, app, lines(0, 100), offset=3 * 1024 * 1024)
        assert not app.view.look_for("nowhere")
        assert app.view.search.message == "not found in the lines loaded; 3.0 MiB of the file were not searched"
