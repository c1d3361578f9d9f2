"""The Source screen: a file of a node at a line, from the Jobs screen, from a log, from the palette and by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Footer

from dflash_tui.app.reading import show_source
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.screens.source import SourceScreen
from dflash_tui.app.widgets.prompt_bar import PromptBar
from dflash_tui.app.widgets.source_view import SourceView
from dflash_tui.fleet.facts import Cause, Diagnosis, JobsArrived, JobState, Source
from dflash_tui.fleet.source import Place, SourceText
from dflash_tui.link import LinkError, RequestRefused

from .scripted import (
    NOW,
    HeardConsole,
    ScriptedLink,
    console,
    launch_file,
    live,
    running_job,
    shown,
    type_text,
    until,
    until_open,
    until_shown,
)

FAILED = running_job(state=JobState.FAILED, ended=NOW - 10, exit_code=1, reason="its log says why", progress=None)
OTHER = replace(FAILED, id="20261130-010200-extract-cccc", name="another", created=NOW - 900, state=JobState.DONE)
FILE = "/venv/lib/vllm/api_server.py"
TOLD = Diagnosis(True, Cause("unknown", "ValueError: no", 8, "ValueError: no"), "read it", Source(FILE, 300), 9, 0)
CODE = "".join(
    f'def function_{number}(x):\n    """Says {number}."""\n    return x + {number}  # a comment\n\n'
    for number in range(200)
)


def text(path: str, line: int, code: str = CODE, **more: Any) -> SourceText:
    """All of a file, as a node gives it that is asked for one of its lines."""
    data = code.encode()
    return SourceText(
        **{"path": path, "line": line, "first_line": 1, "offset": 0, "size": len(data), "data": data, **more}
    )


def node(**more: Any) -> ScriptedLink:
    files = {(job.id, "launch"): launch_file(job) for job in (FAILED, OTHER)}
    values: dict[str, Any] = {"diagnose_answer": TOLD, "source_answer": text, **more}
    return ScriptedLink("gpu-1", [*live("gpu-1"), JobsArrived("gpu-1", (FAILED, OTHER))], files=files, **values)


def view(app: HeardConsole) -> SourceView:
    return app.screen.query_one(SourceView)


def rows(app: HeardConsole) -> list[str]:
    return [line.rstrip(" ▁▂▃▄▅▆▇█▔") for line in shown(app).splitlines()]


async def on_source(pilot: Pilot[Any]) -> None:
    """By the keys that a user presses: the Jobs screen, its diagnosis, its source."""
    await pilot.press("2")
    await until_shown(pilot, f"{FILE}:300")
    await pilot.press("s")
    await until(pilot, lambda: isinstance(pilot.app.screen, SourceScreen) and pilot.app.screen.shown, "the source")
    await until_shown(pilot, "> 300")


async def test_one_key_opens_the_source_of_a_failed_job_at_the_line_that_raised_it() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        assert link.questions("source") == [{"path": FILE, "of_job": FAILED.id, "line": 300}]
        assert f"{FILE}:300 on gpu-1" in shown(app)
        marked = [row for row in rows(app) if row.startswith(">")]
        assert marked == ["> 300 │"]
        assert "  299 │    return x + 74  # a comment" in rows(app)
        await pilot.press("escape")
        await until_open(pilot, JobsScreen)


async def test_the_key_stands_in_the_footer_only_where_it_does_something() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "s Source", f"{FILE}:300")
        await pilot.press("down")
        await until(pilot, lambda: "s Source" not in shown(app), "the key to go")
        assert app.screen.query_one(Footer)
        await pilot.press("s")
        await pilot.pause(0.1)
        assert isinstance(app.screen, JobsScreen)
        await pilot.press("up")
        await until_shown(pilot, "s Source")


async def test_python_is_highlighted_and_what_has_no_language_is_plain() -> None:
    app = console(node())
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        await until(pilot, lambda: view(app).lines[0].spans, "the colours")
        painted = {
            view(app).lines[index].text[span.start : span.end]
            for index in range(4)
            for span in view(app).lines[index].spans
        }
        assert {"def", "return", "function_0", '"""Says 0."""', "# a comment"} <= painted
        colours = {style.color for _, style, _ in view(app).render_line(0) if style and style.color}
        assert len(colours) > 1


async def test_every_line_of_the_file_has_its_own_number_and_g_goes_to_both_ends() -> None:
    app = console(node())
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        await pilot.press("g")
        await until_shown(pilot, "    1 │def function_0(x):", "lines 1-")
        await pilot.press("G")
        await until_shown(pilot, "  800 │", "-800 of 800")
        await pilot.press("m")
        await until_shown(pilot, "> 300")


async def test_search_goes_to_a_match_and_says_where_there_is_none() -> None:
    app = console(node())
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        await pilot.press("slash", *"says", "space", *"150", "enter")
        await until_shown(pilot, '"""Says 150."""')
        match = view(app).search.match
        assert match is not None and match.line == 601
        await pilot.press("n")
        await until_shown(pilot, "went on from the other end")
        await pilot.press("slash")
        await until(pilot, lambda: app.screen.query_one(PromptBar).has_focus, "the prompt")
        await type_text(pilot, "nowhere")
        await pilot.press("enter")
        await until_shown(pilot, "not found")
        await pilot.press("escape", "escape")
        await until(pilot, lambda: not view(app).search.active, "the search to end")
        assert isinstance(app.screen, SourceScreen)


async def test_a_line_is_gone_to_by_its_number_and_one_that_is_not_there_is_said() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        await pilot.press("colon", *"77", "enter")
        await until_shown(pilot, ">  77 │")
        await pilot.press("colon", *"9000", "enter")
        await until_shown(pilot, "there is no line 9,000: the last one is 800")
        await pilot.press("colon", *"x1", "enter")
        await until_shown(pilot, "'x1' is no line: give a number from 1 on")
        assert len(link.questions("source")) == 1


async def test_what_is_cut_off_of_a_large_file_is_said_and_one_of_its_lines_is_asked_for() -> None:
    gib = 1 << 30

    def part(path: str, line: int) -> SourceText:
        return text(path, line, first_line=line - 100, offset=3 * gib, size=10 * gib)

    link = node(source_answer=part)
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        await until_shown(pilot, "3.0 GiB before them", "7.0 GiB after them")
        await pilot.press("colon", *"123456", "enter")
        await until_shown(pilot, ">123456 │")
        assert [asked["line"] for asked in link.questions("source")] == [300, 123456]
        await pilot.press("slash", *"nowhere", "enter")
        await until_shown(pilot, "not found in the lines loaded", "were not searched")


async def test_a_refusal_is_one_line_and_what_is_shown_stays() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await on_source(pilot)
        link.source_answer = RequestRefused(
            "io-error", "/dev/zero is a device, not a regular file", "give the path of a file"
        )
        await pilot.press("o")
        prompt = app.screen.query_one(PromptBar)
        await until(pilot, lambda: prompt.has_focus, "the prompt")
        assert prompt.value == "/venv/lib/vllm/"
        prompt.value = ""
        await type_text(pilot, "/dev/zero")
        await pilot.press("enter")
        await until_shown(pilot, "/dev/zero is a device, not a regular file: give the path of a file", "> 300")


async def test_a_file_is_opened_by_its_name_from_the_jobs_screen() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, FAILED.id)
        await pilot.press("o")
        await until(pilot, lambda: isinstance(app.focused, PromptBar), "the question for a name")
        app.screen.query_one(PromptBar).value = "/etc/motd.py:12"
        await pilot.press("enter")
        await until_shown(pilot, ">  12 │", "/etc/motd.py:12 on gpu-1")
        assert link.questions("source") == [{"path": "/etc/motd.py", "of_job": None, "line": 12}]


async def test_a_source_that_hides_characters_is_shown_with_signs_for_them() -> None:
    odd = "a = '\x1b]0;title\x07\u202e\x9b2J'\n\tb = 1\r\n\x0cc\n[bold]d[/bold]\n"
    app = console(
        node(source_answer=lambda path, line: text(path, 1, odd), diagnose_answer=replace(TOLD, source=Source(FILE, 3)))
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, f"{FILE}:3")
        await pilot.press("s")
        await until_shown(pilot, ">   3 │\N{SYMBOL FOR FORM FEED}c", "[bold]d[/bold]", "        b = 1")
        assert "\N{SYMBOL FOR ESCAPE}]0;title\N{SYMBOL FOR BELL}<U+202E><U+009B>2J" in shown(app)
        assert not set(shown(app)) & set("\x1b\x07\u202e\x9b\r")


async def test_a_lost_link_is_said_and_the_next_try_goes_through() -> None:
    link = node(source_answer=LinkError("lost", "the link to gpu-1 was lost before the answer came"))
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "s Source")
        await pilot.press("s")
        await until_shown(pilot, "the link to gpu-1 was lost")
        link.source_answer = text
        await pilot.press("escape", "s")
        await until_shown(pilot, "> 300")


@pytest.mark.parametrize("size", [(30, 8), (80, 24)])
async def test_the_marked_line_is_in_sight_on_any_terminal(size: tuple[int, int]) -> None:
    app = console(node())
    async with app.run_test(size=size) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: isinstance(app.screen, JobsScreen) and app.screen._has_source, "the diagnosis")
        await pilot.press("s")
        await until_shown(pilot, "> 300")
        await pilot.resize_terminal(40, 10)
        await until_shown(pilot, "> 300")


async def test_the_palette_opens_a_file_of_the_node() -> None:
    app = console(node())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+p")
        await type_text(pilot, "open a file")
        await until_shown(pilot, "Open a file of gpu-1")
        await pilot.press("enter")
        await until_open(pilot, SourceScreen)
        await until(pilot, lambda: app.screen.query_one(PromptBar).display, "the question for a file")


async def test_a_search_in_lines_that_are_cut_says_what_it_did_not_look_at() -> None:
    long = "a = '" + "x" * 20_000 + " needle'\n"
    app = console(node(source_answer=lambda path, line: text(path, 1, long)))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "s Source")
        await pilot.press("s")
        await until_shown(pilot, "lines 1-1 of 1")
        await pilot.press("slash", *"needle", "enter")
        await until_shown(pilot, "not found in the lines loaded", "were not searched")


async def test_a_log_that_is_opened_is_seen_whatever_was_left_open_over_the_one_before() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, "s Source")
        await pilot.press("enter")
        await until_shown(pilot, f"({FAILED.id}) on gpu-1")
        show_source(app, "gpu-1", [Place(FILE, 300)])
        await until_shown(pilot, "> 300")
        await pilot.press("2")
        await until_shown(pilot, "[2 Jobs]", "another")
        await pilot.press("down", "enter")
        await until_shown(pilot, f"({OTHER.id}) on gpu-1")


async def test_the_number_of_a_frame_is_that_of_the_frame_on_the_screen() -> None:
    def some(path: str, line: int) -> SourceText | LinkError:
        return (
            RequestRefused("not-found", f"{path} is read from no file", "")
            if path.startswith("<")
            else text(path, line)
        )

    app = console(node(source_answer=some))
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(pilot, "gpu-1")
        show_source(app, "gpu-1", [Place(FILE, 3), Place("<frozen x>", 5), Place(FILE, 7)])
        await until_shown(pilot, ">   3 │", "frame 1 of 3")
        await pilot.press("right_square_bracket")
        await until_shown(pilot, "read from no file", "frame 1 of 3")
        await pilot.press("colon", *"77", "enter")
        await until_shown(pilot, ">  77 │", "frame 1 of 3")
        await pilot.press("right_square_bracket")
        await until_shown(pilot, ">   7 │", "frame 3 of 3")
