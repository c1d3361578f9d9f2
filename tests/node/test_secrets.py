"""A token goes from a console to a runner and is nowhere else: real agents, supervisors and runners, and a hub that asks for it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import launching
from dflash_tui.node.secrets import VARIABLE, of_request, pipe_with, take
from tests.fakes.hub import Faults, Hub
from tests.node.client import REPOSITORY, Client, Refusal, until
from tests.node.conftest import of_state

TOKEN = "hf_onlyForTheRunner0123456789"
SECRETS = {"HF_TOKEN": TOKEN}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def holders(folder: Path, pids: list[int]) -> list[str]:
    """Where the token can be read: files below a folder, command lines and environments of processes."""
    places = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    places += [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")]
    found = []
    for place in places:
        try:
            if TOKEN.encode() in place.read_bytes():
                found.append(str(place))
        except OSError:  # it ended, or was renamed, meanwhile
            continue
    return found


def launched(agent: Client, job: str, spec: dict[str, Any], **fields: Any) -> dict[str, Any]:
    launch = {"name": job, "verb": "extract", "python": sys.executable, "spec": spec}
    return dict(agent.ask("launch", job=job, launch=launch | fields.pop("launch", {}), **fields)["job"])


def test_a_token_reaches_the_runner_and_nothing_else(agent: Client, state: Path, tmp_path: Path) -> None:
    taken, go = tmp_path / "taken", tmp_path / "go"
    spec = {"do": [["secrets", str(taken)], ["child", ["wait_for", str(go)]], ["wait_for", str(go)]]}
    launched(agent, "20260101-000000-extract-aaaa", spec, secrets=SECRETS)
    until(taken.exists, "the runner to have it")
    assert taken.read_text() == sha(TOKEN)
    pids = [stat.pid for stat in of_state(state)]
    assert len(pids) >= 3  # the supervisor, the runner and its child
    assert holders(tmp_path, [*pids, agent.process.pid]) == []
    go.touch()
    agent.wait("20260101-000000-extract-aaaa", "failed", "done")
    assert holders(tmp_path, []) == []


def test_without_a_token_the_runner_gets_none(agent: Client, tmp_path: Path) -> None:
    launched(agent, "20260101-000000-extract-bbbb", {"do": [["secrets", str(tmp_path / "taken")]]})
    until((tmp_path / "taken").exists, "the runner")
    assert (tmp_path / "taken").read_text() == sha("")


def test_a_token_of_the_agents_own_environment_goes_the_same_way(
    connect: Callable[..., Client], environment: dict[str, str], state: Path, tmp_path: Path
) -> None:
    agent = connect(env={**environment, "HF_TOKEN": TOKEN})
    taken, shown, go = tmp_path / "taken", tmp_path / "shown", tmp_path / "go"
    spec = {"do": [["secrets", str(taken)], ["environment", str(shown)], ["wait_for", str(go)]]}
    launched(agent, "20260101-000000-extract-cccc", spec)
    until(shown.exists, "the runner")
    assert taken.read_text() == sha(TOKEN)
    assert "HF_TOKEN" not in json.loads(shown.read_text())
    assert holders(tmp_path, [agent.process.pid]) == [
        f"/proc/{agent.process.pid}/environ"
    ]  # the look finds what is there
    assert holders(tmp_path, [stat.pid for stat in of_state(state)]) == []
    go.touch()


def test_a_verb_of_the_node_gets_no_token_whoever_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert of_request({}, "extract") == of_request({"secrets": SECRETS}, "extract") == SECRETS
    monkeypatch.setenv("VLLM_API_KEY", "key-of-the-node")
    assert of_request({}, "setup") == of_request({"secrets": SECRETS}, "setup") == {}


def test_a_servers_key_goes_only_with_a_job_that_names_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key-of-the-node")
    named = {"spec": {"server_url": "http://gpu-1:8000"}}
    assert of_request({"launch": {"spec": {}}}, "extract") == of_request({}, "extract") == {}
    for about in ({"launch": named}, {"spec": {"verb": "extract", **named}}):
        assert of_request(about, "extract") == {"VLLM_API_KEY": "key-of-the-node"}
        sent = {**SECRETS, "VLLM_API_KEY": "key-of-the-console"}
        assert of_request({**about, "secrets": sent}, "extract") == sent
    assert "VLLM_API_KEY" not in launching.environment()


def test_an_agent_that_runs_in_a_job_hands_no_number_of_that_jobs_pipe_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    assert VARIABLE not in launching.environment()


def test_a_pipe_that_is_too_small_is_an_error_and_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, fds = os.pipe, Path("/proc/self/fd")
    before = len(list(fds.iterdir()))

    def small() -> tuple[int, int]:  # as users with very many pipes get them
        ends = pipe()
        fcntl.fcntl(ends[1], 1031, 4096)  # F_SETPIPE_SZ, fcntl(2)
        return ends

    monkeypatch.setattr(os, "pipe", small)
    assert take(pipe_with(SECRETS)) == SECRETS
    with pytest.raises(OSError):
        pipe_with({"HF_TOKEN": '"' * 4096})
    assert len(list(fds.iterdir())) == before


def test_a_plan_gets_a_token_too(agent: Client, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    request = {"verb": "extract", "spec": {"do": [["secrets", str(taken)]]}}
    answer = agent.ask("plan", spec=request, python=sys.executable, secrets=SECRETS)
    assert taken.read_text() == sha(TOKEN)
    assert TOKEN not in json.dumps(answer)
    assert holders(tmp_path, [agent.process.pid]) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"secrets": {"HF_TOKEN": TOKEN + "\n"}},
        {"secrets": {"HF_TOKEN": [TOKEN]}},
        {"secrets": {TOKEN: "x"}},
        {"secrets": [TOKEN]},
        {"launch": {"env": {"HF_TOKEN": TOKEN}}},
        {"launch": {"env": {"VLLM_API_KEY": TOKEN}}},
        {"launch": {"env": {"HF_TOKEN": TOKEN}, "stop_grace_s": -1}},
        {"launch": {"gpus": ["7"]}, "secrets": SECRETS},
        {"launch": {"python": "/no/such/python"}, "secrets": SECRETS},
        {"launch": {"unknown": 1}, "secrets": SECRETS},
    ],
)
def test_no_refusal_shows_a_token(agent: Client, tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        launched(agent, "20260101-000000-extract-dddd", {"do": []}, **fields)
    assert TOKEN not in str(refused.value)
    assert holders(tmp_path, [agent.process.pid]) == []


def test_a_plan_has_the_variables_of_its_job_and_no_token_among_them(agent: Client, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    request = {"verb": "extract", "spec": {"do": [["environment", str(shown)]]}}
    agent.ask("plan", spec=request, python=sys.executable, env={"HF_HOME": "/data/hf"})
    assert json.loads(shown.read_text())["HF_HOME"] == "/data/hf"
    with pytest.raises(Refusal, match="HF_TOKEN must not stand in env") as refused:
        agent.ask("plan", spec=request, python=sys.executable, env={"HF_TOKEN": TOKEN})
    assert TOKEN not in str(refused.value)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": os.urandom(300_000)}
    hub.add("org/gated", files, gated=True)
    hub.tokens.add(TOKEN)
    hub.may_read.add(TOKEN)
    try:
        yield hub
    finally:
        hub.close()


def test_a_gated_model_is_downloaded_with_a_token_that_no_file_and_no_process_shows(
    connect: Callable[..., Client], environment: dict[str, str], state: Path, bundle: Path, tmp_path: Path, hub: Hub
) -> None:
    hub.faults = Faults.held()
    # The bundle is this very source: the real runner, in the real client's hands.
    for name in ("backends", "dflash_tui"):
        shutil.rmtree(bundle / name)
        (bundle / name).symlink_to(REPOSITORY / name)
    agent = connect(env={**environment, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url})
    spec = {
        "model": "org/gated",
        "dataset": str(tmp_path / "none"),
        "output": str(tmp_path / "out"),
        "min_free_bytes": 0,
    }
    job = "20260101-000000-extract-eeee"
    launched(agent, job, spec, secrets=SECRETS)
    until(hub.holding.is_set, "the download to be in its middle")
    pids = [stat.pid for stat in of_state(state)]
    assert len(pids) >= 2
    assert holders(tmp_path, [*pids, agent.process.pid]) == []
    assert [path for _, path, token in hub.seen if "org/gated" in path and not token] == []
    agent.ask("stop", job=job)
    record = agent.wait(job, "interrupted", "failed", "killed")
    assert record["state"] == "interrupted", record
    # Again without a token: refused, and nothing of the run before helps.
    launched(agent, job[:-4] + "ffff", spec)
    assert "no token was sent" in agent.wait(job[:-4] + "ffff", "failed")["reason"]
    assert holders(tmp_path, [agent.process.pid]) == []
