"""The command of a worker Python: exit statuses that a supervisor can trust, one line for each failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extraction_jobs import MAIN

from backends.spec import SPECS, SpecError


def run(
    *arguments: str, cwd: Path, text: str = "", python: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, str(MAIN), *arguments], cwd=cwd, input=text, capture_output=True, text=True, timeout=240
    )


def last_event(path: Path) -> dict[str, object]:
    event: dict[str, object] = json.loads(path.read_text().splitlines()[-1])
    return event


@pytest.mark.parametrize(
    "arguments", [(), ("dance", "x.json"), ("extract",), ("extract", "a", "--evnts", "b"), ("plan",)]
)
def test_wrong_arguments_are_usage_on_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("backends: usage: {plan,prepare,extract,verify,parity,compare,export,demo} SPEC.json")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the spec is not JSON"),
        ("[1]", "the spec must be a JSON object"),
        ('{"model": "m", "dataset": "d", "output": "o", "dtype": "int3"}', "dtype must be one of"),
        ('{"model": "m", "dataset": "d", "output": "o", "layers": [5, 2]}', "layers must rise"),
        ('{"model": "/no/model", "dataset": "d", "output": "o"}', "the model /no/model is not a folder"),
    ],
)
def test_a_bad_spec_is_exit_2_one_line_and_a_failed_event(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "spec.json").write_text(text)
    done = run("extract", "spec.json", "--events", "events.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    event = last_event(tmp_path / "events.jsonl")
    assert event["event"] == "failed"
    assert says in str(event["message"])


@pytest.mark.parametrize(
    ("verb", "fields", "says"),
    [
        (
            "verify",
            {"output": "o", "recompute": 1, "model": 5},
            "verify: model must be a text that is not empty, not 5",
        ),
        (
            "export",
            {"output": "o", "to": "t", "dataset": ""},
            "export: dataset must be a text that is not empty, not ''",
        ),
        (
            "prepare",
            {"model": "m", "output": "o", "inputs": "a.jsonl"},
            "prepare: inputs must be a list with at least one",
        ),
    ],
)
def test_a_name_that_is_no_text_and_a_text_that_is_no_list_are_refused(
    verb: str, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        SPECS[verb].from_json(fields)
    assert str(caught.value).startswith(says)


def test_a_spec_or_an_events_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("verify", "nothing.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing.json cannot be read" in done.stderr
    done = run("verify", "nothing.json", "--events", "no/folder/events", cwd=tmp_path)
    assert done.returncode == 2
    assert "no/folder/events cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", ["-S", "-IS"])
def test_a_module_of_ours_never_passes_for_a_package_of_the_python(tmp_path: Path, option: str) -> None:
    # What Python itself does for a script: its folder comes first.
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(MAIN.parent)!r}); count = len(sys.path)\n"
        f"runpy.run_path({str(MAIN)!r}, run_name='imported')\n"
        f"print({str(MAIN.parent)!r} in sys.path, sys.path.index({str(MAIN.parent.parent)!r}) == count - 1)"
    )
    done = subprocess.run(
        [sys.executable, option, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "False True\n", done.stderr
    assert run("plan", "-", cwd=tmp_path, text="{}", python=(sys.executable, option)).returncode == 0


def test_importing_specs_events_and_the_runner_loads_no_torch(tmp_path: Path) -> None:
    modules = (
        "backends, backends.spec, backends.events, backends.runner, backends.workers, backends.plan, backends.store"
    )
    code = f"import sys; sys.path.append({str(MAIN.parent.parent)!r}); import {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout == "False\n", done.stderr


def test_an_old_python_is_told_so_before_anything_of_it_breaks(tmp_path: Path) -> None:
    # Parsing must succeed on a Python that is too old, or there is a traceback instead of a line.
    import ast

    tree = ast.parse(MAIN.read_text(), feature_version=(3, 8))
    first_of_ours = next(
        place
        for place, node in enumerate(tree.body)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("backends")
    )
    check = next(
        place for place, node in enumerate(tree.body) if isinstance(node, ast.If) and "version_info" in ast.dump(node)
    )
    assert check < first_of_ours
    old = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions" / "3.8.18" / "bin" / "python"
    if old.exists():
        done = run("plan", "-", cwd=tmp_path, text="{}", python=(str(old),))
        assert json.loads(done.stdout)["error"] == f"the Python {old} is 3.8"
        assert run("extract", "x", cwd=tmp_path, python=(str(old),)).returncode == 2
