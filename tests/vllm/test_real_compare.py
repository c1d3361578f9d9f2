"""Both backends on the same samples, started by the command: its console is killed, and the comparison comes to its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node.protocol import ENDED
from tests.vllm.real_node import EAGER, LAYERS, Job, Site, poll

# Enough packs and batches of both for an interval.
SAMPLES = 200


class Compared:
    """A comparison whose console was killed with the first side at work; what its job says at the end."""

    def __init__(self, site: Site) -> None:
        output = site.folder / "compared"
        known = {record["job"] for record in site.agent.ask("list")["jobs"]}
        words = ("--model", site.data.dense, "--dataset", site.data.conversations, "--output", str(output))
        more = ("--samples", str(SAMPLES), "--device", "cpu", "--vllm-python", site.python, "--min-free-bytes", "0")
        console = site.start("compare", *words, *more, "--", *EAGER)

        def started() -> dict[str, Any] | None:
            assert console.poll() is None, console.communicate()
            new = [record for record in site.agent.ask("list")["jobs"] if record["job"] not in known]
            return next((record for record in new if record["sides"]), None)

        try:
            self.early = poll(started, "a side to be told of")
        finally:
            console.kill()
            console.communicate()
        self.job = Job(site, self.early["job"], {"output": str(output)})
        self.after_the_kill = self.job.record
        self.record = self.job.wait("done")
        self.result: dict[str, Any] = self.record["result"]
        self.listed = json.loads(site.command("compare", "--list", "--json").stdout)
        self.shown = site.command("compare", "--show", self.job.id)


@pytest.fixture(scope="module")
def compared(site: Site) -> Compared:
    return Compared(site)


def test_a_comparison_survives_its_console_and_ends_with_a_verdict(compared: Compared) -> None:
    assert compared.early["state"] == "running" and compared.after_the_kill["state"] not in ENDED
    verdict = compared.result["verdict"]
    assert verdict["faster"] in ("hf", "vllm") or "no difference" in verdict["sentence"] or verdict["faster"] is None
    assert 0 < verdict["low"] <= verdict["ratio"] <= verdict["high"]
    assert verdict["sentence"].strip() and "\n" not in verdict["sentence"]
    assert {name: side["samples"] for name, side in compared.result["sides"].items()} == {
        "hf": SAMPLES,
        "vllm": SAMPLES,
    }
    for side in compared.result["sides"].values():
        low, high = side["interval"]
        assert 0 < low <= side["samples_per_s"] <= high
        assert side["joules"] is None and side["startup_s"] > 0
    assert {name: side["state"] for name, side in compared.record["sides"].items()} == {"hf": "done", "vllm": "done"}


def test_both_sides_of_a_comparison_wrote_the_same(compared: Compared) -> None:
    parity = compared.result["parity"]
    assert (parity["verdict"], parity["reasons"]) == ("good", [])
    assert list(parity["layers"]) == [str(layer_id) for layer_id in LAYERS]
    report = json.loads((Path(compared.result["output"]) / "compare.json").read_text())
    assert report["verdict"]["sentence"] == compared.result["verdict"]["sentence"]


def test_a_past_comparison_is_listed_and_shown(compared: Compared) -> None:
    (entry,) = [entry for entry in compared.listed if entry["job"] == compared.job.id]
    assert entry["sentence"] == compared.result["verdict"]["sentence"] and entry["state"] == "done"
    assert compared.shown.returncode == 0, compared.shown.stderr
    assert compared.result["verdict"]["sentence"] in " ".join((compared.shown.stdout + compared.shown.stderr).split())


def test_a_comparison_leaves_no_process_behind(compared: Compared) -> None:
    assert compared.job.processes() == []
    assert compared.job.site.temporary_files() == []
    assert not list(Path(compared.result["output"]).rglob("*.safetensors"))
