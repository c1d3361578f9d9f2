"""A full disk under the state folder: no end of a job is lost, and a launch is refused whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tui.node import processes
from tests.fakes.nvml import RECORDING, SMI
from tests.node.client import Client, Refusal, until

# The agent and what it starts see a small disk where the state is; it is gone with the last of them.
SMALL_DISK = """#!/bin/sh
exec unshare --map-root-user --mount /bin/sh -c '
mkdir -p "$XDG_STATE_HOME" && mount -t tmpfs -o size=512k none "$XDG_STATE_HOME" && exec "$@"
' sh {python} "$@"
"""


class SmallDisk:
    """The state folder of an agent that runs in a mount namespace of its own."""

    def __init__(self, agent: Client, state: Path) -> None:
        self.agent = agent
        self.state = Path(f"/proc/{agent.process.pid}/root{state}")  # as the agent sees it
        self._filler = self.state / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))

    def make_room(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(connect: Callable[..., Client], environment: dict[str, str], state: Path, tmp_path: Path) -> SmallDisk:
    python = tmp_path / "python-on-a-small-disk"
    python.write_text(SMALL_DISK.format(python=sys.executable))
    python.chmod(0o755)
    fake = {
        "DFLASH_TUI_FAKE_SMI": str(RECORDING),
        "DFLASH_TUI_FAKE_GPUS": "1",
        "DFLASH_TUI_FAKE_SMI_PHASE": "idle",
        "PATH": os.pathsep.join([str(SMI.parent), str(Path(sys.executable).parent), environment["PATH"]]),
    }
    return SmallDisk(connect(python=str(python), env={**environment, **fake}), state)


def is_free(agent: Client, gpu: str) -> bool:
    try:
        return bool(agent.ask("gpus", select=[gpu])["gpus"])
    except Refusal as refusal:
        assert refusal.code == "gpu-locked"
        return False


def test_the_end_of_a_job_on_a_full_disk_is_written_down_once_there_is_room(disk: SmallDisk, tmp_path: Path) -> None:
    # However long that takes: the bundle's supervisor has no patience with any other fault of a disk.
    source = tmp_path / "bundle" / "dflash_tui" / "node" / "supervisor.py"
    text = source.read_text()
    assert "_SAVE_FOR_S = 600.0\n" in text
    source.write_text(text.replace("_SAVE_FOR_S = 600.0\n", "_SAVE_FOR_S = 0.0\n"))
    go, agent = tmp_path / "go", disk.agent
    agent.launch("j-1", {"do": [["event", "finished", {"done": 2}], ["wait_for", str(go)]]}, gpus=["0"])
    until(lambda: agent.job("j-1")["result"], "the last event")
    record = agent.wait("j-1", "running")
    disk.fill()
    go.touch()
    runner, supervisor = (processes.identity_of(record[name]) for name in ("runner", "supervisor"))
    until(lambda: not processes.alive(runner), "the runner to end")
    # Its GPU is free as soon as nothing of it lives, whatever the disk says.
    until(lambda: is_free(agent, "0"), "the card to be free")
    for _ in range(3):
        agent.push("beat")
    assert processes.alive(supervisor)
    assert agent.job("j-1")["state"] == "running"
    disk.make_room()
    record = agent.wait("j-1", "done")
    assert (record["exit"], record["reason"]) == ({"code": 0, "signal": None}, "")
    assert record["result"]["done"] == 2
    until(lambda: not processes.alive(supervisor), "the supervisor to end")


@pytest.mark.parametrize(("gpus", "words"), [([], "the job's folder"), (["0"], "the locks of the job's GPUs")])
def test_a_launch_on_a_full_disk_is_refused_in_one_line_and_leaves_nothing(
    disk: SmallDisk, gpus: list[str], words: str
) -> None:
    agent = disk.agent
    agent.ask("gpus", select=gpus)
    disk.fill()
    with pytest.raises(Refusal) as refused:
        agent.launch("j-1", {"do": [["event", "finished", {}]]}, gpus=gpus)
    assert refused.value.code == "io-error"
    assert words in refused.value.message
    assert refused.value.message.endswith("No space left on device")
    assert refused.value.remedy == "free some space or check its rights"
    assert "\n" not in str(refused.value)
    assert list((disk.state / "jobs").iterdir()) == []
    assert agent.ask("list")["jobs"] == []
    disk.make_room()
    # Neither a name nor a lock was left behind.
    agent.launch("j-1", {"do": [["event", "finished", {}]]}, gpus=gpus)
    agent.wait("j-1", "done")


@pytest.mark.parametrize("force", [False, True])
def test_a_job_that_filled_its_disk_can_be_stopped(disk: SmallDisk, force: bool) -> None:
    agent = disk.agent
    steps = [["ignore_term"], ["event", "phase", {}], ["wait"]] if force else [["obey"]]
    agent.launch("j-1", {"do": steps}, stop_grace_s=3600)
    until(lambda: agent.job("j-1")["last_event"], "the runner to listen")
    runner = processes.identity_of(agent.wait("j-1", "running")["runner"])
    disk.fill()
    agent.ask("stop", job="j-1", force=False)
    if force:
        agent.ask("stop", job="j-1", force=True)
    until(lambda: not processes.alive(runner), "the runner to end")
    disk.make_room()
    record = agent.wait("j-1", "killed" if force else "interrupted", "failed")
    assert record["state"] == ("killed" if force else "interrupted")
    assert record["stop"]["force"] is force
