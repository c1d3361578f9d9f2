"""The console against a real node: the local agent, real processes, a real job, started by keys alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_tui.app.app import ConsoleApp
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.app.screens.launch import LaunchScreen
from dflash_tui.app.screens.logs import LogsScreen
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import JobState, LinkState
from dflash_tui.link import LinkOptions, NodeLink, parse_target
from tests.sshd import Sshd

from .scripted import shown, type_text, until, until_open, until_shown

ROOT = Path(__file__).parents[2]
CONVERSATIONS = ROOT / "backends" / "demo" / "data" / "gsm8k-test-220.jsonl"
MAKE_MODEL = """
import sys
from backends.demo.model import build_model
build_model(sys.argv[1], open(sys.argv[2], encoding="utf-8").read().splitlines()[:40], layers=6, hidden=32, vocab_size=400)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Qwen3 with a tokenizer and a chat template."""
    folder = tmp_path / "model"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder), str(CONVERSATIONS)], env=env, check=True, cwd=ROOT)
    return folder


async def test_a_job_is_planned_started_watched_to_its_end_and_its_log_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    link = NodeLink(parse_target("local"), lambda fact: None, LinkOptions(default_python=sys.executable))
    app = ConsoleApp([link], Settings(hosts=("local",), screen="jobs"))
    output = tmp_path / "prepared"
    try:
        async with app.run_test(size=(100, 40)) as pilot:
            await until(
                pilot, lambda: app.fleet.nodes[0].live and app.fleet.nodes[0].metrics, "a live node", limit_s=120
            )
            await pilot.press("n")
            await until_open(pilot, LaunchScreen)
            await until_shown(pilot, sys.executable)
            await pilot.press("tab", "enter", "down", "enter")
            await until_shown(pilot, "inputs")
            for text in (model, CONVERSATIONS, output):
                await pilot.press("tab")
                await type_text(pilot, str(text))
            await pilot.press("f5")
            await until(pilot, lambda: "This can run." in shown(app) or "remedy" in shown(app), "a plan", limit_s=180)
            await pilot.press("f9")
            await until_open(pilot, JobsScreen, limit_s=60)
            await until(pilot, lambda: app.fleet.nodes[0].jobs, "a job", limit_s=60)

            def job():
                return next(iter(app.fleet.nodes[0].jobs.values()))

            await until(pilot, lambda: job().state.ended, "its end", limit_s=240)
            assert (job().state, job().exit_code) == (JobState.DONE, 0), job()
            await until_shown(pilot, "* done", "100%", "220/220", str(output)[:40])
            assert (output / "dataset_info.json").is_file()
            await pilot.press("enter")
            await until(
                pilot, lambda: isinstance(app.screen, LogsScreen) and "finished" in shown(app), "its log", limit_s=60
            )
    finally:
        link.close()


async def test_a_host_whose_key_is_accepted_elsewhere_is_connected_by_one_key(tmp_path: Path) -> None:
    server = Sshd(tmp_path)
    server.know_host_key("")
    server.start()
    link = NodeLink(parse_target(server.target), lambda fact: None, LinkOptions(ssh_config=server.ssh_config))
    app = ConsoleApp([link], Settings(hosts=(server.target,)))
    try:
        async with app.run_test(size=(100, 40)) as pilot:
            await until(pilot, lambda: app.fleet.nodes[0].link.state is LinkState.REFUSED, "a refusal", limit_s=120)
            await until_shown(pilot, "is not known", "SHA256:", "r connects again now")
            server.know_host_key()
            await pilot.press("r")
            await until(pilot, lambda: app.fleet.nodes[0].live, "a live node", limit_s=120)
            await until(pilot, lambda: "connects again" not in shown(app))
    finally:
        link.close()
        server.stop()
