"""Wire to facts: what an agent sends, as the console's types.

Tolerant on purpose: unknown fields are passed over, a missing or wrong one is None ("not available"), and what a node
wrote loses its control characters, so that no escape sequence of it reaches a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_tui.fleet.facts import (
    AgentGreeted,
    Disk,
    HostMetrics,
    Job,
    JobGpu,
    JobGpuMemory,
    JobState,
    Metrics,
    Progress,
    Side,
    Stray,
)
from dflash_tui.link import gpu_facts
from dflash_tui.link.wire import clean as clean
from dflash_tui.link.wire import clean_tree as clean_tree
from dflash_tui.link.wire import items, mapping
from dflash_tui.link.wire import number as number
from dflash_tui.link.wire import whole as whole
from dflash_tui.node.protocol import Launch


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
    fields = mapping(value)
    time = number(fields.get("time"))
    if time is None:
        return None
    return Metrics(
        time=time,
        host=_host_metrics(mapping(fields.get("host"))),
        gpus=tuple(gpu_facts.gpu(index, mapping(gpu)) for index, gpu in enumerate(items(fields.get("gpus")))),
        gpu_source=clean(fields.get("gpu_source")) or "none",
        gpu_error=clean(fields.get("gpu_error")),
        age_s=number(age) or 0.0,
        stale=stale is True,
    )


def _host_metrics(fields: Mapping[str, Any]) -> HostMetrics:
    disks = (mapping(disk) for disk in items(fields.get("disks")))
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


def jobs(values: object) -> tuple[Job, ...]:
    """The job records that can be read; others are passed over."""
    return tuple(found for value in items(values) if (found := job(value)) is not None)


def job(value: object) -> Job | None:
    """A job record (`node/protocol.py`), or None where it has no id or a state that we do not know."""
    fields = mapping(value)
    name = clean(fields.get("job"))
    try:
        state = JobState(fields.get("state"))  # type: ignore[arg-type]  # whatever the node sent
    except ValueError:
        return None
    if not name:
        return None
    ended = mapping(fields.get("exit"))
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
        supervisor_pid=whole(mapping(fields.get("supervisor")).get("pid")),
        runner_pid=whole(mapping(fields.get("runner")).get("pid")),
        stop_requested=number(mapping(fields.get("stop")).get("requested")),
        sides=_sides(fields.get("sides")),
        gpu_memory=tuple(_gpu_memory(fields.get("gpu_memory"))),
    )


def _job_gpus(value: object) -> list[JobGpu]:
    found = []
    for fields in map(mapping, items(value)):
        uuid = clean(fields.get("uuid"))
        if uuid:
            name, baseline = clean(fields.get("name")), whole(fields.get("baseline_bytes"))
            found.append(JobGpu(whole(fields.get("index")), uuid, name, baseline))
    return found


def _gpu_memory(value: object) -> list[JobGpuMemory]:
    found = []
    for fields in map(mapping, items(value)):
        uuid, freed = clean(fields.get("uuid")), fields.get("freed")
        if uuid:
            holders = [
                {**mapping(holder), "memory_bytes": mapping(holder).get("bytes")}
                for holder in items(fields.get("holders"))
            ]
            found.append(
                JobGpuMemory(
                    index=whole(fields.get("index")),
                    uuid=uuid,
                    used_bytes=whole(fields.get("used_bytes")),
                    baseline_bytes=whole(fields.get("baseline_bytes")),
                    freed=freed if isinstance(freed, bool) else None,
                    holders=tuple(gpu_facts.processes(holders)),
                    note=clean(fields.get("note")) or "",
                )
            )
    return found


_SIDE_STATES = ("waiting", "starting", "running", "done", "failed", "stopped")


def _sides(value: object) -> dict[str, Side]:
    """The sides of a comparison by their names; one in a state that we do not know is passed over."""
    found = {}
    for key, fields in ((key, mapping(item)) for key, item in mapping(value).items()):
        name, state = clean(key), fields.get("state")
        if not name or state not in _SIDE_STATES:
            continue
        found[name] = Side(
            side=name,
            state=state,
            phase=clean(fields.get("phase")),
            done=whole(fields.get("done")) or 0,
            total=whole(fields.get("total")),
            tokens=whole(fields.get("tokens")) or 0,
            bytes=whole(fields.get("bytes")) or 0,
            elapsed_s=number(fields.get("elapsed_s")),
            startup_s=number(fields.get("startup_s")),
            samples_per_s=number(fields.get("samples_per_s")),
            tokens_per_s=number(fields.get("tokens_per_s")),
            bytes_per_s=number(fields.get("bytes_per_s")),
            gpus=tuple(uuid for item in items(fields.get("gpus")) if (uuid := clean(item))),
        )
    return found


def _strays(value: object) -> list[Stray]:
    found = []
    for fields in map(mapping, items(value)):
        pid, ticks = whole(fields.get("pid")), whole(fields.get("ticks"))
        if pid is not None and ticks is not None:
            memory = whole(fields.get("gpu_bytes")), whole(fields.get("memory_bytes"))
            found.append(Stray(pid, ticks, clean(fields.get("command")) or "", *memory))
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
        unit="bytes" if value.get("unit") == "bytes" else "samples",
    )


def launch_of(data: bytes) -> Launch:
    """What a job was started with, from its `launch.json`; fields of another version are passed over. Raises ValueError."""
    kept = json.loads(data)
    try:
        launch = Launch(**{name: kept[name] for name in Launch._fields if name in kept})
        launch = launch._replace(gpus=tuple(map(str, launch.gpus)))
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(launch.spec, dict):
        raise ValueError("the spec is no object")
    return launch
