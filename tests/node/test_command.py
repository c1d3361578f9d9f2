"""What a job was started with, as its supervisor writes it and the agent tells it: exact, and without a secret's value."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import hiding
from tests.node.client import Client, Refusal

DONE = [["event", "finished", {"done": 2}]]
# Put together here, so that no scanner takes them for real ones.
SECRETS = {
    "WANDB_API_KEY": "wandb" + "-value-1",
    "AWS_SECRET_ACCESS_KEY": "aws" + "-value-2",
    "DB_PASSWORD": "pass" + "-value-3",
    "HTTPS_PROXY": "http://user:proxy" + "-value-4@proxy:3128",
    "HF_ENDPOINT": "https://mirror/api?access_token=query" + "-value-5",
    "NOTES": "the old one was hf_" + "A" * 30,
}
HARMLESS = {
    "HF_HOME": "/models",
    "TOKENIZERS_PARALLELISM": "false",
    "GIT_AUTHOR_NAME": "ops",
    "PIP_INDEX": "https://mirror/a",
}


def files_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "launch.json")


def test_the_command_is_what_the_runner_was_started_with(agent: Client, state: Path, tmp_path: Path) -> None:
    shown = tmp_path / "env.json"
    agent.launch("j-1", {"do": [["environment", str(shown)], *DONE]}, env=HARMLESS)
    agent.wait("j-1", "done")
    told = agent.ask("command", job="j-1")
    command = told["command"]
    folder = state / "jobs" / "j-1"
    assert command == json.loads((folder / "command.json").read_text())
    assert stat.S_IMODE((folder / "command.json").stat().st_mode) == 0o600
    python, flag, main, *rest = command["argv"]
    assert (python, flag) == (sys.executable, "-u") and main.endswith("/backends/__main__.py")
    assert rest == ["extract", str(folder / "spec.json"), "--events", str(folder / "events.jsonl")]
    environment = json.loads(shown.read_text())
    # What Python itself adds at its start is none of ours.
    assert {name: environment.get(name) for name in command["environment"]} == command["environment"]
    assert set(environment) - set(command["environment"]) <= {"LC_CTYPE"}
    assert set(HARMLESS) < set(command["added"]) and "CUDA_VISIBLE_DEVICES" in command["added"]
    assert "PATH" not in command["added"] and command["hidden"] == []
    assert command["cwd"] == json.loads((folder / "launch.json").read_text())["cwd"]
    assert (told["servers"], told["versions"]) == ([], {})


def test_the_command_that_is_told_runs_the_job_again(agent: Client, state: Path, tmp_path: Path) -> None:
    shown = tmp_path / "out.json"
    agent.launch("j-1", {"do": [["environment", str(shown)], *DONE]}, env=HARMLESS)
    agent.wait("j-1", "done")
    first = json.loads(shown.read_text())
    shown.unlink()
    command = agent.ask("command", job="j-1")["command"]
    subprocess.run(command["argv"], env=command["environment"], cwd=command["cwd"], check=True)
    assert json.loads(shown.read_text()) == first


def test_no_secret_of_the_environment_reaches_the_disk(
    connect: Callable[..., Client], environment: dict[str, str], state: Path
) -> None:
    agent = connect(env={**environment, **SECRETS, "HF_TOKEN": "hf-token" + "-value-6"})
    agent.launch("j-1", {"do": DONE})
    agent.wait("j-1", "done")
    command = agent.ask("command", job="j-1")["command"]
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"):
        assert command["environment"][name] is None
    assert command["environment"]["HTTPS_PROXY"] == "http://***@proxy:3128"
    assert command["environment"]["HF_ENDPOINT"] == "https://mirror/api?access_token=***"
    assert command["environment"]["NOTES"] == "the old one was ***"
    assert set(command["hidden"]) == set(SECRETS)
    assert command["secrets"] == ["HF_TOKEN"]
    on_disk = files_of(state / "jobs" / "j-1")
    assert not [value for value in [*SECRETS.values(), "hf-token" + "-value-6"] if value.encode() in on_disk]
    assert not [number for number in range(1, 7) if b"-value-%d" % number in on_disk]


def test_the_servers_of_a_job_and_the_versions_are_told_by_its_events(agent: Client) -> None:
    def server(port: int) -> list[str]:
        return ["/vllm/bin/python", "-m", "vllm", "serve", "m", "--port", str(port), "--max-num-batched-tokens", "8192"]

    steps = [
        ["event", "started", {"versions": {"python": "3.12.3", "torch": "2.11.0", "vllm": None}}],
        ["event", "worker", {"worker": 0, "state": "starting", "pid": 7, "command": server(1)}],
        [
            "event",
            "worker",
            {"worker": 1, "state": "starting", "command": [*server(2), "--hf-token", "abc", "--api-key=x"]},
        ],
        ["event", "worker", {"worker": 0, "state": "lost"}],
        ["event", "worker", {"worker": 0, "state": "starting", "pid": 9, "command": server(3), "cwd": "/tmp/empty"}],
        ["event", "finished", {"versions": {"vllm": "0.26.0"}}],
    ]
    agent.launch("j-1", {"do": steps})
    agent.wait("j-1", "done")
    told = agent.ask("command", job="j-1")
    first, second = sorted(told["servers"], key=lambda found: found["worker"])
    assert (first["command"], first["pid"], first["cwd"]) == (server(3), 9, "/tmp/empty")
    assert second["command"] == [*server(2), "--hf-token", "***", "--api-key=***"]
    assert told["versions"] == {"python": "3.12.3", "torch": "2.11.0", "vllm": "0.26.0"}


def test_a_later_comparison_in_the_same_folder_tells_nothing_of_an_earlier_one(
    agent: Client, state: Path, tmp_path: Path
) -> None:
    agent.launch("j-1", {"do": DONE, "output": str(tmp_path)})
    record = agent.wait("j-1", "done")
    # What a comparison's record is: the runner of these tests has no verb of that name.
    path = state / "jobs" / "j-1" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verb": "compare"}))

    def told(time: float) -> dict[str, Any]:
        event = {
            "t": time,
            "event": "worker",
            "worker": 0,
            "command": ["vllm", "serve"],
            "versions": {"vllm": "0.26.0"},
        }
        (tmp_path / "vllm.events.jsonl").write_text(json.dumps(event) + "\n")
        return agent.ask("command", job="j-1")

    own = told((record["created"] + record["ended"]) / 2)
    assert [server["command"] for server in own["servers"]] == [["vllm", "serve"]] and own["versions"] == {
        "vllm": "0.26.0"
    }
    later = told(record["ended"] + 60)
    assert (later["servers"], later["versions"]) == ([], {})


def test_a_job_from_before_commands_were_written_has_none(agent: Client, state: Path) -> None:
    agent.launch("j-1", {"do": DONE})
    agent.wait("j-1", "done")
    (state / "jobs" / "j-1" / "command.json").unlink()
    assert agent.ask("command", job="j-1")["command"] is None
    with pytest.raises(Refusal, match="no job j-2"):
        agent.ask("command", job="j-2")
    with pytest.raises(Refusal, match="not a job id"):
        agent.ask("command", job="../../etc")


def test_a_python_that_cannot_start_is_told_with_its_command(agent: Client, state: Path, tmp_path: Path) -> None:
    # It answers the trial before the launch, and is gone for the job.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nrm "$0"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    agent.launch("j-1", {"do": DONE}, python=str(python))
    record = agent.wait("j-1", "failed")
    assert "cannot start" in record["reason"]
    assert agent.ask("command", job="j-1")["command"]["argv"][0] == str(python)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "api_key", "Secret_Thing", "MYSQL_PASSWD", "AWS_CREDENTIALS", "GITHUB_PAT", "SSHPASS", "DB_PASS"),
        *("MYSQL_PWD", "DBPWD", "X_AUTHORIZATION"),
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert hiding.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "TOKENIZERS_PARALLELISM", "PWD", "OLDPWD", "XDG_RUNTIME_DIR", "KEYBOARD", "GIT_AUTHOR_NAME"),
        *("GIT_ASKPASS", "COMPASS", "HTTP_BYPASS"),
    ],
)
def test_names_of_what_is_no_secret_are_shown(name: str) -> None:
    assert not hiding.is_secret(name)


def test_options_that_count_tokens_are_shown_and_a_value_is_never_taken_for_an_option() -> None:
    argv = [
        "vllm",
        "--max-num-batched-tokens",
        "8192",
        "--tokenizer",
        "t",
        "--hf-token",
        "--seed",
        "3",
        "--api-key",
        "k",
    ]
    assert hiding.arguments(argv) == [*argv[:-1], "***"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--kv-transfer-config", '{"password":"SECRET-1"}'],
        ['--kv-transfer-config={"a": [{"api_key": ["SECRET-1"]}], "auth": {"x": "SECRET-2"}}'],
        ["--config", "{'password': 'SECRET-1', 'n': 2, \"token\": \"SECRET-2\"}"],
        ["--api-key", "SECRET-1", "SECRET-2", "--seed", "3"],
        ["--url", "http://u:SECRET-1@SECRET-2@h/"],
        ["--dsn", "host=h user=u password=SECRET-1"],
        ["--header", "Authorization: Basic SECRET-1", "--header=Authorization: Bearer SECRET-2"],
        ["env", "WANDB_API_KEY=SECRET-1", "python"],
    ],
)
def test_a_secret_in_an_argument_is_shown_in_no_place_that_it_may_stand_in(argv: list[str]) -> None:
    shown = hiding.arguments(argv)
    assert "SECRET" not in " ".join(shown)
    assert len(shown) == len(argv)
    assert hiding.environment({"OPTIONS": argv[-1]})[0]["OPTIONS"] == hiding.masked(argv[-1])


@pytest.mark.parametrize(
    "word",
    [
        '{"max_num_batched_tokens":  8192, "kv_connector": "X", "nested": [1, {"tokenizer": "t"}]}',
        '--kv-transfer-config={"kv_role":"kv_producer"}',
        "http://h:80/a@b?page=2",
        "max_tokens=5",
        "{not json",
        "--seed=3",
    ],
)
def test_an_argument_without_a_secret_is_shown_as_it_was_written(word: str) -> None:
    assert hiding.arguments([word]) == [word]
