"""What the doctor makes of what it was told: drivers and builds of torch, modes of cards, file systems, limits, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from dflash_tui.node.disks import Mount
from dflash_tui.node.doctor import cards, checks, folders, main, pythons, system
from dflash_tui.node.doctor.checks import Check
from dflash_tui.node.doctor.folders import Folder
from dflash_tui.node.doctor.pythons import Node, Probed
from dflash_tui.node.loop import Loop

SETUP = "dflash-tui setup --host gpu-1"
H200 = {"name": "NVIDIA H200", "capability": [9, 0]}
GOOD = {"torch": "2.11.0", "transformers": "5.17.0", "datasets": "4.8.0", "safetensors": "0.7.0"}


def probed(torch: dict[str, Any] | None = None, packages: dict[str, str] | None = None, **stages: Any) -> Probed:
    """A worker Python in which all is well but what is given."""
    about = {
        "version": "2.11.0+cu130",
        "cuda": "13.0",
        "hip": None,
        "gpus": [H200, H200],
        "varlen_attn": {"window_size": True},
    }
    facts: dict[str, Any] = {"python": [3, 12, 1], "packages": {**GOOD, **(packages or {})}}
    facts.update({name: {} for name in ("transformers", "datasets", "safetensors")}, torch={**about, **(torch or {})})
    facts.update(stages)
    return Probed("/opt/w/bin/python", facts)


def judged(one: Probed, gpus: int | None = 2, cuda: Sequence[int] | None = (13, 0)) -> dict[str, Check]:
    return {check.name: check for check in pythons.judge(one, Node(gpus, cuda, SETUP))}


def test_a_python_in_which_all_is_well_has_no_problem() -> None:
    found = judged(probed())
    assert found["torch"].found == "2.11.0+cu130 for CUDA 13.0"
    assert found["torch on GPUs"] == Check("torch on GPUs", "ok", "sees 2, bfloat16")
    assert {check.status for name, check in found.items() if name != "flash-linear-attention"} == {"ok"}


@pytest.mark.parametrize(
    ("built", "driver", "status", "remedy"),
    [
        ("13.0", (12, 8), "problem", "install driver 580 or newer, or the cu126 build of torch"),
        ("12.8", (11, 4), "problem", "install driver 525 or newer, or the cu118 build of torch"),
        ("12.8", (12, 2), "ok", ""),
        ("12.8", (13, 0), "ok", ""),
        ("13.1", (13, 0), "ok", ""),
        ("13.0", None, "ok", ""),
    ],
)
def test_a_driver_older_than_torchs_cuda_is_told_with_both_ways_out(
    built: str, driver: tuple[int, int] | None, status: str, remedy: str
) -> None:
    found = judged(probed({"cuda": built}), cuda=driver)["torch on GPUs"]
    assert (found.status, found.remedy) == (status, remedy)


def test_torch_that_cannot_use_the_cards_says_why() -> None:
    assert judged(probed({"cuda": None}))["torch on GPUs"].status == "problem"
    assert "torch on GPUs" not in judged(probed({"cuda": None}), gpus=0, cuda=None)
    assert "torch on GPUs" not in judged(probed({"cuda": None}), gpus=None, cuda=None)
    fewer = judged(probed(), gpus=8)["torch on GPUs"]
    assert (fewer.status, fewer.found) == ("warning", "torch sees 2 of 8 GPUs")
    none = judged(probed({"gpus": []}), gpus=8)["torch on GPUs"]
    assert (none.status, none.found) == ("problem", "torch sees 0 of 8 GPUs")
    failed = judged(probed({"gpu_error": "CUDA unknown error", "gpus": []}))["torch on GPUs"]
    assert (failed.status, failed.found) == ("problem", "CUDA unknown error")
    old = judged(probed({"gpus": [{"name": "Tesla T4", "capability": [7, 5]}]}), gpus=1)["torch on GPUs"]
    assert (old.status, old.found) == ("warning", "no bfloat16 in hardware on Tesla T4")


def test_a_card_that_torch_was_not_built_for_is_a_problem_but_not_where_ptx_reaches_it() -> None:
    new = {"name": "NVIDIA B200", "capability": [10, 0]}
    built = {"gpus": [new], "architectures": ["sm_80", "sm_90"]}
    found = judged(probed(built), gpus=1)["torch on GPUs"]
    assert (found.status, found.found) == ("problem", "this torch has no kernels for NVIDIA B200 (sm_100)")
    for more in (["compute_90"], ["sm_100"], ["sm_100a"]):
        both = {"gpus": [new], "architectures": ["sm_80", "sm_90", *more]}
        assert judged(probed(both), gpus=1)["torch on GPUs"].status == "ok"
    # A binary for 8.0 runs on 8.9, one for 8.9 not on 8.0.
    ada, ampere = {"name": "L40S", "capability": [8, 9]}, {"name": "A100", "capability": [8, 0]}
    assert judged(probed({"gpus": [ada], "architectures": ["sm_80"]}), gpus=1)["torch on GPUs"].status == "ok"
    assert judged(probed({"gpus": [ampere], "architectures": ["sm_89"]}), gpus=1)["torch on GPUs"].status == "problem"


def test_versions_are_judged_by_what_was_tried() -> None:
    found = judged(probed(packages={"torch": "2.7.1", "transformers": "5.24.0", "datasets": "3.6.0"}))
    assert (found["torch"].status, found["transformers"].status, found["datasets"].status) == ("warning",) * 3
    assert "newer than what was tried" in found["transformers"].found
    assert found["transformers"].remedy == "/opt/w/bin/python -m pip install 'transformers>=5.16.1,<5.20'"
    found = judged(probed(packages={"torch": "2.5.1+cu124", "transformers": "4.57.0"}))
    assert (found["torch"].status, found["transformers"].status) == ("problem", "problem")
    assert pythons.numbers("2.11.0rc1+cu130") == (2, 11, 0)
    assert pythons.numbers("weird") == ()


def test_kernels_are_asked_for_only_where_there_are_gpus() -> None:
    names = {"varlen_attn", "flash-linear-attention"}
    assert names <= set(judged(probed()))
    assert not names & set(judged(probed(), gpus=0, cuda=None))
    broken = probed(packages={"causal-conv1d": "1.5.0"}, causal_conv1d={"error": "ImportError: undefined symbol: x"})
    found = judged(broken)["causal-conv1d"]
    assert (found.status, found.found) == ("warning", "1.5.0 cannot be imported: ImportError: undefined symbol: x")
    assert "pip uninstall causal-conv1d" in judged(broken)["causal-conv1d"].remedy
    core = judged(probed(packages={"fla-core": "0.6.0"}, fla={}))["flash-linear-attention"]
    assert (core.status, core.found) == ("ok", "0.6.0")
    older = probed(packages={"flash-linear-attention": "0.4.0"}, fla={"error": "ImportError: takes no chunk_indices"})
    assert judged(older)["flash-linear-attention"].status == "warning"
    old = judged(probed({"varlen_attn": {"error": "ModuleNotFoundError: No module named 'torch.nn.attention.varlen'"}}))
    assert old["varlen_attn"].status == "warning"


def test_an_old_python_is_one_problem_and_a_silent_one_says_what_it_said() -> None:
    old = judged(Probed("/usr/bin/python3", {"python": [3, 8, 10], "packages": {}}))
    assert list(old) == ["worker Python"] and "3.11 is the oldest that works" in old["worker Python"].found
    broken = judged(Probed("/opt/x", {}, code=127, said="cannot execute: required file not found"))
    assert broken["worker Python"].found == "/opt/x does not run: cannot execute: required file not found"


def test_services_are_found_wherever_they_are() -> None:
    node = Node(1, (13, 0), SETUP)
    vllm, trainer = pythons.services([("the worker Python", {"vllm": "0.20.1"})], node)
    assert (vllm.status, vllm.remedy) == ("warning", SETUP + " --vllm 0.26.0")
    assert (trainer.status, trainer.remedy) == ("warning", SETUP + " --trainer")
    found = [("/e/a", {"vllm": "0.20.1"}), ("/e/b", {"vllm": "0.26.0", "speculators": "0.9.0"})]
    vllm, trainer = pythons.services(found, node)
    assert (vllm.status, vllm.found) == ("ok", "0.20.1 in /e/a, 0.26.0 in /e/b")
    assert trainer.status == "ok"


# The cards.


def gpu_facts(**more: Any) -> dict[str, Any]:
    one = {"index": 0, "name": "NVIDIA H200", "memory_total_bytes": 141 << 30, "error": None}
    facts = {
        "driver": "580.1",
        "cuda": [13, 0],
        "cards": [one],
        "modes": [],
        "source": "nvml",
        "error": None,
        "hardware": 1,
        "module": True,
    }
    return {**facts, **more}


def card_checks(facts: dict[str, Any], late_s: float | None = None) -> dict[str, Check]:
    return {check.name: check for check in cards.judge(facts, late_s)}


def test_no_gpu_is_a_fact_and_a_gpu_without_a_driver_a_problem() -> None:
    nothing = {"modes": [], "driver": None, "cuda": None, "cards": [], "error": None, "module": False}
    assert card_checks({**nothing, "hardware": 0})["GPUs"].status == "warning"
    assert card_checks({**nothing, "hardware": None})["GPUs"].found == "no GPU: CPU only"
    hidden = card_checks({**nothing, "hardware": 8})["GPUs"]
    assert (hidden.status, hidden.found) == ("problem", "8 NVIDIA cards on the bus, and no driver to use")
    failed = card_checks(gpu_facts(cards=[], error="NVML: Driver/library version mismatch"))["GPUs"]
    assert failed.status == "problem" and "reboot" in failed.remedy
    assert card_checks({}, 25.0)["GPUs"].status == "problem"
    assert card_checks({"failed": "Killed"})["GPUs"].status == "unknown"
    part = card_checks(gpu_facts(hardware=8))["GPUs"]
    assert (part.status, part.found) == ("ok", "1 x NVIDIA H200 (141 GiB); 8 are on the bus")


def test_modes_that_keep_programs_off_a_card_are_told() -> None:
    kinds = ("Default", "Exclusive_Process", "Prohibited")
    three = [[number, mode, number == 0] for number, mode in enumerate(kinds)]
    found = cards.judge(gpu_facts(modes=three), None)
    modes = [check for check in found if check.name == "compute mode"]
    assert [(check.status, check.found[:6]) for check in modes] == [("problem", "GPU 2:"), ("warning", "GPU 1:")]
    assert "nvidia-smi -i 2 -c DEFAULT" in modes[0].remedy
    assert next(check for check in found if check.name == "MIG").status == "warning"


class Driver:
    """NVML as far as the doctor asks it, by the real module's errors."""

    NVMLError = pynvml.NVMLError

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return 3 if handle else 0

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle:
            return [1, 1]
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_nvml_tells_driver_cuda_and_modes() -> None:
    facts: dict[str, Any] = {"cards": [{"index": 0}, {"index": 1}], "modes": []}
    cards.ask_nvml(Driver(), facts)
    assert (facts["driver"], facts["cuda"]) == ("580.159.04", [12, 8])
    assert facts["modes"] == [[0, "Default", None], [1, "Exclusive_Process", True]]


def test_cards_on_the_bus_are_counted_with_a_driver_or_without(tmp_path: Path) -> None:
    devices = tmp_path / "sys" / "bus" / "pci" / "devices"
    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x8086", "0x030000")):
        (devices / name).mkdir(parents=True)
        (devices / name / "vendor").write_text(vendor + "\n")
        (devices / name / "class").write_text(kind + "\n")
    assert cards.hardware(str(tmp_path)) == 1
    assert cards.hardware(str(tmp_path / "none")) is None


# Disks.


def test_folders_are_grouped_by_file_system_without_touching_them() -> None:
    mounts = [Mount("/", "8:1", "ext4"), Mount("/home", "0:40", "nfs4"), Mount("/data", "9:1", "xfs")]
    state, home = Folder("state", "/home/ops/.local/state/dflash-tui"), Folder("home", "/home/ops")
    data, root = Folder("wanted", "/data/new/states"), Folder("temporary", "/tmp")
    assert folders.group([state, home, root, data], mounts) == [[state], [root], [data]]
    elsewhere = Folder("state", "/var/state")
    assert folders.group([elsewhere, home, root], mounts) == [[elsewhere, root], [home]]


def test_nothing_is_written_where_too_little_is_free(tmp_path: Path) -> None:
    assert folders.measure(str(tmp_path), 1 << 20) is None
    speed = folders.measure(str(tmp_path), 16 << 20)
    assert speed > 0
    assert list(tmp_path.iterdir()) == []
    assert isinstance(folders.measure("/proc/self", 1 << 30), OSError)


def test_a_folder_that_is_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[Check] = []
    folders.look([Folder("wanted", str(tmp_path / "file"))], True, said.append)
    assert said[0].status == "problem" and "Not a directory" in said[0].found


def test_locks_that_do_not_lock_are_told(tmp_path: Path) -> None:
    assert folders.flock(str(tmp_path)).status == "ok"
    left: list[Path] = []
    found = folders.flock(str(tmp_path), lambda fd, how: left.extend(tmp_path.iterdir()))
    assert "does not keep a second holder out" in found.found
    assert left == [], "a lock that hangs until it is killed would leave a file"

    def unsupported(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    found = folders.flock(str(tmp_path), unsupported)
    assert (found.status, found.remedy) == ("problem", "set XDG_STATE_HOME to a folder on a local disk")
    assert fcntl.LOCK_EX and list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_answer_is_a_problem_after_its_limit() -> None:
    loop = Loop()
    group = [Folder("state", "/mnt/dead/state"), Folder("wanted", "/mnt/dead/data")]
    code = (
        'import time; print(\'{"name": "state folder", "status": "ok", "found": "x"}\', flush=True); time.sleep(1000)'
    )
    part = main.Asked(loop, [sys.executable, "-I", "-S", "-c", code], 4.0, None, dict(os.environ), loop.stop)
    loop.run()
    (silent,) = main._silent(group, part)
    assert (silent.name, silent.status, silent.found) == (
        "disk /mnt/dead/data",
        "problem",
        "/mnt/dead/data did not answer within 4 s",
    )


# The machine.


def fake_root(tmp_path: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(("most", "status"), [("max", "ok"), ("4096", "ok"), ("900", "warning"), ("450", "problem")])
def test_the_lowest_limit_on_processes_counts(
    tmp_path: Path, most: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_user_room", lambda root: None)
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/pids.max": most,
        "sys/fs/cgroup/a/pids.current": "400",
        "sys/fs/cgroup/a/b/pids.max": "max",
        "sys/fs/cgroup/a/b/pids.current": "3",
    }
    assert system.processes(fake_root(tmp_path, files)).status == status


def test_a_proc_that_hides_processes_is_told_to_who_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "22 20 0:21 / /proc rw,nosuid shared:5 - proc proc rw,hidepid={}\n"
    root = fake_root(tmp_path, {"proc/self/mountinfo": row.format("invisible")})
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert system.process_list(root).status == "warning"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert system.process_list(root).status == "ok"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert system.process_list(fake_root(tmp_path, {"proc/self/mountinfo": row.format("0")})).status == "ok"


def test_the_containers_memory_is_what_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 268435456 kB\nMemAvailable: 200000000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(6 << 30),
        "sys/fs/cgroup/memory.current": str(3 << 30),
    }
    found = system.memory(fake_root(tmp_path, files))
    assert found.status == "warning"
    assert found.found == "3.0 GiB free of 6.0 GiB, limited by the container (256 GiB in all)"
    assert system.memory(str(tmp_path / "none")).status == "unknown"


@pytest.mark.parametrize(
    ("language", "status"), [("C.UTF-8", "ok"), ("", "ok"), ("POSIX", "ok"), ("xx_XX.UTF-8", "warning")]
)
def test_a_locale_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, language: str, status: str) -> None:
    for name in ("LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", language)
    assert system.text().status == status


def test_a_line_is_one_line_and_sizes_have_units() -> None:
    assert checks.line("a\n  b\tc") == "a b c"
    assert len(checks.line("x" * 5000)) == 500
    assert [checks.size(number) for number in (5, 3 << 20, 200 << 30, 5 << 40)] == [
        "5 B",
        "3.0 MiB",
        "200 GiB",
        "5.0 TiB",
    ]
    assert checks.of_json({"name": "x", "status": "fine"}) is None
    assert SimpleNamespace(**Check("a", "ok", "b").to_json()).remedy == ""
