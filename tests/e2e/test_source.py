"""A launch that fails shows why on the Jobs screen, and one key opens the line of the source that raised it; by keys alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher, Shared
from tests.e2e.harness import JobFolder, Site, Terminal, poll

BROKEN = '''"""A vLLM whose engine does not start."""


def check(arguments):
    # What a user wants to see of it.
    raise ValueError("the engine of this vLLM is broken")


def main():
    check(["serve"])


if __name__ == "__main__":
    main()
'''
RAISED_AT = 1 + BROKEN[: BROKEN.index("raise ValueError")].count("\n")


@pytest.fixture
def broken_vllm(tmp_path: Path) -> tuple[Path, Path]:
    """A Python that has a vLLM which raises when its server starts; that Python, and the module that raises."""
    packages = tmp_path / "packages"
    cli = packages / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    for folder in (cli, cli.parent, cli.parent.parent):
        (folder / "__init__.py").touch()
    (cli / "main.py").write_text(BROKEN)
    installed = packages / "vllm-0.26.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python, cli / "main.py"


@pytest.fixture
def failed(launch: Launcher, shared: Shared, broken_vllm: tuple[Path, Path], tmp_path: Path) -> JobFolder:
    job = launch(
        *shared.extract(tmp_path / "out", "--backend", "vllm", "--vllm-python", broken_vllm[0], "--last", 4),
        "--env",
        "WANDB_API_KEY=a-secret-value",
    )
    assert job.wait_ended() == "failed", job.log
    return job


def test_a_failing_launch_shows_its_cause_and_one_key_opens_the_line_that_raised_it(
    failed: JobFolder, broken_vllm: tuple[Path, Path], terminal: Callable[..., Terminal], site: Site
) -> None:
    source = broken_vllm[1]
    console = terminal(200, 60, "--host", "local")
    console.wait_for("1/1 nodes live")
    console.keys("j")
    console.wait_for(rf"{failed.id}(?s:.*)the engine of this vLLM is broken")
    console.wait_for(rf"raised at +{re.escape(str(source))}:{RAISED_AT}")
    console.wait_for("s Source")
    console.keys("s")
    console.wait_for(rf"(?m)^> +{RAISED_AT} │    raise ValueError\(\"the engine of this vLLM is broken\"\)")
    console.wait_for(rf"{re.escape(str(source))}:{RAISED_AT} on local")
    console.keys("/")
    console.wait_for("look for a regular expression")
    console.type("def main")
    console.keys("Enter")
    console.wait_for(rf"of {len(BROKEN.splitlines())} *\n +/ Search")  # the question between them is gone
    console.keys("n")
    console.wait_for("went on from the other end")
    # One at a time: a terminal takes Escape and a key close after it for one key with Alt.
    console.keys("Escape")
    poll("the search to end", lambda: "went on" not in console.screen)
    console.keys("Escape")
    console.wait_for(r"\[2 Jobs\]")

    # From the log: its last traceback, frame by frame.
    console.keys("l")
    console.wait_for(r"\[3 Logs\](?s:.*)the engine of this vLLM is broken(?s:.*)following")
    console.keys("[")
    console.wait_for(rf"frame …\S+/cli/main.py:{RAISED_AT}")
    console.keys("s")
    console.wait_for(r"frame \d+ of \d+")
    console.wait_for(rf"(?m)^> +{RAISED_AT} │")
    console.keys("[")
    console.wait_for(r"(?m)^> +\d+ │    check\(\[\"serve\"\]\)")
    console.keys("Escape")
    console.wait_for(r"\[3 Logs\]")

    # And how it was started, without the secret.
    console.keys("j")
    console.wait_for(r"\[2 Jobs\]")
    console.keys("i")
    console.wait_for(rf"command of {failed.id}")
    console.wait_for(r'WANDB_API_KEY="\$WANDB_API_KEY"')
    console.wait_for(rf"│    {re.escape(str(failed.path))}/spec.json \\")
    console.wait_for(r"vllm\.entrypoints\.cli\.main serve")
    assert "a-secret-value" not in console.screen


def test_the_same_without_screens(failed: JobFolder, broken_vllm: tuple[Path, Path], site: Site) -> None:
    python, source = broken_vllm
    told = site.run("diagnose", failed.id, "--json", code=1).json
    assert told["source"] == {"file": str(source), "line": RAISED_AT}
    read = site.run("read", f"{source}:{RAISED_AT}", "--context", 0)
    assert read.out == '    raise ValueError("the engine of this vLLM is broken")\n'
    assert site.run("read", f"{source}:900", code=2).line.endswith(
        f"{source} has no line 900: it has {len(BROKEN.splitlines())} lines: name one from 1 to {len(BROKEN.splitlines())}"
    )
    shown = site.run("show", failed.id, "--json").json
    assert shown["argv"][0] == sys.executable and shown["argv"][3] == "extract"
    assert shown["environment"]["WANDB_API_KEY"] is None and "a-secret-value" not in str(shown)
    (server,) = shown["servers"]
    assert server["argv"][:5] == [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(shared_model(failed))]
    assert shown["versions"]["vllm"] == "0.26.0" and shown["versions"]["torch"]
    assert b"a-secret-value" not in (failed.path / "command.json").read_bytes()


def shared_model(job: JobFolder) -> str:
    return str(job.json("spec.json")["model"])
