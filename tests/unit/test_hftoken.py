"""Where the hub's token is looked for, with which jobs it goes, and that nothing shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_tui import cli, hftoken
from dflash_tui.commands.nodes import input_on, model_on
from dflash_tui.commands.outcome import CommandError
from dflash_tui.config import ConfigError, Settings

HUB: dict[str, Any] = {"model": "org/name", "dataset": "/d", "output": "/o"}
FOLDER = {**HUB, "model": "/m"}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN",
                 "VLLM_API_KEY"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def token(spec: dict[str, Any] = HUB, verb: str = "extract", settings: Settings | None = None) -> str | None:
    return hftoken.secrets_for(verb, spec, settings or Settings()).get("HF_TOKEN")


def test_the_first_of_option_environment_and_login_is_taken(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token() is None
    (own_home / "huggingface").mkdir()
    (own_home / "huggingface" / "token").write_text("hf_login\n")
    assert token() == "hf_login"
    monkeypatch.setenv("HF_HOME", str(own_home / "elsewhere"))
    assert token() is None
    monkeypatch.setenv("HF_TOKEN_PATH", str(own_home / "huggingface" / "token"))
    assert token() == "hf_login"
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    assert token() == "hf_environment"
    assert token(settings=Settings(hf_token="hf_option")) == "hf_option"
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert token() is None
    assert token(settings=Settings(hf_token="hf_option")) == "hf_option"


def test_it_goes_only_with_what_names_something_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert token(FOLDER) is None
    chats = {"model": "/m", "inputs": ["hf://datasets/org/chats"], "output": "/o"}
    assert token(chats, "prepare") == "hf_x"
    assert token({**chats, "inputs": ["/a.jsonl"]}, "prepare") is None
    assert token({"output": "/o", "recompute": 1}, "verify") is None
    assert token({"output": "/o", "recompute": 1}, "verify", Settings(hf_token="hf_option")) == "hf_option"
    assert token({"output": "/o", "model": "org/name"}, "verify") is None  # the model is not looked at
    assert token({"anything": 1}, "setup") is None


def test_a_servers_key_goes_only_with_a_job_that_names_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    named = {**FOLDER, "backend": "vllm", "server_url": "http://gpu-1:8000"}
    assert hftoken.secrets_for("extract", named, Settings()) == {"VLLM_API_KEY": "the-key"}
    assert hftoken.secrets_for("extract", {**FOLDER, "backend": "vllm"}, Settings()) == {}
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    of_both = {**named, "model": HUB["model"]}
    assert hftoken.secrets_for("extract", of_both, Settings()) == {"HF_TOKEN": "hf_x", "VLLM_API_KEY": "the-key"}
    monkeypatch.setenv("VLLM_API_KEY", "clé")
    with pytest.raises(ConfigError, match="what VLLM_API_KEY holds is no token") as refused:
        hftoken.secrets_for("extract", named, Settings())
    assert "clé" not in str(refused.value)


def test_a_token_file_is_read_and_what_is_none_is_refused_without_showing_it(own_home: Path) -> None:
    file = own_home / "token.txt"
    file.write_text("hf_ofTheFile\n")
    settings = cli.settings_of(cli.make_parser().parse_args(["jobs", "--hf-token-file", str(file)]))
    assert settings.hf_token == "hf_ofTheFile"
    assert "hf_ofTheFile" not in repr(settings) + str(replace(settings, theme="x"))
    file.write_text("hf_secret and more")
    with pytest.raises(ConfigError, match="is no token") as refused:
        hftoken.given(file, False)
    assert "hf_secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*--hf-token-file"):
        hftoken.given(own_home / "none", False)
    with pytest.raises(ConfigError, match="named twice"):
        hftoken.given(file, True)


def test_variables_of_jobs_are_those_of_the_file_and_the_options_and_never_a_token(own_home: Path) -> None:
    file = own_home / "dflash-tui" / "config.toml"
    file.parent.mkdir()
    file.write_text('[env]\nHF_HOME = "/data/hf"\nHF_ENDPOINT = "https://mirror"')
    words = ["--env", "EMPTY=", "--env", "HF_HOME=/first", "jobs", "--env", "HF_HOME=/other"]
    settings = cli.settings_of(cli.make_parser().parse_args(words))
    assert settings.env == {"HF_HOME": "/other", "HF_ENDPOINT": "https://mirror", "EMPTY": ""}
    for wrong in ("HF_TOKEN=hf_secret", "VLLM_API_KEY=hf_secret", "NAME", "=x"):
        with pytest.raises(CommandError) as refused:
            cli.make_parser().parse_args(["jobs", "--env", wrong])
        assert "hf_secret" not in str(refused.value)
    with pytest.raises(CommandError, match=r"VLLM_API_KEY.*it is taken from this console's own environment"):
        cli.make_parser().parse_args(["jobs", "--env", "VLLM_API_KEY=hf_secret"])
    file.write_text('[env]\nHF_TOKEN = "hf_secret"')
    with pytest.raises(ConfigError, match="a token goes by --hf-token-file") as unfit:
        cli.settings_of(cli.make_parser().parse_args(["jobs"]))
    assert "hf_secret" not in str(unfit.value)


def test_to_ask_for_a_token_a_terminal_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_tui.cli", "jobs", "--ask-hf-token", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs a terminal" in json.loads(done.stdout)["error"]


def test_names_on_the_hub_pass_untouched_and_paths_do_not(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_home)
    assert model_on("local", "org/name@v1") == model_on("gpu-1", "org/name@v1") == "org/name@v1"
    assert model_on("local", "./org/name") == str(own_home / "org" / "name")
    assert model_on("gpu-1", "/m/qwen") == "/m/qwen"
    (own_home / "org" / "name").mkdir(parents=True)
    assert model_on("local", "org/name") == str(own_home / "org" / "name")
    assert model_on("local", "hf://org/name") == "hf://org/name"
    assert input_on("gpu-1", "hf://datasets/org/chats:train") == "hf://datasets/org/chats:train"
    for text in ("./org/name", "a/b/c", "name"):
        with pytest.raises(CommandError, match="no whole path"):
            model_on("gpu-1", text)
    with pytest.raises(CommandError, match="no whole path"):
        input_on("gpu-1", "org/chats")


def test_it_goes_with_a_question_about_a_model_that_is_named_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert token({"model": "org/name"}, "capabilities") == "hf_x"
    assert token({"model": "/m"}, "capabilities") is None
    assert token({"words": ["x"]}, "vllm-options") is None
