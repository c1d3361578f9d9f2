"""A log viewer without a console around it, for tests of the widget."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from textual.app import App, ComposeResult
from textual.pilot import Pilot

from dflash_tui.app.themes import load_themes
from dflash_tui.app.widgets.log_view import LogView
from dflash_tui.fleet.logtext import LogText

from .scripted import until

ROOT = Path(__file__).parent.parent.parent


class ViewApp(App[None]):
    """A log viewer and nothing else; keeps what it asked for."""

    CSS_PATH = ROOT / "dflash_tui" / "app" / "styles" / "logs.tcss"

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.view = LogView(text=None if limit is None else LogText(limit=limit))
        self.drawn = 0
        self.wanted: list[tuple[str, int]] = []

    def compose(self) -> ComposeResult:
        yield self.view

    def on_mount(self) -> None:
        for theme in load_themes(Path("/nonexistent"))[0]:
            self.register_theme(theme)
        self.theme = "kiln"
        self.view.focus()

    def on_log_view_drawn(self, event: LogView.Drawn) -> None:
        self.drawn += event.nbytes

    def on_log_view_wanted(self, event: LogView.Wanted) -> None:
        self.wanted.append((event.where, event.offset))


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %6d\n" % number for number in range(first, last))


def screen(view: LogView) -> list[str]:
    return [view.render_line(row).text.rstrip() for row in range(view.scrollable_content_region.height)]


async def draw(pilot: Pilot[None], app: ViewApp, data: bytes, offset: int | None = None, gap: int = 0) -> None:
    """Gives bytes to the viewer and waits until they are drawn."""
    wanted = app.drawn + len(data)
    app.view.append(data, app.view.stream_end + gap if offset is None else offset, gap)
    await until(pilot, lambda: app.drawn >= wanted)
    await pilot.pause()


@asynccontextmanager
async def viewer(
    limit: int | None = None, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[ViewApp, Pilot[None]]]:
    app = ViewApp(limit)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot
