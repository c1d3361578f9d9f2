"""The op `diagnose` of a real agent: jobs that really failed, and logs by their path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tui.node.diagnose.request import ended_of
from tests.node.client import Client, Refusal

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
Connect = Callable[..., Client]


def test_a_failed_job_is_explained_by_its_own_log_and_a_killed_one_by_its_end(connect: Connect) -> None:
    client = connect()
    log = (LOGS / "v0.20.1-hybrid-kv-manager-off.log").read_text()
    client.launch("from-log", {"do": [["print", log], ["exit", 1]]})
    client.launch("killed", {"do": [["print", "working"], ["die", 9]]})
    client.launch("well", {"do": [["print", log], ["event", "finished", {}]]})
    client.wait("from-log", "failed")
    client.wait("killed", "killed")
    client.wait("well", "done")
    told = client.ask("diagnose", job="from-log")
    assert (told["failed"], told["cause"]["id"], told["cause"]["line"]) == (True, "vllm-hybrid-kv-manager-off", 117)
    assert told["source"]["file"].endswith("kv_cache_utils.py") and told["remedy"]
    killed = client.ask("diagnose", job="killed")
    assert (killed["cause"]["id"], killed["cause"]["line"]) == ("killed-by-sigkill", None)
    assert client.ask("diagnose", job="well")["failed"] is False


def test_any_log_of_the_node_is_diagnosed_and_what_is_none_is_refused_with_the_reason(
    connect: Connect, tmp_path: Path
) -> None:
    client = connect()
    shutil.copy(LOGS / "v0.32.0-cpu-killed.log", tmp_path / "server.log")
    assert client.ask("diagnose", path=str(tmp_path / "server.log"))["cause"]["line"] == 282
    for fields, why in (
        ({"path": str(tmp_path / "none")}, "No such file"),
        ({"path": str(tmp_path)}, "not a regular file"),
        ({"job": "20261130-000000-none-0000"}, "has no job"),
        ({}, "must name a job or a path"),
    ):
        with pytest.raises(Refusal, match=why):
            client.ask("diagnose", **fields)


@pytest.mark.parametrize(
    ("record", "failed"),
    [
        ({"state": "failed", "last_event": {"event": "failed", "message": "a", "remedy": "b"}}, True),
        ({"state": "lost", "last_event": None}, True),
        ({"state": "done", "last_event": {"event": "finished"}}, False),
        ({"state": "interrupted"}, False),
        ({"state": "killed", "stop": {"force": True}}, False),
        ({"state": "killed", "stop": None, "exit": {"signal": 9}}, True),
        ({"state": "running"}, None),
    ],
)
def test_what_was_asked_for_is_no_failure(record: dict[str, object], failed: bool | None) -> None:
    ended = ended_of(record)
    assert ended["failed"] is failed
    assert ended["message"] == ("a" if record["state"] == "failed" else "")
