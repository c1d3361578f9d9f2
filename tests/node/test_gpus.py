"""GPUs for jobs: chosen by index or UUID, locked for the job's life, refused where others use them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import gpus, locks, protocol
from tests.fakes.nvml import RECORDING, SMI
from tests.node.client import Client, Refusal

DONE = [["event", "finished", {}]]


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


@pytest.fixture
def node(connect: Callable[..., Client], environment: dict[str, str]) -> Callable[..., Client]:
    """Agents of a node with so many cards, answered for by a recorded nvidia-smi."""

    def start(count: int = 2, phase: str = "idle") -> Client:
        path = os.pathsep.join([str(SMI.parent), str(Path(sys.executable).parent), environment["PATH"]])
        fake = {
            "DFLASH_TUI_FAKE_SMI": str(RECORDING),
            "DFLASH_TUI_FAKE_GPUS": str(count),
            "DFLASH_TUI_FAKE_SMI_PHASE": phase,
        }
        return connect(env={**environment, **fake, "PATH": path})

    return start


def refused(call: Callable[[], Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_indices_and_uuids_name_the_same_cards(node: Callable[..., Client]) -> None:
    agent = node()
    chosen = agent.ask("gpus", select=["1", uuid(1).upper(), uuid(0)])["gpus"]
    assert [(gpu["index"], gpu["uuid"]) for gpu in chosen] == [(1, uuid(1)), (0, uuid(0))]
    assert all(gpu["name"] for gpu in chosen)


def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do(node: Callable[..., Client], state: Path) -> None:
    agent = node()
    for ask in (
        lambda: agent.ask("gpus", select=["7"]),
        lambda: agent.launch("j-1", {"do": DONE}, gpus=["0", "7"]),
        lambda: agent.ask("plan", python="", spec={"verb": "extract", "spec": {}}, gpus=["7"]),
    ):
        error = refused(ask)
        assert error.code == "gpu-unknown"
        assert error.message == "there is no GPU 7: this node has GPUs 0, 1"
    assert list((state / "jobs").iterdir()) == []


def test_on_a_node_without_gpus_a_chosen_one_is_refused_and_none_is_needed(agent: Client) -> None:
    error = refused(lambda: agent.ask("gpus", select=["0"]))
    assert error.code == "gpu-unknown"
    assert "this node shows no GPU" in error.message
    assert agent.ask("gpus", select=[])["gpus"] == []


def test_a_job_sees_its_cards_by_uuid_and_its_record_holds_the_memory_used_before(
    node: Callable[..., Client], state: Path, tmp_path: Path
) -> None:
    shown = tmp_path / "env.json"
    agent = node()
    spec = {"do": [["environment", str(shown)], *DONE], "gpus": []}
    agent.launch("j-1", spec, gpus=["1"])
    record = agent.wait("j-1", "done")
    assert json.loads(shown.read_text())["CUDA_VISIBLE_DEVICES"] == uuid(1)
    assert json.loads((state / "jobs" / "j-1" / "spec.json").read_text())["gpus"] == [uuid(1)]
    (gpu,) = record["gpus"]
    assert (gpu["index"], gpu["uuid"]) == (1, uuid(1))
    assert isinstance(gpu["baseline_bytes"], int)
    plan = agent.ask("plan", python="", spec={"verb": "extract", "spec": spec | {"do": []}}, gpus=["0"])["plan"]
    assert plan["spec"]["gpus"] == [uuid(0)]


def test_a_card_belongs_to_one_job_until_that_is_over(node: Callable[..., Client], tmp_path: Path, state: Path) -> None:
    go = tmp_path / "go"
    one, two = node(), node()
    one.launch("j-1", {"do": [["wait_for", str(go)], *DONE]}, gpus=["0"])
    for ask in (
        lambda: two.launch("j-2", {"do": DONE}, gpus=["1", "0"]),
        lambda: two.launch("j-2", {"do": DONE}, gpus=[uuid(0)], share=True),
        lambda: two.ask("gpus", select=["0"]),
        lambda: two.ask("plan", python="", spec={"verb": "extract", "spec": {}}, gpus=["0"]),
    ):
        error = refused(ask)
        assert error.code == "gpu-locked"
        assert error.message == "GPU 0 is locked by job j-1"
        assert "stop j-1" in error.remedy
    assert [path.name for path in (state / "jobs").iterdir()] == ["j-1"]
    two.launch("j-3", {"do": DONE}, gpus=["1"])
    two.wait("j-3", "done")
    go.touch()
    one.wait("j-1", "done")
    two.launch("j-4", {"do": DONE}, gpus=["0", "1"])
    two.wait("j-4", "done")


def test_two_launches_at_the_same_moment_never_get_the_same_card(node: Callable[..., Client]) -> None:
    agents = [node(), node()]
    launch = {"name": "x", "verb": "extract", "python": sys.executable, "spec": {"do": [["wait"]]}, "gpus": ["0"]}
    for agent in agents:
        agent.push("metrics", lambda push: push["metrics"]["gpus"])
    asked = [agent.send("launch", job=f"j-{index}", launch=launch) for index, agent in enumerate(agents)]
    outcomes = []
    for agent, number in zip(agents, asked, strict=True):
        try:
            outcomes.append(agent.answer(number).header["job"]["state"])
        except Refusal as refusal:
            outcomes.append(refusal.code)
    assert sorted(outcomes) == ["gpu-locked", "running"]


def test_jobs_that_share_use_a_card_together_and_keep_off_one_that_does_not(node: Callable[..., Client]) -> None:
    agent = node()
    agent.launch("j-1", {"do": [["wait"]]}, gpus=["0"], share=True)
    assert agent.launch("j-2", {"do": [["wait"]]}, gpus=["0"], share=True)["share"] is True
    assert refused(lambda: agent.launch("j-3", {"do": DONE}, gpus=["0"])).code == "gpu-locked"


def test_a_card_that_others_use_is_refused_unless_shared(node: Callable[..., Client]) -> None:
    agent = node(phase="busy")
    error = refused(lambda: agent.launch("j-1", {"do": DONE}, gpus=["0"]))
    assert error.code == "gpu-busy"
    assert error.message.startswith("GPU 0 is busy: ")
    assert "--share" in error.remedy
    agent.launch("j-1", {"do": DONE}, gpus=["0"], share=True)
    assert agent.wait("j-1", "done")["gpus"][0]["baseline_bytes"] > 1 << 29


def test_cards_of_an_orphaned_job_are_refused_until_its_strays_are_ended(node: Callable[..., Client]) -> None:
    agent = node()
    agent.launch("j-1", {"do": [["wait"]]}, gpus=["0"])
    os.kill(agent.wait("j-1", "running")["supervisor"]["pid"], signal.SIGKILL)
    agent.wait("j-1", "orphaned")
    error = refused(lambda: agent.launch("j-2", {"do": DONE}, gpus=["0"]))
    assert error.code == "gpu-locked"
    assert "left of job j-1" in error.message
    agent.ask("stop", job="j-1", force=True)
    agent.launch("j-2", {"do": DONE}, gpus=["0"])
    agent.wait("j-2", "done")


def test_a_lock_ends_with_the_last_process_that_holds_it_and_looking_at_it_is_not_holding(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert not locks.is_held(path)
    fd = locks.take(path)
    assert fd is not None
    copy = os.dup(fd)
    assert locks.is_held(path)
    assert locks.take(path) is None
    os.close(fd)
    assert locks.is_held(path)
    os.close(copy)
    assert not locks.is_held(path)


def test_where_one_of_several_cards_is_locked_none_is_taken(tmp_path: Path) -> None:
    held = locks.take_gpus(str(tmp_path), [uuid(1)], "j-1")
    with pytest.raises(locks.GpuLocked) as caught:
        locks.take_gpus(str(tmp_path), [uuid(0), uuid(1)], "j-2")
    assert (caught.value.uuid, caught.value.job) == (uuid(1), "j-1")
    assert locks.gpu_holder(str(tmp_path), uuid(0)) is None
    assert locks.gpu_holder(str(tmp_path), uuid(1)) == "j-1"
    os.close(held[uuid(1)])
    assert locks.gpu_holder(str(tmp_path), uuid(1)) is None


def test_a_process_of_our_own_job_makes_no_card_busy_but_memory_that_nobody_shows_does(tmp_path: Path) -> None:
    card = {"index": 0, "uuid": uuid(0), "memory_used_bytes": 40 << 30, "processes": [{"pid": 7, "job": "j-1"}]}

    def check(share: bool = False) -> None:
        gpus.check_free(str(tmp_path), [card], share, lambda _: None)

    check()
    card["processes"] = []
    with pytest.raises(protocol.Refused) as caught:
        check()
    assert caught.value.code == "gpu-busy"
    assert "40.0 GiB of its memory are held by a process outside this container" in caught.value.message
    check(share=True)
    card["processes"] = [{"pid": 7, "job": None, "command": "python train.py", "memory_bytes": 1 << 30}, {"pid": 8}]
    with pytest.raises(protocol.Refused) as caught:
        check()
    assert "process 7 (python train.py) holds 1.0 GiB and 1 more" in caught.value.message
