"""`dflash-tui diagnose` on a file: what it prints and how it exits. No node is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_tui import cli
from dflash_tui.commands.outcome import Exit

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
FAILED = LOGS / "v0.20.1-hybrid-page-size.log"


@pytest.fixture(autouse=True)
def a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_a_failure_is_told_in_four_lines_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(FAILED)]) == Exit.FAILED
    cause, line, source, remedy = capsys.readouterr().out.splitlines()
    assert cause.startswith("failed: this vLLM") and cause.endswith("[vllm-hybrid-page-size]")
    assert line.startswith("  line 117: (EngineCore pid=8591) ERROR")
    assert source.endswith("/vllm/v1/core/kv_cache_utils.py:1035")
    assert remedy.startswith("-> use vLLM 0.22.0 or later")


def test_for_scripts_it_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(FAILED), "--json"]) == Exit.FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(FAILED)
    assert (found["cause"]["id"], found["cause"]["line"]) == ("vllm-hybrid-page-size", 117)
    assert found["cause"]["text"] and found["remedy"] and found["source"]["line"] == 1035
    assert found["skipped_bytes"] == 0 and found["lines"] == len(FAILED.read_bytes().splitlines())


def test_a_log_without_a_failure_is_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(LOGS / "v0.26.0-h200-hybrid-ok-then-stopped.log")]) == Exit.OK
    assert capsys.readouterr().out == "no failure in 536 lines\n"


def test_what_cannot_be_read_is_one_line_that_names_it_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, why in ((tmp_path, "not a regular file"), (tmp_path / "none", "No such file"), ("x.log", "No such file")):
        assert cli.main(["diagnose", str(path)]) == Exit.BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert str(path) in line and why in line


def test_what_a_log_holds_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(
        b'Traceback (most recent call last):\n  File "/a\x1b]0;x\x07.py", line 1, in f\n    f()\n'
        b"ValueError: \x1b[2Jgone \xe2\x80\xae\x9b2J\xc2\x9b\n"
    )
    assert cli.main(["diagnose", str(log)]) == Exit.FAILED
    out = capsys.readouterr().out
    assert "gone" in out and not set(out) & {"\x1b", "\x9b", "\u202e", "\x07"}
