"""Wire to facts: what an agent sends, as the console's types.

Tolerant on purpose: unknown fields are passed over, a missing or wrong one is None ("not available"), and what a node
wrote loses its control characters, so that no escape sequence of it reaches a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dflash_tui.fleet.facts import (
    AgentGreeted,
    Disk,
    Gpu,
    GpuProcess,
    HostMetrics,
    Job,
    JobGpu,
    JobGpuMemory,
    JobState,
    Metrics,
    Progress,
    Stray,
)

# Control characters, marks that turn the direction of writing, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BLANK = re.compile("[\t\n\r\x0b\x0c\x85]+")


def clean(value: object) -> str | None:
    """Text fit for one line of a terminal, or None where `value` is no text."""
    return _CONTROL.sub("", _BLANK.sub(" ", value)) if isinstance(value, str) else None


def clean_tree(value: Any) -> Any:
    """A JSON value with every text in it cleaned and every number finite."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [clean_tree(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(name)): clean_tree(item) for name, item in value.items()}
    return value


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object) -> int | None:
    found = number(value)
    return None if found is None or found != int(found) else int(value)  # type: ignore[call-overload]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def greeted(host: str, hello: Mapping[str, Any], now: float) -> AgentGreeted:
    """The hello of an agent; `now` is the console's clock, seconds since 1970."""
    time = number(hello.get("time"))
    return AgentGreeted(
        host=host,
        hostname=clean(hello.get("host")) or "",
        boot_id=clean(hello.get("boot_id")) or "",
        agent_pid=whole(hello.get("pid")) or 0,
        python=clean(hello.get("python")) or "",
        default_python=clean(hello.get("default_python")) or "",
        user=clean(hello.get("user")) or "",
        state_dir=clean(hello.get("state_dir")) or "",
        clock_offset_s=0.0 if time is None else time - now,
    )


def metrics(value: object, age: object = None, stale: object = None) -> Metrics | None:
    """One reading of a node's metrics, or None where it is none."""
    fields = _mapping(value)
    time = number(fields.get("time"))
    if time is None:
        return None
    return Metrics(
        time=time,
        host=_host_metrics(_mapping(fields.get("host"))),
        gpus=tuple(_gpu(index, _mapping(gpu)) for index, gpu in enumerate(_list(fields.get("gpus")))),
        gpu_source=clean(fields.get("gpu_source")) or "none",
        gpu_error=clean(fields.get("gpu_error")),
        age_s=number(age) or 0.0,
        stale=stale is True,
    )


def _host_metrics(fields: Mapping[str, Any]) -> HostMetrics:
    disks = (_mapping(disk) for disk in _list(fields.get("disks")))
    return HostMetrics(
        cpu_count=whole(fields.get("cpu_count")),
        cpu_percent=number(fields.get("cpu_percent")),
        load_1=number(fields.get("load_1")),
        load_5=number(fields.get("load_5")),
        load_15=number(fields.get("load_15")),
        memory_used_bytes=whole(fields.get("memory_used_bytes")),
        memory_total_bytes=whole(fields.get("memory_total_bytes")),
        swap_used_bytes=whole(fields.get("swap_used_bytes")),
        swap_total_bytes=whole(fields.get("swap_total_bytes")),
        disks=tuple(
            Disk(path, whole(disk.get("free_bytes")), whole(disk.get("total_bytes")))
            for disk in disks
            if (path := clean(disk.get("path")))
        ),
        disk_read_bytes_per_s=number(fields.get("disk_read_bytes_per_s")),
        disk_write_bytes_per_s=number(fields.get("disk_write_bytes_per_s")),
        net_receive_bytes_per_s=number(fields.get("net_receive_bytes_per_s")),
        net_send_bytes_per_s=number(fields.get("net_send_bytes_per_s")),
        uptime_s=number(fields.get("uptime_s")),
    )


def _gpu(place: int, fields: Mapping[str, Any]) -> Gpu:
    index = whole(fields.get("index"))
    processes = fields.get("processes")
    return Gpu(
        index=place if index is None else index,
        uuid=clean(fields.get("uuid")),
        name=clean(fields.get("name")),
        utilisation_percent=number(fields.get("utilisation_percent")),
        memory_used_bytes=whole(fields.get("memory_used_bytes")),
        memory_total_bytes=whole(fields.get("memory_total_bytes")),
        power_watts=number(fields.get("power_watts")),
        power_limit_watts=number(fields.get("power_limit_watts")),
        temperature_celsius=number(fields.get("temperature_celsius")),
        sm_clock_mhz=whole(fields.get("sm_clock_mhz")),
        memory_clock_mhz=whole(fields.get("memory_clock_mhz")),
        processes=tuple(_gpu_processes(processes)) if isinstance(processes, list) else None,
        error=clean(fields.get("error")),
    )


def _gpu_processes(values: list[Any]) -> list[GpuProcess]:
    found = []
    for fields in map(_mapping, values):
        pid = whole(fields.get("pid"))
        if pid is not None:
            memory = whole(fields.get("memory_bytes"))
            command, user, job = (clean(fields.get(name)) for name in ("command", "user", "job"))
            found.append(GpuProcess(pid, memory, command, user, job))
    return found


def jobs(values: object) -> tuple[Job, ...]:
    """The job records that can be read; others are passed over."""
    return tuple(found for value in _list(values) if (found := job(value)) is not None)


def job(value: object) -> Job | None:
    """A job record (`node/protocol.py`), or None where it has no id or a state that we do not know."""
    fields = _mapping(value)
    name = clean(fields.get("job"))
    try:
        state = JobState(fields.get("state"))  # type: ignore[arg-type]
    except ValueError:
        return None
    if not name:
        return None
    ended = _mapping(fields.get("exit"))
    result, last_event = fields.get("result"), fields.get("last_event")
    return Job(
        id=name,
        name=clean(fields.get("name")) or "",
        verb=clean(fields.get("verb")) or "",
        state=state,
        created=number(fields.get("created")) or 0.0,
        started=number(fields.get("started")),
        ended=number(fields.get("ended")),
        gpus=tuple(_job_gpus(fields.get("gpus"))),
        exit_code=whole(ended.get("code")),
        exit_signal=whole(ended.get("signal")),
        reason=clean(fields.get("reason")) or "",
        log_size=whole(fields.get("log_size")) or 0,
        directory=clean(fields.get("dir")) or "",
        python=clean(fields.get("python")) or "",
        progress=_progress(fields.get("progress")),
        strays=tuple(_strays(fields.get("strays"))),
        result=clean_tree(result) if isinstance(result, dict) else None,
        last_event=clean_tree(last_event) if isinstance(last_event, dict) else None,
        supervisor_pid=whole(_mapping(fields.get("supervisor")).get("pid")),
        runner_pid=whole(_mapping(fields.get("runner")).get("pid")),
        stop_requested=number(_mapping(fields.get("stop")).get("requested")),
        gpu_memory=tuple(_gpu_memory(fields.get("gpu_memory"))),
    )


def _job_gpus(value: object) -> list[JobGpu]:
    found = []
    for fields in map(_mapping, _list(value)):
        uuid = clean(fields.get("uuid"))
        if uuid:
            name, baseline = clean(fields.get("name")), whole(fields.get("baseline_bytes"))
            found.append(JobGpu(whole(fields.get("index")), uuid, name, baseline))
    return found


def _gpu_memory(value: object) -> list[JobGpuMemory]:
    found = []
    for fields in map(_mapping, _list(value)):
        uuid, freed = clean(fields.get("uuid")), fields.get("freed")
        if uuid:
            holders = [
                {**_mapping(holder), "memory_bytes": _mapping(holder).get("bytes")}
                for holder in _list(fields.get("holders"))
            ]
            found.append(
                JobGpuMemory(
                    index=whole(fields.get("index")),
                    uuid=uuid,
                    used_bytes=whole(fields.get("used_bytes")),
                    baseline_bytes=whole(fields.get("baseline_bytes")),
                    freed=freed if isinstance(freed, bool) else None,
                    holders=tuple(_gpu_processes(holders)),
                    note=clean(fields.get("note")) or "",
                )
            )
    return found


def _strays(value: object) -> list[Stray]:
    found = []
    for fields in map(_mapping, _list(value)):
        pid, ticks = whole(fields.get("pid")), whole(fields.get("ticks"))
        if pid is not None and ticks is not None:
            found.append(Stray(pid, ticks, clean(fields.get("command")) or "", whole(fields.get("gpu_bytes"))))
    return found


def _progress(value: object) -> Progress | None:
    if not isinstance(value, dict):
        return None
    return Progress(
        done=whole(value.get("done")) or 0,
        total=whole(value.get("total")),
        skipped=whole(value.get("skipped")) or 0,
        tokens=whole(value.get("tokens")) or 0,
        bytes=whole(value.get("bytes")) or 0,
        elapsed_s=number(value.get("elapsed_s")) or 0.0,
        samples_per_s=number(value.get("samples_per_s")),
        tokens_per_s=number(value.get("tokens_per_s")),
        bytes_per_s=number(value.get("bytes_per_s")),
        eta_s=number(value.get("eta_s")),
        phase=clean(value.get("phase")),
    )
