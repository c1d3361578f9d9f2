"""What the user has settled once: `config.toml` in the user's configuration folder, overridden by flags.

hosts = ["gpu-1", "me@10.0.0.2:2222"]
theme = "dark"
read_only = false
refresh = 1.0                        # seconds between two drawings of the metrics
ssh_config = "~/.ssh/config"

[python]                             # the worker Python of a host; "*" for every other one
gpu-1 = "/opt/worker/bin/python"

[env]                                # of every job, on its node
HF_HOME = "/data/huggingface"
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from dflash_tui.node.secrets import NAMES as SECRETS
from dflash_tui.node.secrets import SERVER_KEY

APP = "dflash-tui"
CONFIG_VARIABLE = "DFLASH_TUI_CONFIG"
LOCAL = "local"
EVERY_HOST = "*"


class ConfigError(ValueError):
    """A configuration file that cannot be used: one line with the file, the key and the remedy."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the console and the commands go by.

    hosts: as the user typed them; empty where none is configured.
    theme: name of a theme, "" for the default one.
    python: worker Python by host, `EVERY_HOST` for those not named; ask `python_for`.
    refresh: seconds between two drawings of the metrics.
    screen: the screen that the console opens on.
    env: variables of the jobs that are started; those of `--env` over those of the file.
    hf_token: the hub's token where an option names one; it is never shown: see `hftoken`.
    """

    hosts: tuple[str, ...] = ()
    theme: str = ""
    read_only: bool = False
    ssh_config: Path | None = None
    python: Mapping[str, str] = field(default_factory=dict)
    refresh: float = 1.0
    accept_new_host_key: bool = False
    screen: str = "fleet"
    env: Mapping[str, str] = field(default_factory=dict)
    hf_token: str = field(default="", repr=False)

    def python_for(self, host: str) -> str | None:
        """The worker Python of a host; None leaves it to the node's own `python3`."""
        chosen = self.python.get(host) or self.python.get(EVERY_HOST)
        if chosen:
            return chosen
        return sys.executable if host == LOCAL else None


def config_file() -> Path:
    """Where `config.toml` is looked for: `DFLASH_TUI_CONFIG`, else the user's configuration folder."""
    named = os.environ.get(CONFIG_VARIABLE)
    return Path(os.path.expanduser(named)) if named else Path(platformdirs.user_config_dir(APP)) / "config.toml"


def state_dir() -> Path:
    """Where the console itself keeps files (crash reports)."""
    return Path(platformdirs.user_state_dir(APP))


def load(path: Path | None = None) -> Settings:
    """The settings of a file; the defaults where there is none. Raises ConfigError."""
    file = path or config_file()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is not None or os.environ.get(CONFIG_VARIABLE):
            raise ConfigError(f"{file}: there is no such file; make it, or unset {CONFIG_VARIABLE}") from None
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}; make it readable or name another one in {CONFIG_VARIABLE}"
        ) from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}; mend that line") from None
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in _KEYS:
            raise ConfigError(f"{file}: no setting is called {key!r}; the settings are {', '.join(_KEYS)}")
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            shown = "" if key == "env" else f", not {value!r}"  # a token that stands there by mistake is not shown
            raise ConfigError(f"{file}: {key} must be {error}{shown}") from None
    return Settings(**values)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text that is not empty")
    return value


def _hosts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(host, str) and host for host in value):
        raise ValueError('a list of hosts, as ["gpu-1", "me@10.0.0.2:2222"]')
    return tuple(dict.fromkeys(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _path(value: Any) -> Path:
    return Path(os.path.expanduser(_text(value)))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.1 <= value <= 3600:
        raise ValueError("a number of seconds from 0.1 to 3600")
    return float(value)


def _pythons(value: Any) -> dict[str, str]:
    if isinstance(value, str) and value:
        return {EVERY_HOST: value}
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value.values()):
        raise ValueError('the path of a Python, or a table of them, as gpu-1 = "/opt/worker/bin/python"')
    return value


def variables(value: Any) -> dict[str, str]:
    """Environment variables of jobs. Raises ValueError, which shows no value of a secret."""
    if not isinstance(value, dict) or not all(isinstance(text, str) and "\0" not in text for text in value.values()):
        raise ValueError('a table of texts, as HF_HOME = "/data/huggingface"')
    for name in value:
        if not name or "=" in name:
            raise ValueError("a table of variables with names")
        if name in SECRETS:
            other = (
                "it is taken from this console's own environment"
                if name == SERVER_KEY
                else "a token goes by --hf-token-file"
            )
            raise ValueError(f"without {name}, for it is kept in files ({other})")
    return value


_KEYS: dict[str, Callable[[Any], Any]] = {
    "hosts": _hosts,
    "theme": _text,
    "read_only": _flag,
    "ssh_config": _path,
    "python": _pythons,
    "refresh": _seconds,
    "env": variables,
}
