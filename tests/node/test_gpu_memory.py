"""After a job: its GPUs' memory is freed, held by a process that is named, held by one outside, or not known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import gpumemory, owners, processes
from dflash_tui.node.gpumemory import LAG_S, OUTSIDE, SETTLE_S, TOLERANCE_BYTES, GpuMemory
from tests.fakes.nvml import RECORDING, SMI
from tests.node.client import LIMIT_S, Client, until

MIB = 1 << 20
HELD_MIB = 72_909  # 71.2 GiB
DONE = [["event", "finished", {}]]
READY = "print('ready', flush=True); import sys; sys.stdin.read()"


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


class Cards:
    """What the cards of the node show from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def show(self, mode: str = "ok", **cards: dict[str, Any]) -> None:
        draft = self.path.with_suffix(".tmp")
        named = {name.removeprefix("gpu"): card for name, card in cards.items()}
        draft.write_text(json.dumps({"mode": mode, **named}))
        draft.rename(self.path)

    def hold(self, *processes: list[object], used_mib: int = HELD_MIB) -> dict[str, Any]:
        return {"used_mib": used_mib, "processes": list(processes)}


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    return Cards(tmp_path / "cards.json")


@pytest.fixture
def device(tmp_path: Path, bundle: Path) -> Path:
    """Stands for /dev/nvidia-uvm: the node's owners.py looks for devices in the test's folder."""
    with (bundle / "dflash_tui" / "node" / "owners.py").open("a") as file:
        file.write(f"\nDEVICES = ({str(tmp_path / 'nvidia')!r},)\nCOMPUTE = ({str(tmp_path / 'nvidia-uvm')!r},)\n")
    path = tmp_path / "nvidia-uvm"
    path.touch()
    return path


@pytest.fixture
def node(
    connect: Callable[..., Client], environment: dict[str, str], cards: Cards, device: Path
) -> Callable[[], Client]:
    """Agents of a node with two cards."""
    fake = {
        "DFLASH_TUI_FAKE_SMI": str(RECORDING),
        "DFLASH_TUI_FAKE_GPUS": "2",
        "DFLASH_TUI_FAKE_SMI_PHASE": "idle",
        "DFLASH_TUI_FAKE_SMI_NOW": str(cards.path),
        "PATH": os.pathsep.join([str(SMI.parent), str(Path(sys.executable).parent), environment["PATH"]]),
    }
    return lambda: connect(env={**environment, **fake})


@pytest.fixture
def holder(device: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes of another program that have the device open."""
    started: list[subprocess.Popen[bytes]] = []

    def start(title: str = "VLLM::EngineCore") -> subprocess.Popen[bytes]:
        command = ["bash", "-c", f"exec -a {title} sleep 3600 3< {device}"]
        started.append(subprocess.Popen(command))
        pid = started[-1].pid
        until(lambda: processes.command(pid).startswith(title), "the new title")
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait(LIMIT_S)


def run_job(agent: Client, tmp_path: Path, at_the_end: Callable[[], None], *gpus: str) -> None:
    """A job from its start, with the cards as they are, to its end, with the cards as `at_the_end` makes them."""
    go = tmp_path / "go"
    agent.launch("j-1", {"do": [["wait_for", str(go)], *DONE]}, gpus=list(gpus))
    assert "gpu_memory" not in agent.wait("j-1", "running")
    at_the_end()
    go.touch()
    agent.wait("j-1", "done")


def memory(agent: Client, good: Callable[[list[dict[str, Any]]], Any], job: str = "j-1") -> list[dict[str, Any]]:
    """`gpu_memory` of the job once it is `good`, as pushed to a console that only listens."""
    found: list[list[dict[str, Any]]] = []

    def is_good(push: dict[str, Any]) -> bool:
        told = (record.get("gpu_memory") for record in push["jobs"] if record["job"] == job)
        found.extend(entries for entries in told if entries and good(entries))
        return bool(found)

    agent.push("jobs", is_good)
    return found[-1]


def freed(value: bool | None) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda entries: all(entry["freed"] is value for entry in entries)


def test_memory_that_is_back_at_what_was_used_before_is_freed(
    node: Callable[[], Client], cards: Cards, tmp_path: Path
) -> None:
    cards.show(gpu0=cards.hold(used_mib=500))
    agent = node()
    back = {"gpu0": cards.hold(used_mib=500 + 64), "gpu1": cards.hold(used_mib=0)}
    run_job(agent, tmp_path, lambda: cards.show(**back), "0", "1")
    zero, one = memory(agent, freed(True))
    assert zero == {
        "uuid": uuid(0),
        "index": 0,
        "used_bytes": 564 * MIB,
        "baseline_bytes": 500 * MIB,
        "freed": True,
        "holders": [],
        "note": "",
    }
    assert (one["index"], one["used_bytes"], one["freed"]) == (1, 0, True)


def test_memory_that_a_process_still_holds_is_not_freed_until_that_ends(
    node: Callable[[], Client], cards: Cards, tmp_path: Path, holder: Callable[[], subprocess.Popen[bytes]]
) -> None:
    agent = node()
    process = holder()
    held = cards.hold([process.pid, "/usr/bin/python3", HELD_MIB - 500])
    run_job(agent, tmp_path, lambda: cards.show(gpu1=held), "1")
    (entry,) = memory(agent, freed(False))
    assert (entry["used_bytes"], entry["baseline_bytes"], entry["note"]) == (HELD_MIB * MIB, 0, "")
    (who,) = entry["holders"]
    assert (who["pid"], who["bytes"], who["job"]) == (process.pid, (HELD_MIB - 500) * MIB, None)
    assert who["command"].startswith("VLLM::EngineCore")
    process.kill()
    process.wait(LIMIT_S)
    cards.show(gpu1=cards.hold(used_mib=0))
    memory(agent, freed(True))


def test_a_holder_that_the_driver_does_not_name_is_found_by_its_open_device(
    node: Callable[[], Client], cards: Cards, tmp_path: Path, holder: Callable[[], subprocess.Popen[bytes]]
) -> None:
    agent = node()
    process = holder()
    # In a container the driver names the host's pids, which are nobody's here.
    held = cards.hold([(1 << 22) + 1, "[Not Found]", HELD_MIB])
    run_job(agent, tmp_path, lambda: cards.show(gpu0=held), "0")
    (entry,) = memory(agent, freed(False))
    (who,) = entry["holders"]
    assert (who["pid"], who["bytes"], entry["note"]) == (process.pid, None, "")
    assert who["command"].startswith("VLLM::EngineCore")


def test_memory_that_nobody_here_holds_is_held_outside_and_never_0(
    node: Callable[[], Client], cards: Cards, tmp_path: Path
) -> None:
    agent = node()
    run_job(agent, tmp_path, lambda: cards.show(gpu0=cards.hold()), "0", "1")
    zero, one = memory(agent, lambda entries: [entry["freed"] for entry in entries] == [False, True])
    assert (zero["used_bytes"], zero["holders"], zero["note"]) == (
        HELD_MIB * MIB,
        [],
        "held by a process outside this container",
    )
    assert one["note"] == ""


def test_of_a_card_that_cannot_be_read_nothing_is_claimed(
    node: Callable[[], Client], cards: Cards, tmp_path: Path
) -> None:
    agent = node()
    run_job(agent, tmp_path, lambda: cards.show("lost:1"), "0", "1")
    zero, one = memory(agent, lambda entries: entries[0]["freed"] is True)
    assert zero["freed"] is True
    assert (one["index"], one["freed"], one["used_bytes"], one["holders"]) == (1, None, None, [])
    assert "GPU is lost" in one["note"]


def test_of_a_card_that_gives_no_memory_nothing_is_claimed(
    node: Callable[[], Client], cards: Cards, tmp_path: Path
) -> None:
    agent = node()
    run_job(agent, tmp_path, lambda: cards.show("na:0"), "0")
    (entry,) = memory(agent, lambda entries: entries[0]["note"].startswith("the card cannot be read: "))
    assert (entry["freed"], entry["used_bytes"]) == (None, None)


def test_what_is_left_of_an_orphaned_job_keeps_its_memory_from_being_freed(
    node: Callable[[], Client], cards: Cards, tmp_path: Path
) -> None:
    agent = node()
    agent.launch("j-1", {"do": [["wait"]]}, gpus=["0"])
    record = agent.wait("j-1", "running")
    os.kill(record["supervisor"]["pid"], signal.SIGKILL)
    agent.wait("j-1", "orphaned")
    (entry,) = memory(agent, freed(False))
    assert (entry["holders"], entry["note"]) == ([], "1 of its processes lives on")
    agent.ask("stop", job="j-1", force=True)
    memory(agent, freed(True))


def test_a_card_is_told_of_by_the_last_job_that_had_it(
    node: Callable[[], Client], cards: Cards, tmp_path: Path
) -> None:
    agent = node()
    run_job(agent, tmp_path, lambda: None, "0", "1")
    memory(agent, freed(True))
    agent.launch("j-2", {"do": DONE}, gpus=["1"])
    agent.wait("j-2", "done")
    assert [entry["index"] for entry in agent.job("j-1")["gpu_memory"]] == [0]
    assert [entry["index"] for entry in agent.job("j-2")["gpu_memory"]] == [1]
    agent.launch("j-3", {"do": DONE}, gpus=["0"])
    agent.wait("j-3", "done")
    assert "gpu_memory" not in agent.job("j-1")


def test_an_hour_after_the_end_nothing_is_told_any_more(
    node: Callable[[], Client], cards: Cards, tmp_path: Path, state: Path
) -> None:
    agent = node()
    run_job(agent, tmp_path, lambda: None, "0")
    assert agent.job("j-1")["gpu_memory"]
    path = state / "jobs" / "j-1" / "state.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "ended": record["ended"] - gpumemory.KEPT_S}))
    assert "gpu_memory" not in agent.job("j-1")


# The rules of time, with a clock of the test's own.

CARD = {"index": 0, "uuid": uuid(0), "memory_used_bytes": 40 << 30, "processes": [], "error": None}
RECORD = {"job": "j-1", "ended": 1000.0, "gpus": [{"index": 0, "uuid": uuid(0), "baseline_bytes": 0}]}


def told(memory_of: GpuMemory, record: dict[str, Any] = RECORD) -> dict[str, Any]:
    (entry,) = memory_of.entries(record, 1001.0, lambda job, uuid: True)
    return entry


def reading(time: float, **card: Any) -> dict[str, Any]:
    return {"time": time, "gpus": [{**CARD, **card}], "gpu_error": None}


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(owners, "COMPUTE", (str(tmp_path / "nvidia-uvm"),))


def test_a_reading_that_may_be_from_before_the_end_proves_nothing(tmp_path: Path, nobody: None) -> None:
    found = GpuMemory(str(tmp_path))
    for moment in (1000.5, 1001.0 + LAG_S - 0.1):
        found.take(reading(moment, memory_used_bytes=0))
        assert (told(found)["freed"], told(found)["note"]) == (None, "no reading since the end yet")
    found.take(reading(1001.5, memory_used_bytes=0), asked=1000.9)
    assert told(found)["freed"] is None
    found.take(reading(1002.5, memory_used_bytes=TOLERANCE_BYTES), asked=1001.1)
    assert told(found)["freed"] is True
    found.take(reading(1001.0 + LAG_S, memory_used_bytes=TOLERANCE_BYTES + 1))
    assert told(found)["freed"] is True
    found.take(reading(1001.2 + LAG_S, memory_used_bytes=TOLERANCE_BYTES + 1))
    assert told(found)["freed"] is None


def test_what_the_driver_is_still_giving_back_is_not_called_held(tmp_path: Path, nobody: None) -> None:
    found = GpuMemory(str(tmp_path))
    found.take(reading(1002.0), asked=1001.5)
    assert (told(found)["freed"], told(found)["note"]) == (None, "the driver is still giving it back")
    found.take(reading(1005.0), asked=1001.0 + SETTLE_S)
    assert (told(found)["freed"], told(found)["note"]) == (False, OUTSIDE)


def test_stale_cards_are_no_reading_and_their_reason_is_told(tmp_path: Path) -> None:
    found = GpuMemory(str(tmp_path))
    found.take({**reading(2000.0), "gpu_error": "nvidia-smi did not answer in 5 s"}, asked=1999.0)
    assert (told(found)["freed"], told(found)["note"]) == (None, "nvidia-smi did not answer in 5 s")


def test_a_baseline_that_could_not_be_read_is_not_taken_for_0(tmp_path: Path, nobody: None) -> None:
    found = GpuMemory(str(tmp_path))
    found.take(reading(2000.0), asked=1999.0)
    entry = told(found, {**RECORD, "gpus": [{"index": 0, "uuid": uuid(0), "baseline_bytes": None}]})
    assert (entry["freed"], entry["used_bytes"]) == (None, 40 << 30)
    assert "before the job is not known" in entry["note"]


def test_a_reader_is_wanted_while_it_is_open_and_not_more_than_once_in_some_seconds(
    tmp_path: Path, nobody: None
) -> None:
    now = [0.0]
    found = GpuMemory(str(tmp_path), lambda: now[0])
    assert not found.wants_reading()
    told(found)
    assert found.wants_reading()
    told(found)
    assert not found.wants_reading()
    now[0] += gpumemory.ASK_EVERY_S
    assert found.wants_reading()
    now[0] += gpumemory.ASK_EVERY_S
    found.take(reading(1002.0, memory_used_bytes=0), asked=1001.5)
    assert told(found)["freed"] is True
    assert not found.wants_reading()


def test_a_process_of_another_card_is_not_taken_for_a_holder_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "driver" / "0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid(0)}\nDevice Minor: \t 3\n")
    monkeypatch.setattr(gpumemory, "_DRIVER_CARDS", str(tmp_path / "driver"))
    monkeypatch.setattr(owners, "DEVICES", (str(tmp_path / "nvidia"),))
    monkeypatch.setattr(owners, "COMPUTE", (str(tmp_path / "nvidia-uvm"),))
    assert gpumemory.device_of(uuid(0)) == str(tmp_path / "nvidia3")
    assert gpumemory.device_of(uuid(1)) is None
    found = GpuMemory(str(tmp_path))
    found.take(reading(2000.0), asked=1999.0)
    started = []
    try:
        for minor in ("2", "3"):
            files = [str(tmp_path / f"nvidia{minor}"), str(tmp_path / "nvidia-uvm")]
            code = f"kept = [open(path, 'w') for path in {files!r}]\n{READY}"
            child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(child)
            assert child.stdout and child.stdout.readline() == b"ready\n"
        assert [holder["pid"] for holder in told(found)["holders"]] == [started[1].pid]
    finally:
        for child in started:
            child.kill()
            child.communicate()


def test_one_who_only_reads_the_cards_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "DEVICES", (str(tmp_path / "nvidia"),))
    monkeypatch.setattr(owners, "COMPUTE", (str(tmp_path / "nvidia-uvm"),))
    with (tmp_path / "nvidiactl").open("w"):
        assert owners.open_devices(os.getpid()) == {str(tmp_path / "nvidiactl")}
        assert gpumemory.computing() == []
