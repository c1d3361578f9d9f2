"""Draws `themes/console.svg`, the picture in README.md: the real console on this machine, with a real job running.

    python -m tests.picture

The GPUs are what an H200 answered when it was recorded (tests/data/gpu), since the machine that draws need not have one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dflash_tui.app.app import ConsoleApp
from dflash_tui.config import Settings
from dflash_tui.link import LinkOptions, NodeLink, new_job_id, parse_target
from dflash_tui.node.protocol import Launch

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "themes" / "console.svg"
SIZE = (112, 32)


async def until(holds: Callable[[], bool], limit_s: float = 240.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the console did not get there")
        await asyncio.sleep(0.1)


async def draw(folder: Path) -> None:
    os.environ.update(
        HOME=str(folder),
        PATH=f"{HERE / 'fakes'}:{os.environ['PATH']}",
        DFLASH_TUI_FAKE_SMI=str(HERE / "data" / "gpu" / "h200.json"),
        DFLASH_TUI_FAKE_SMI_PHASE="mixed",
        DFLASH_TUI_FAKE_GPUS="8",
    )
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        os.environ.pop(name, None)
    link = NodeLink(parse_target("local"), lambda fact: None, LinkOptions(default_python=sys.executable))
    app = ConsoleApp([link], Settings(hosts=("local",)))
    async with app.run_test(size=SIZE) as pilot:
        await until(lambda: bool((node := app.fleet.node("local")).metrics and node.metrics.gpus))
        job = new_job_id("demo")
        spec = {"output": str(folder / "demo"), "blocks": 12, "hidden": 96}
        link.launch(job, Launch(name="first look", verb="demo", python="", spec=spec)).result(60)

        def moving() -> bool:
            found = app.fleet.node("local").jobs.get(job)
            progress = found.progress if found else None
            return bool(progress and (progress.phase or "").startswith("extracting") and progress.done > 60)

        await until(moving)
        await pilot.press("1", "down")
        await until(lambda: len(next(iter(app.fleet.node("local").gpu_series.values()), ())) > 12)
        await pilot.pause(0.5)
        PICTURE.write_text(app.export_screenshot(title="dflash-tui --host local", simplify=True), encoding="utf-8")
        link.stop(job, force=True).result(60)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(draw(Path(place)))
    print(PICTURE)
