"""A node with nothing but a Python, reached through a real sshd: it says what it lacks, is set up, and works.

The one installation of the whole worker environment in the tests: from a folder of wheels, on a node without a network
and without ensurepip, killed in the middle and gone on with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.commands.outcome import Exit
from tests.e2e.harness import Done, JobFolder, Site, living, poll
from tests.vnode import VirtualNode, running_node

INSTALL_S = 1200.0  # of 1.3 GB, on a machine that others use too


@pytest.fixture(scope="session")
def wheels(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the worker's wheels, filled by the command from wherever this machine's pip takes them."""
    folder = tmp_path_factory.mktemp("wheels")
    user = Path("~").expanduser()
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_")) or "proxy" in name.lower()
    }
    for config in (user / ".config/pip/pip.conf", user / ".pip/pip.conf"):
        if config.exists():
            found.setdefault("PIP_CONFIG_FILE", str(config))
    found.setdefault("PIP_CACHE_DIR", str(user / ".cache/pip"))
    command = site.command("setup", "--download", folder, "--cpu", "--json")
    run = subprocess.run(
        command,
        env={**site.env, **found},
        cwd=site.home,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def node(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualNode]:
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder = tmp_path_factory.mktemp("bare")
    with running_node(folder, shared=[wheels], ensurepip=False, network=False, environment=environment) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Story:
    """What was seen on the way from a bare node to one that is set up."""

    doctor_before: Any
    demo_before: Done
    without_wheels: Done
    plan: Any
    killed: str
    partly: set[str]
    again: Any


@pytest.fixture(scope="module")
def story(site: Site, node: VirtualNode, wheels: Path) -> Story:
    doctor = site.run("doctor", *node.options, "--json", code=None)
    demo = site.run("demo", "--output", "/tmp/demo", *node.options, code=None)
    refused = site.run("setup", *node.options, code=None)
    plan = site.run("setup", "--plan", "--wheels", wheels, *node.options, "--json").json
    started = site.run("setup", "--wheels", wheels, "--detach", *node.options, "--json").json
    first = JobFolder(node.state / "dflash-tui", started["job"])
    poll("packages of the worker", lambda: len(packages(node)) >= 5 or first.ended, INSTALL_S)
    kill_setup(first)
    killed = first.wait_ended()
    partly = packages(node)
    assert not (node.data / "envs" / "worker").exists()
    assert "worker Python" not in str(site.run("status", *node.options, "--json").json[0]["default_python"])
    again = site.start(
        "restart", first.id, "--wait", "--json", *node.options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = again.communicate(timeout=INSTALL_S)
    done = Done(again.returncode, out.decode(), err.decode())
    assert done.code == Exit.OK, done
    return Story(doctor.json, demo, refused, plan, killed, partly, done.json)


def packages(node: VirtualNode) -> set[str]:
    """What lies in the worker environment that is being built."""
    return {path.name for path in node.data.glob("envs/.built/worker-*/lib/python3.*/site-packages/*.dist-info")}


def kill_setup(job: JobFolder) -> None:
    """kill -9 of the runner and its pip, as this side sees them."""
    runners = [pid for pid, command in living() if " setup " in command and str(job.path) in command]
    pips = [pid for pid, command in living() if "envs/.built/worker-" in command and "pip" in command]
    assert runners
    for pid in [*runners, *pips]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_bare_node_says_what_it_lacks_and_how_to_mend_it(story: Story) -> None:
    (checkup,) = story.doctor_before
    assert "dflash-tui setup --host" in str(checkup)
    assert story.demo_before.code == Exit.BAD_INPUT
    assert "install torch" in story.demo_before.line
    assert story.without_wheels.code == Exit.BAD_INPUT
    assert "neither ensurepip nor pip" in story.without_wheels.line
    assert "apt install python3-venv" in story.without_wheels.line


def test_its_plan_says_what_will_be_made_where_and_with_what(story: Story, node: VirtualNode, wheels: Path) -> None:
    (made,) = story.plan["makes"].items()
    assert made[0] == "worker"
    assert {pin.partition("==")[0] for pin in made[1]} == {"torch", "transformers", "datasets", "safetensors", "numpy"}
    assert story.plan["where"] == str(node.data / "envs")
    assert story.plan["pip_from"].startswith(str(wheels))
    assert story.plan["bytes_total"] > 10**9


def test_a_setup_that_was_killed_goes_on_and_its_environment_works(story: Story, node: VirtualNode) -> None:
    assert story.killed == "killed"
    assert len(story.partly) >= 5
    (record,) = story.again["result"]["environments"]
    assert (record["name"], record["made"]) == ("worker", True)
    assert record["versions"]["torch"].startswith("2.")
    assert record["versions"]["transformers"].startswith("5.")
    job = JobFolder(node.state / "dflash-tui", story.again["job"])
    assert "venv --without-pip" not in job.log, "it was begun anew"
    assert "Requirement already satisfied" in job.log


def test_the_demo_runs_there_with_no_python_named(story: Story, site: Site, node: VirtualNode) -> None:
    (status,) = site.run("status", *node.options, "--json").json
    assert status["default_python"] == story.again["result"]["worker_python"]
    done = site.run("demo", "--output", "/tmp/demo", "--samples", 20, "--recompute", 2, *node.options, "--json").json
    assert done["verified"] == done["samples"] > 0


def test_a_node_that_is_set_up_is_left_alone(story: Story, site: Site, node: VirtualNode, wheels: Path) -> None:
    done = site.run("setup", "--wheels", wheels, *node.options, "--json").json
    (record,) = done["result"]["environments"]
    assert not record["made"]
    assert record["created"] == story.again["result"]["environments"][0]["created"]
