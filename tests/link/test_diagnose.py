"""The request `diagnose` through a real local agent, as the command asks it, and what is made of any answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_tui import cli
from dflash_tui.commands.outcome import Exit
from dflash_tui.fleet.facts import Cause, Source
from dflash_tui.link import LinkError, diagnose

LOG = Path(__file__).resolve().parents[1] / "data" / "logs" / "v0.32.0-cpu-prefix-caching.log"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "STATE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


def test_a_log_of_a_node_and_a_job_that_is_none_are_told_by_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(LOG, tmp_path / "server.log")
    host = ["--host", "local"]
    assert cli.main(["diagnose", str(tmp_path / "server.log"), *host, "--json"]) == Exit.FAILED
    found = json.loads(capsys.readouterr().out)
    assert (found["host"], found["cause"]["id"], found["cause"]["line"]) == ("local", "vllm-hybrid-prefix-caching", 189)
    assert cli.main(["diagnose", str(tmp_path / "none"), *host]) == Exit.BAD_INPUT
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["diagnose", "20261130-0255", *host]) == Exit.NOT_FOUND
    assert "no job '20261130-0255'" in capsys.readouterr().err


def test_odd_answers_become_facts_that_cannot_steer_a_terminal_or_are_told_as_none() -> None:
    odd = {"failed": True, "cause": {"text": "a\x1b[2J\nb", "line": "7"}, "source": {"file": "/a.py"}, "lines": None}
    found = diagnose.diagnosis(odd)
    assert found.cause == Cause("unknown", "a[2J b", None, "")
    assert (found.source, found.remedy, found.lines) == (None, None, 0)
    whole = diagnose.diagnosis({"failed": True, "cause": None, "source": {"file": "/a.py", "line": 3}, "remedy": "x"})
    assert (whole.cause, whole.source, whole.remedy) == (None, Source("/a.py", 3), "x")
    with pytest.raises(LinkError, match="no diagnosis"):
        diagnose.diagnosis({"cause": {}})
