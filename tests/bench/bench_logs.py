"""What a log costs the console: 1,000 lines a second in batches, drawn by our viewer and by Textual's RichLog and Log.

    python -m tests.bench.bench_logs [SECONDS] [LINES_BEFORE]

Prints the CPU time that each took for as many seconds of log as were asked for, on top of LINES_BEFORE lines that were there
already, as a share of one core, and how many times more than our viewer the others took.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from textual.app import App, ComposeResult
from textual.widget import Widget
from textual.widgets import Log, RichLog

from dflash_tui.app.widgets.log_view import LogView

STYLES = Path(__file__).parent.parent.parent / "dflash_tui" / "app" / "styles" / "logs.tcss"
RATE = 1000  # lines a second
BATCHES = 10  # a second, as the link delivers them
SIZE = (120, 40)


class BenchApp(App[None]):
    CSS_PATH = STYLES

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self.widget = widget

    def compose(self) -> ComposeResult:
        yield self.widget


def line(number: int) -> str:
    return (
        f"INFO 11-30 02:55:{number % 60:02d} [worker.py:{number % 1000}] sample {number}: 875 tokens, 42.1 MB written"
    )


def ours() -> tuple[Widget, Callable[[list[str]], None]]:
    view = LogView()
    position = 0

    def write(lines: list[str]) -> None:
        nonlocal position
        data = ("\n".join(lines) + "\n").encode()
        view.append(data, position)
        position += len(data)

    return view, write


def rich_log() -> tuple[Widget, Callable[[list[str]], None]]:
    widget = RichLog()

    def write(lines: list[str]) -> None:
        for text in lines:
            widget.write(text)

    return widget, write


def plain_log() -> tuple[Widget, Callable[[list[str]], None]]:
    widget = Log()
    return widget, widget.write_lines


async def share_of_a_core(made: tuple[Widget, Callable[[list[str]], object]], seconds: int, before: int) -> float:
    """CPU seconds a second of log."""
    widget, write = made
    app = BenchApp(widget)
    async with app.run_test(size=SIZE) as pilot:
        for start in range(0, before, 5000):
            write([line(number) for number in range(start, min(before, start + 5000))])
        await pilot.pause(0.5)
        started = time.process_time()
        for batch in range(seconds * BATCHES):
            first = before + batch * RATE // BATCHES
            write([line(number) for number in range(first, first + RATE // BATCHES)])
            await asyncio.sleep(1 / BATCHES)
        await pilot.pause(0.3)
        return (time.process_time() - started) / seconds


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    before = int(sys.argv[2]) if len(sys.argv) > 2 else 50_000
    print(f"{RATE} lines/s in {BATCHES} batches a second for {seconds} s, after {before} lines, at {SIZE[0]}x{SIZE[1]}")
    own = asyncio.run(share_of_a_core(ours(), seconds, before))
    print(f"LogView  {own:7.1%} of a core")
    for name, make in (("Log", plain_log), ("RichLog", rich_log)):
        share = asyncio.run(share_of_a_core(make(), seconds, before))
        print(f"{name:8} {share:7.1%} of a core, {share / own:.1f} times LogView's")


if __name__ == "__main__":
    main()
