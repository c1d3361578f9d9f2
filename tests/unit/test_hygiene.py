"""The layers hold at run time too: what is imported is asked of a new interpreter, not of a diagram."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("backends", "dflash_tui")
MOST_LINES = 400

# What of ours does I/O, runs threads or draws: nothing of `fleet` may need it.
NOT_FLEET = ("dflash_tui.link", "dflash_tui.app", "dflash_tui.node", "dflash_tui.cli", "dflash_tui.config", "backends")
HEAVY = ("torch", "transformers", "datasets", "paramiko")


def loaded_by(*modules: str) -> set[str]:
    """Every module that is loaded once `modules` are imported."""
    code = f"import sys, json, {', '.join(modules)}\nprint(json.dumps(sorted(sys.modules)))"
    # A test runner that measures coverage must not load anything into that interpreter.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def among(names: tuple[str, ...], loaded: set[str]) -> list[str]:
    return [name for name in names if any(module == name or module.startswith(f"{name}.") for module in loaded)]


def modules_of(package: str) -> list[str]:
    """The dotted names of all modules in a folder of the project."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name != "__main__.py"]
    return [name.removesuffix(".__init__") for name in names]


def tracked() -> list[Path]:
    """The files of the project, as git knows them."""
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("module", ["dflash_tui.cli", "dflash_tui.app", "dflash_tui.app.app", "dflash_tui.link"])
def test_the_console_loads_neither_torch_nor_paramiko(module: str) -> None:
    assert among(HEAVY, loaded_by(module)) == []


@pytest.mark.parametrize("module", ["dflash_tui.cli", "dflash_tui.app", "dflash_tui.link"])
def test_textual_is_loaded_only_where_something_is_drawn(module: str) -> None:
    assert among(("textual",), loaded_by(module)) == []


@pytest.mark.parametrize("module", ["backends", "backends.spec", "backends.events", "backends.runner"])
def test_what_describes_and_runs_jobs_loads_no_torch(module: str) -> None:
    assert among((*HEAVY, "textual", "dflash_tui"), loaded_by(module)) == []


def test_fleet_loads_nothing_of_ours_that_does_io_and_nothing_that_draws() -> None:
    loaded = loaded_by(*modules_of("dflash_tui/fleet"))
    assert among((*NOT_FLEET, "textual", *HEAVY), loaded) == []


def test_the_node_side_loads_nothing_but_the_standard_library() -> None:
    modules = modules_of("dflash_tui/node")
    code = (
        f"import sys, json\nsys.path.insert(0, {str(ROOT)!r})\nimport {', '.join(modules)}\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] not in sys.stdlib_module_names]))"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    foreign = {name for name in json.loads(run.stdout) if name != "__main__"}
    assert {name for name in foreign if name != "dflash_tui" and not name.startswith("dflash_tui.node")} == set()


def test_there_are_modules_to_look_at() -> None:
    assert len(modules_of("dflash_tui/fleet")) >= 4
    assert len(modules_of("dflash_tui/node")) >= 10
    assert len(tracked()) >= 100


def test_no_file_of_code_has_grown_past_400_lines() -> None:
    long = {}
    for path in tracked():
        if path.suffix in (".py", ".tcss"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MOST_LINES:
                long[str(path.relative_to(ROOT))] = lines
    assert long == {}


def test_no_file_names_a_folder_of_one_persons_machine() -> None:
    # Spelt in parts, so that this file does not name one itself.
    homes = re.compile(
        rb"/(?:%s)/(?!ops\b|user\b|you\b|me\b)[A-Za-z]" % b"|".join((b"wo" + b"rk", b"ro" + b"ot", b"Us" + b"ers"))
    )
    found = {}
    for path in tracked():
        hit = homes.search(path.read_bytes())
        if hit:
            found[str(path.relative_to(ROOT))] = hit[0].decode()
    assert found == {}


def test_no_code_is_left_to_be_written() -> None:
    # Spelt in parts for the same reason.
    unfinished = re.compile(
        "|".join((r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b", "NotImplemented" + "Error"))
    )
    found = {}
    for path in tracked():
        if path.suffix == ".py":
            hit = unfinished.search(path.read_text(encoding="utf-8"))
            if hit:
                found[str(path.relative_to(ROOT))] = hit[0]
    assert found == {}
