"""config.toml: what it settles, and the one line that each fault in it gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_tui.config import ConfigError, Settings, config_file, load


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_TUI_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_file() == tmp_path / "dflash-tui" / "config.toml"
    assert load() == Settings()


def test_a_file_in_the_configuration_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_TUI_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "dflash-tui").mkdir()
    write(tmp_path / "dflash-tui", 'hosts = ["a"]')
    assert load().hosts == ("a",)


def test_every_setting_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(
        tmp_path,
        """
        hosts = ["gpu-1", "me@10.0.0.2:2222", "gpu-1"]
        theme = "chalk"
        read_only = true
        refresh = 0.5
        ssh_config = "~/work.ssh"
        [python]
        gpu-1 = "/opt/one/bin/python"
        "*" = "/opt/any/bin/python"
        """,
    )
    monkeypatch.setenv("DFLASH_TUI_CONFIG", str(file))
    settings = load()
    assert settings.hosts == ("gpu-1", "me@10.0.0.2:2222")
    assert (settings.theme, settings.read_only, settings.refresh) == ("chalk", True, 0.5)
    assert settings.ssh_config == tmp_path / "work.ssh"
    assert settings.python_for("gpu-1") == "/opt/one/bin/python"
    assert settings.python_for("me@10.0.0.2:2222") == "/opt/any/bin/python"


def test_the_local_node_works_with_the_console_s_own_python_and_others_with_theirs() -> None:
    assert Settings().python_for("local") == sys.executable
    assert Settings().python_for("gpu-1") is None
    assert Settings(python={"*": "/p"}).python_for("local") == "/p"


def test_one_python_may_serve_every_host(tmp_path: Path) -> None:
    assert load(write(tmp_path, 'python = "/opt/bin/python"')).python_for("any") == "/opt/bin/python"


@pytest.mark.parametrize(
    ("text", "named", "remedy"),
    [
        ("hosts = [", "is not TOML", "line"),
        ("host = ['a']", "'host'", "hosts, theme"),
        ("hosts = 'a'", "hosts", "list of hosts"),
        ("hosts = ['']", "hosts", "list of hosts"),
        ("hosts = [1]", "hosts", "list of hosts"),
        ("theme = 3", "theme", "text"),
        ("theme = ''", "theme", "text"),
        ("read_only = 'yes'", "read_only", "true or false"),
        ("refresh = 0", "refresh", "from 0.1 to 3600"),
        ("refresh = true", "refresh", "from 0.1 to 3600"),
        ("refresh = nan", "refresh", "from 0.1 to 3600"),
        ("ssh_config = false", "ssh_config", "text"),
        ("python = ['a']", "python", "table"),
        ("[python]\ngpu-1 = 3", "python", "table"),
    ],
)
def test_a_fault_is_one_line_with_the_file_the_key_and_the_remedy(
    tmp_path: Path, text: str, named: str, remedy: str
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    line = str(caught.value)
    assert "\n" not in line
    assert str(file) in line
    assert named in line
    assert remedy in line


def test_a_file_that_was_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TUI_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        load()


@pytest.mark.parametrize("kind", ["a folder", "no UTF-8"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "config.toml"
    if kind == "a folder":
        file.mkdir()
    else:
        file.write_bytes(b"theme = '\xff'")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        load(file)
