"""A comparison in a real terminal: started by keys, both columns moving, its verdict on the screen."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_tui.node.protocol import ENDED
from tests.e2e.harness import Terminal
from tests.node.client import REPOSITORY
from tests.vllm.real_node import EAGER, LAYERS, LIMIT_S, Job, Site, poll

VARIABLES = "VLLM_CPU_KVCACHE_SPACE=1"
SAMPLES = 64


@pytest.fixture
def terminal(site: Site) -> Iterator[Terminal]:
    """The console on this node, at 80x24."""
    command = [sys.executable, "-m", "dflash_tui.cli", "--host", "local", "--env", VARIABLES]
    env = {**site.env, "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"}
    opened = Terminal(80, 24, command, env, site.folder)
    try:
        yield opened
    finally:
        opened.close()


def start(terminal: Terminal, site: Site, output: Path) -> Job:
    """Opens the form on the Compare screen, fills it in, plans and starts."""
    known = {record["job"] for record in site.agent.ask("list")["jobs"]}
    terminal.keys("n")
    terminal.wait_for("f9 Launch", LIMIT_S)
    terminal.wait_for("what +compare")
    for label, text in (("model", site.data.dense), ("dataset", site.data.conversations), ("output", str(output))):
        terminal.fill(label, text)
    terminal.fill("samples", str(SAMPLES))
    terminal.fill("vLLM Python", site.python)
    terminal.fill("vLLM options", " ".join(EAGER))
    terminal.keys("F5")
    terminal.wait_for("planned: it can be launched", LIMIT_S)
    terminal.wait_for("This can run")
    terminal.keys("F9")

    def started() -> str | None:
        return next((record["job"] for record in site.agent.ask("list")["jobs"] if record["job"] not in known), None)

    return Job(site, poll(started, "the comparison to be started"), {"output": str(output)})


def done_of(screen: str) -> list[int]:
    """How many samples are done, under hf and under vllm; [] where the screen does not tell."""
    line = re.search(r"(?m)^ progress .*$", screen)
    return [int(done) for done in re.findall(rf" (\d+)/{SAMPLES}\b", line[0])] if line else []


def test_a_comparison_is_started_by_keys_both_columns_move_and_the_verdict_is_shown(
    terminal: Terminal, site: Site, tmp_path: Path
) -> None:
    output = tmp_path / "compared"
    terminal.wait_for("1/1 nodes live", LIMIT_S)
    terminal.keys("c")
    terminal.wait_for(r"\[4 Compare\]")
    job = start(terminal, site, output)
    terminal.wait_for(r"\[4 Compare\](?s:.*)dense on local", LIMIT_S)

    seen: dict[str, list[int]] = {"hf": [], "vllm": []}
    states: list[str] = []

    def over() -> bool:
        screen = terminal.screen
        if len(counts := done_of(screen)) == len(seen):
            for done, count in zip(seen.values(), counts, strict=True):
                if not done or done[-1] != count:
                    done.append(count)
        if (state := re.search(r"(?m)^ state +(\S.*?)  +(\S.*?) *$", screen)) and state[0] not in states:
            states.append(state[0])
        state_of_job = job.record["state"]
        assert state_of_job not in ENDED or state_of_job == "done", (screen, job.log[-6000:])
        # An earlier comparison of this node may be on the screen at first.
        return state_of_job == "done" and "both wrote the same" in " ".join(screen.split())

    poll(over, "the verdict")
    for done in seen.values():
        assert done == sorted(done) and done[0] == 0 and any(0 < count < SAMPLES for count in done), seen
    assert any("> running" in line and ". waiting" in line for line in states), states
    assert any("* done" in line and "+ starting" in line for line in states), states

    result = job.wait("done")["result"]
    screen = terminal.screen
    assert " ".join(result["verdict"]["sentence"].split()[:6]) in " ".join(screen.split())
    assert "parity good" in screen and "N/A" in re.search(r"samples/joule.*", screen)[0]
    terminal.keys("d", "End")
    terminal.wait_for("worst sample")
    for layer_id in LAYERS:
        terminal.wait_for(rf" {layer_id} +[\d.]+ % .* good")
    assert json.loads((output / "compare.json").read_text())["verdict"] == result["verdict"]

    terminal.keys("Escape")
    terminal.wait_for("made +node")  # only then: a terminal takes an Escape and a letter right after it for one key
    terminal.keys("l")
    terminal.wait_for(rf"\[3 Logs\](?s:.*){job.id}")
    terminal.keys("q")
    poll(lambda: terminal.dead, "the console's end")
    assert terminal.exit_code == 0
    assert job.processes() == []
