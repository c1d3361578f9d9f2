"""What an agent sends, as facts: tolerant of what is missing or wrong, strict about what reaches a terminal."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dflash_tui.fleet.facts import (
    Disk,
    Gpu,
    GpuEcc,
    GpuMig,
    GpuNvLink,
    GpuPcie,
    GpuProcess,
    GpuRemappedRows,
    GpuRetiredPages,
    GpuXid,
    HostMetrics,
    Job,
    JobGpuMemory,
    JobState,
    MigInstance,
    Progress,
    Side,
    Stray,
)
from dflash_tui.link.facts import clean, greeted, job, jobs, metrics

RECORD = {
    "job": "20261130-025500-extract-3f9a",
    "name": "first try",
    "verb": "extract",
    "python": "/usr/bin/python3",
    "state": "orphaned",
    "created": 10.5,
    "started": 11,
    "ended": None,
    "gpus": [{"index": 1, "uuid": "GPU-1", "name": "H200", "baseline_bytes": 5}, {"index": 2}, "rubbish"],
    "exit": {"code": None, "signal": 9},
    "reason": "killed",
    "dir": "/state/jobs/x",
    "log_size": 12,
    "progress": {"done": 3, "total": 8, "tokens": 99, "bytes": 7, "samples_per_s": 1.5, "eta_s": None, "phase": "run"},
    "strays": [{"pid": 7, "ticks": 8, "command": "vllm", "gpu_bytes": 9, "memory_bytes": 10}, {"pid": 7}],
    "gpu_memory": [
        {
            "uuid": "GPU-1",
            "index": 1,
            "used_bytes": 9,
            "baseline_bytes": 5,
            "freed": False,
            "holders": [{"pid": 7, "command": "a\x1b[2Jb", "bytes": 4, "job": None}, {"pid": "7"}, None],
            "note": "",
        },
        {"uuid": "GPU-2", "freed": "yes", "used_bytes": "9", "holders": 3},
        {"index": 3, "freed": True},
        "rubbish",
    ],
    "result": {"layer_ids": [1, 2], "output": "/out\x1b[31m"},
    "sides": {
        "hf": {
            "t": 1.5,
            "event": "side",
            "side": "hf",
            "state": "running",
            "phase": "extract\x1b[2Jing",
            "done": 3,
            "total": 8,
            "tokens": 90,
            "bytes": 700,
            "elapsed_s": 2.5,
            "startup_s": 1,
            "samples_per_s": 4.5,
            "tokens_per_s": None,
            "bytes_per_s": "fast",
            "gpus": ["GPU-1", 3],
        },
        "vllm": {"state": "waiting"},
        "a side in a state of the future": {"state": "humming"},
        "none": 3,
    },
    "a field of the future": {"x": 1},
}


def test_a_whole_record_becomes_a_job() -> None:
    found = job(RECORD)
    assert found is not None
    assert (found.id, found.state, found.created, found.started, found.ended) == (
        RECORD["job"],
        JobState.ORPHANED,
        10.5,
        11.0,
        None,
    )
    assert (found.exit_code, found.exit_signal) == (None, 9)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-1"]
    assert found.strays == (Stray(7, 8, "vllm", 9, 10),)
    assert found.gpu_memory == (
        JobGpuMemory(1, "GPU-1", 9, 5, False, (GpuProcess(7, 4, "a[2Jb"),)),
        JobGpuMemory(None, "GPU-2"),
    )
    assert found.sides == {
        "hf": Side("hf", "running", "extract[2Jing", 3, 8, 90, 700, 2.5, 1.0, 4.5, gpus=("GPU-1",)),
        "vllm": Side("vllm"),
    }
    assert found.progress == Progress(done=3, total=8, tokens=99, bytes=7, samples_per_s=1.5, phase="run")
    assert found.result == {"layer_ids": [1, 2], "output": "/out[31m"}


def test_a_record_of_nothing_but_its_id_and_state_is_a_job_and_less_is_none() -> None:
    assert job({"job": "x", "state": "running"}) == Job("x", "", "", JobState.RUNNING, 0.0)
    assert job({"job": "x", "state": "sleeping"}) is None
    assert job({"state": "running"}) is None
    assert jobs([RECORD, None, 3, {}, {"job": "x", "state": "done"}])[1].id == "x"
    assert jobs("rubbish") == ()


@pytest.mark.parametrize("wrong", [None, "text", True, [], {}, float("nan"), float("inf"), 10**400])
def test_a_value_of_the_wrong_type_is_not_available_and_never_zero(wrong: object) -> None:
    names = [field.name for field in dataclasses.fields(HostMetrics) if field.name != "disks"]
    host = dict.fromkeys(names, wrong)
    texts = ("uuid", "name", "pci_bus_id", "compute_mode", "xid_source", "error", "persistence")
    lists = ("processes", "clock_reasons", "faults")
    gpu_names = [f.name for f in dataclasses.fields(Gpu) if f.name not in ("index", *texts, *lists)]
    sent = {
        "time": 5,
        "host": {**host, "disks": [{"path": "/", "free_bytes": wrong}]},
        "gpus": [dict.fromkeys(gpu_names, wrong)],
    }
    found = metrics(sent)
    assert found is not None
    assert found.host == HostMetrics(disks=(Disk("/"),))
    assert found.gpus == (Gpu(0),)


def test_what_a_node_can_give_arrives_unchanged() -> None:
    gpu = Gpu(
        index=3, uuid="GPU-3", name="H200", pci_bus_id="0000:3b:00.0", utilisation_percent=50.0, memory_used_bytes=1,
        memory_total_bytes=2, power_watts=300.5, power_limit_watts=700.0, power_limit_default_watts=700.0,
        power_limit_max_watts=1000.0, energy_joules=1e9, temperature_celsius=40.0, temperature_slowdown_celsius=90.0,
        temperature_shutdown_celsius=95.0, memory_temperature_celsius=45.0, temperature_memory_max_celsius=100.0,
        fan_percent=30.0, sm_clock_mhz=1980, memory_clock_mhz=3200, clock_reasons=("sw_power_cap",), performance_state=0,
        persistence=True, compute_mode="default", ecc=GpuEcc(True, False, 1, 2, 3, 4),
        remapped_rows=GpuRemappedRows(5, 6, True, False), retired_pages=GpuRetiredPages(7, 8, True),
        pcie=GpuPcie(4, 5, 8, 16, 9, 1.5, 2.5), nvlink=GpuNvLink((True, False, None), 3.5, 4.5, 1, 2, 3),
        mig=GpuMig(True, True, (MigInstance("MIG-1", "1g.18gb", 1, 0, 10, 20),)), xid=GpuXid(79, 4.5, "nvml", "words"),
        xid_source="nvml", processes=(GpuProcess(9, 8, "python", "me", "job"),), faults=("NVLink: Unknown Error",),
    )  # fmt: skip
    assert all(getattr(gpu, f.name) is not None for f in dataclasses.fields(Gpu) if f.name != "error")
    host = HostMetrics(cpu_count=2, cpu_percent=3.5, load_1=0.5, memory_used_bytes=7, disks=(Disk("/data", 1, 2),))
    sent = {"time": 5.5, "host": dataclasses.asdict(host), "gpus": [dataclasses.asdict(gpu)], "gpu_source": "nvml"}
    found = metrics(json.loads(json.dumps(sent)), 0.25, True)
    assert found is not None
    assert (found.host, found.gpus, found.gpu_source, found.age_s, found.stale) == (host, (gpu,), "nvml", 0.25, True)


def test_a_lost_gpu_is_told_beside_the_good_ones_and_no_processes_are_not_unknown_processes() -> None:
    found = metrics({"time": 1, "gpus": [{"index": 0, "error": "GPU is lost"}, {"index": 1, "processes": []}]})
    assert found is not None
    assert found.gpus == (Gpu(0, error="GPU is lost"), Gpu(1, processes=()))


def test_no_escape_sequence_of_a_node_reaches_a_terminal() -> None:
    text = "a\x1b]0;title\x07b\r\nc\x9b31m\u202ed\ud800\x00\te"
    assert clean(text) == "a]0;titleb c31md e"
    hello = {"host": text, "user": text, "state_dir": text, "python": text, "default_python": text, "boot_id": text}
    fact = greeted("node", {**hello, "time": 12.0, "pid": 4}, 10.0)
    assert fact.clock_offset_s == 2.0 and fact.agent_pid == 4
    assert all(value.isprintable() for value in dataclasses.astuple(fact) if isinstance(value, str))
