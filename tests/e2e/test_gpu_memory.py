"""`stop --wait` and `jobs` say what became of the memory of a job's GPUs, by a real agent and a recorded nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import end_everything_of
from tests.e2e.harness import Site, poll

FAKES = Path(__file__).parents[1] / "fakes"
RECORDING = Path(__file__).parents[1] / "data" / "gpu" / "h200.json"

# Without CUDA the commands plan no job for a card: this one is launched by the link, and ends soon for want of a model.
LAUNCH = """
import sys
from dflash_tui.link import LinkOptions, NodeLink, new_job_id, parse_target
from dflash_tui.node.protocol import Launch
link = NodeLink(parse_target("local"), lambda fact: None, LinkOptions(default_python=sys.executable))
link.start()
link.wait_live(120)
launch = Launch("gpus", "prepare", "", {"model": "/nowhere", "inputs": ["/nowhere"], "output": "/nowhere"}, ("0", "1"))
print(link.launch(new_job_id("prepare"), launch).result(120).id)
link.close()
"""


@pytest.fixture
def own_site(tmp_path: Path):
    site = Site(
        tmp_path / "home",
        DFLASH_TUI_FAKE_SMI=str(RECORDING),
        DFLASH_TUI_FAKE_GPUS="2",
        DFLASH_TUI_FAKE_SMI_PHASE="idle",
        DFLASH_TUI_FAKE_SMI_NOW=str(tmp_path / "cards.json"),
    )
    site.env["PATH"] = f"{FAKES}{os.pathsep}{site.env['PATH']}"
    yield site
    end_everything_of(site.home)


def test_stop_and_jobs_tell_whether_the_memory_is_freed_and_who_has_it(own_site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCH]
    launched = subprocess.run(command, env=own_site.env, capture_output=True, text=True, check=False)
    assert launched.returncode == 0, launched.stderr
    job = launched.stdout.strip()
    poll("its end", lambda: own_site.run("jobs", "--json").json[0]["jobs"][0]["state"] == "failed" or None)
    told = own_site.run("stop", job, "--wait").out
    assert told.splitlines() == [f"{job}: had ended already, failed", "GPU memory: freed on GPU 0, 1"]
    (tmp_path / "cards.json").write_text(json.dumps({"1": {"used_mib": 72_909}}))
    line = "freed on GPU 0; GPU 1: 71.2 GiB still held by a process outside this container"
    poll("the next reading", lambda: f"GPU memory: {line}\n" in own_site.run("stop", job, "--wait").out or None)
    zero, one = own_site.run("stop", job, "--wait", "--json").json["gpu_memory"]
    assert (zero["freed"], one["freed"], one["used_bytes"]) == (True, False, 72_909 << 20)
    poll("the table of jobs", lambda: f"(GPU memory: {line})" in own_site.run("jobs").out or None)
