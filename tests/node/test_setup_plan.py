"""What a setup refuses before it begins, what it makes of pip's complaints, and where the agent takes its Python from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node.setup import places, pythons
from dflash_tui.node.setup.pip import cause_of
from dflash_tui.node.setup.spec import Refusal, SetupSpec
from tests.node.client import Client


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"vlm": "0.26.0"}, "'vlm'"),
        ({"vllm": "--pre"}, "'--pre'"),
        ({"vllm": 26}, "26"),
        ({"torch": "jax"}, "'jax'"),
        ({"torch": "torch-scatter"}, "'torch-scatter'"),
        ({"trainer": "yes"}, "'yes'"),
        ({"pins": ["torch"]}, "['torch']"),
        ({"pins": {"trainer": ["x"]}}, "'trainer'"),
        ({"pins": {"worker": []}}, "worker"),
        ({"pins": {"worker": ["--index-url=x"]}}, "'--index-url=x'"),
        ({"pins": {"worker": ["a\nb"]}}, "a\\nb"),
    ],
)
def test_a_spec_that_cannot_be_is_one_line_that_names_it(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(Refusal) as refused:
        SetupSpec.from_json(spec)
    assert named in refused.value.message
    assert "\n" not in refused.value.message


def test_a_spec_is_the_same_after_its_journey() -> None:
    spec = SetupSpec("0.26.0", True, "torch==2.12.0", "python3.12", "/w", {"worker": ["torch"]})
    assert SetupSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.names == ["worker", "vllm-0.26.0", "trainer"]


# What pip 23.2 and 26.3 print, shortened.
RETRY = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<HTTPSConnection>: Failed to "
    "establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/"
)
NONE = "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)"
SOME = (
    "ERROR: Could not find a version that satisfies the requirement torch==9.9 (from versions: 2.11.0, 2.12.0, 2.13.0)"
)
NO_MATCH = "ERROR: No matching distribution found for torch==2.13.0"


@pytest.mark.parametrize(
    ("lines", "wheels", "message", "remedy"),
    [
        ([RETRY, NONE, NO_MATCH], "", "index cannot be reached", "--wheels"),
        ([NONE, NO_MATCH], "", "no wheel of torch==2.13.0 for Python 3.13.1", "--python"),
        (
            [SOME, NO_MATCH],
            "",
            "torch==9.9 has no wheel for Python 3.13.1 on this machine (there are 2.11.0",
            "--torch",
        ),
        ([NONE, NO_MATCH], "/data/w", "/data/w has no wheel of torch==2.13.0 for Python 3.13.1", "--node-python 3.13"),
        (
            ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"],
            "",
            "no space",
            "free",
        ),
        (["SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", NONE], "", "certificate", "PIP_CERT"),
        (
            ["ERROR: Cannot install a==1 and b==2 because these package versions have conflicting dependencies."],
            "",
            "a==1 and b==2 cannot be had together",
            "--pins",
        ),
        (
            ["  error: metadata-generation-failed", "ERROR: Failed building wheel for fast-io"],
            "",
            "fast-io",
            "--python",
        ),
        (["what nobody has seen before"], "", "pip failed: what nobody has seen before", "log"),
        ([], "", "it said nothing", "log"),
    ],
)
def test_what_pip_complains_of_becomes_a_cause_and_a_remedy(
    lines: list[str], wheels: str, message: str, remedy: str
) -> None:
    cause = cause_of(lines, "worker", "3.13.1", wheels)
    assert message in cause.message
    assert remedy in cause.remedy


def program(path: Path, answer: str) -> Path:
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_the_first_python_on_the_path_that_is_new_enough_is_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    program(tmp_path / "python3.12", """echo 'dflash-tui ["/old", "3.8.18", 1, "", 1]'""")
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = pythons.find()
    assert found.version == "{}.{}.{}".format(*sys.version_info[:3])
    assert Path(found.path).resolve() == Path(sys.executable).resolve()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("""echo 'dflash-tui ["/old", "3.8.18", 1, "", 1]'""", "is 3.8.18, and 3.11 is the oldest that works"),
        ("""echo 'dflash-tui ["/new", "3.12.1", 0, "", 1]'""", "has no module venv"),
        ("echo nonsense", "does not run"),
        ("echo 'cannot load' >&2; exit 1", "does not run: cannot load"),
    ],
)
def test_a_base_python_that_cannot_be_one_is_refused_with_the_reason(tmp_path: Path, answer: str, named: str) -> None:
    path = program(tmp_path / "py", answer)
    with pytest.raises(Refusal) as refused:
        pythons.find(str(path))
    assert named in refused.value.message
    assert str(path) in refused.value.message


def test_a_python_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        pythons.find(str(tmp_path / "python9"))
    assert "python9" in refused.value.message


def whole_environment(data: Path) -> Path:
    """The files by which an environment counts; its Python is this one."""
    folder = data / "dflash-tui" / "envs" / ".built" / "worker-0123456789"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "env.json").write_text(json.dumps({"name": "worker", "requirements": []}))
    (data / "dflash-tui" / "envs" / "worker").symlink_to(".built/worker-0123456789")
    return folder


def test_the_agents_worker_python_is_the_named_one_then_the_environments_then_the_fallback(
    connect: Callable[..., Client], environment: dict[str, str], tmp_path: Path
) -> None:
    env = {**environment, "XDG_DATA_HOME": str(tmp_path / "data")}
    assert connect(env=env, default_python="").push("hello")["default_python"].endswith("python3")
    folder = whole_environment(tmp_path / "data")
    assert connect(env=env, default_python="").push("hello")["default_python"] == str(folder / "bin" / "python")
    assert connect(env=env).push("hello")["default_python"] == sys.executable
    (folder / "env.json").unlink()
    assert connect(env=env, default_python="").push("hello")["default_python"].endswith("python3")


def test_an_environment_whose_base_python_is_gone_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = whole_environment(tmp_path)
    assert places.worker_python() == str(folder / "bin" / "python")
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to(tmp_path / "gone")
    assert places.worker_python() == ""
    assert places.whole() == []
