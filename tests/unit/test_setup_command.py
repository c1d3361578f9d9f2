"""What `dflash-tui setup` refuses before it touches a node or an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_tui import cli
from dflash_tui.commands.outcome import Exit


@pytest.fixture(autouse=True)
def a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--read-only"], "read-only"),
        (["--vllm", "new"], "'new'"),
        (["--torch", "jax==1"], "'jax==1'"),
        (["--host", "gpu-1", "--wheels", "wheels"], "'wheels' is no whole path"),
        (["--host", "gpu-1", "--host", "gpu-2"], "gpu-1, gpu-2"),
        (["--pins", "nowhere.toml"], "nowhere.toml"),
        (["--node-python", "3.12"], "--download"),
        (["--cpu"], "--download"),
        (["--download", "w", "--node-python", "3.8"], "'3.8'"),
        (["--download", "w", "--node-python", "new"], "'new'"),
        (["--download", "file/w"], "file/w"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it_and_code_2(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(["setup", *words]) == Exit.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("worker = [", "no TOML"),
        ('worker = "torch"', "a list of requirements"),
        ('trainer = ["torch"]', "'trainer', which is not made here"),
        ('worker = ["-r other"]', "'-r other'"),
    ],
)
def test_pins_that_cannot_be_are_one_line_that_names_them(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pins.toml"
    file.write_text(text)
    assert cli.main(["setup", "--pins", str(file)]) == Exit.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_download_that_fails_says_what_pip_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(empty)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    assert cli.main(["setup", "--download", str(tmp_path / "w"), "--cpu"]) == Exit.FAILED
    assert "no wheel of" in capsys.readouterr().err.splitlines()[-1]
