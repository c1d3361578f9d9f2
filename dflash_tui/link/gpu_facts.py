"""GPUs off the wire: `node/nvml.py` and `node/smi.py` name the fields as `fleet.facts.Gpu` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dflash_tui.fleet.facts import (
    Gpu,
    GpuEcc,
    GpuMig,
    GpuNvLink,
    GpuPcie,
    GpuProcess,
    GpuRemappedRows,
    GpuRetiredPages,
    GpuXid,
    MigInstance,
)
from dflash_tui.link.wire import clean, items, mapping, number, truth, whole

Fields = Mapping[str, Any]
T = TypeVar("T")


def gpu(place: int, fields: Fields) -> Gpu:
    """A card; `place` is its index where it does not tell one."""
    index = whole(fields.get("index"))
    running, reasons = fields.get("processes"), fields.get("clock_reasons")
    return Gpu(
        index=place if index is None else index,
        uuid=clean(fields.get("uuid")),
        name=clean(fields.get("name")),
        pci_bus_id=clean(fields.get("pci_bus_id")),
        utilisation_percent=number(fields.get("utilisation_percent")),
        memory_used_bytes=whole(fields.get("memory_used_bytes")),
        memory_total_bytes=whole(fields.get("memory_total_bytes")),
        power_watts=number(fields.get("power_watts")),
        power_limit_watts=number(fields.get("power_limit_watts")),
        power_limit_default_watts=number(fields.get("power_limit_default_watts")),
        power_limit_max_watts=number(fields.get("power_limit_max_watts")),
        energy_joules=number(fields.get("energy_joules")),
        temperature_celsius=number(fields.get("temperature_celsius")),
        temperature_slowdown_celsius=number(fields.get("temperature_slowdown_celsius")),
        temperature_shutdown_celsius=number(fields.get("temperature_shutdown_celsius")),
        memory_temperature_celsius=number(fields.get("memory_temperature_celsius")),
        temperature_memory_max_celsius=number(fields.get("temperature_memory_max_celsius")),
        fan_percent=number(fields.get("fan_percent")),
        sm_clock_mhz=whole(fields.get("sm_clock_mhz")),
        memory_clock_mhz=whole(fields.get("memory_clock_mhz")),
        clock_reasons=tuple(_words(reasons)) if isinstance(reasons, list) else None,
        performance_state=whole(fields.get("performance_state")),
        persistence=truth(fields.get("persistence")),
        compute_mode=clean(fields.get("compute_mode")),
        ecc=_group(fields, "ecc", _ecc),
        remapped_rows=_group(fields, "remapped_rows", _remapped_rows),
        retired_pages=_group(fields, "retired_pages", _retired_pages),
        pcie=_group(fields, "pcie", _pcie),
        nvlink=_group(fields, "nvlink", _nvlink),
        mig=_group(fields, "mig", _mig),
        xid=_group(fields, "xid", _xid),
        xid_source=clean(fields.get("xid_source")),
        processes=tuple(processes(running)) if isinstance(running, list) else None,
        faults=tuple(_words(items(fields.get("faults")))),
        error=clean(fields.get("error")),
    )


def processes(values: list[Any]) -> list[GpuProcess]:
    found = []
    for fields in map(mapping, values):
        pid = whole(fields.get("pid"))
        if pid is not None:
            memory = whole(fields.get("memory_bytes"))
            command, user, job = (clean(fields.get(name)) for name in ("command", "user", "job"))
            found.append(GpuProcess(pid, memory, command, user, job))
    return found


def _words(values: list[Any]) -> list[str]:
    return [word for value in values if (word := clean(value))]


def _group(fields: Fields, name: str, make: Callable[[Fields], T | None]) -> T | None:
    """None also where nothing in the group is known."""
    value = fields.get(name)
    made = make(value) if isinstance(value, dict) else None
    return None if made == make({}) else made


def _ecc(fields: Fields) -> GpuEcc:
    return GpuEcc(
        enabled=truth(fields.get("enabled")),
        pending=truth(fields.get("pending")),
        volatile_corrected=whole(fields.get("volatile_corrected")),
        volatile_uncorrected=whole(fields.get("volatile_uncorrected")),
        aggregate_corrected=whole(fields.get("aggregate_corrected")),
        aggregate_uncorrected=whole(fields.get("aggregate_uncorrected")),
    )


def _remapped_rows(fields: Fields) -> GpuRemappedRows:
    return GpuRemappedRows(
        correctable=whole(fields.get("correctable")),
        uncorrectable=whole(fields.get("uncorrectable")),
        pending=truth(fields.get("pending")),
        failure=truth(fields.get("failure")),
    )


def _retired_pages(fields: Fields) -> GpuRetiredPages:
    return GpuRetiredPages(
        single_bit=whole(fields.get("single_bit")),
        double_bit=whole(fields.get("double_bit")),
        pending=truth(fields.get("pending")),
    )


def _pcie(fields: Fields) -> GpuPcie:
    return GpuPcie(
        generation=whole(fields.get("generation")),
        generation_max=whole(fields.get("generation_max")),
        width=whole(fields.get("width")),
        width_max=whole(fields.get("width_max")),
        replays=whole(fields.get("replays")),
        send_bytes_per_s=number(fields.get("send_bytes_per_s")),
        receive_bytes_per_s=number(fields.get("receive_bytes_per_s")),
    )


def _nvlink(fields: Fields) -> GpuNvLink:
    return GpuNvLink(
        links=tuple(truth(link) for link in items(fields.get("links"))),
        send_bytes_per_s=number(fields.get("send_bytes_per_s")),
        receive_bytes_per_s=number(fields.get("receive_bytes_per_s")),
        replay_errors=whole(fields.get("replay_errors")),
        recovery_errors=whole(fields.get("recovery_errors")),
        crc_errors=whole(fields.get("crc_errors")),
    )


def _mig(fields: Fields) -> GpuMig:
    found = fields.get("instances")
    return GpuMig(
        enabled=truth(fields.get("enabled")),
        pending=truth(fields.get("pending")),
        instances=tuple(map(_instance, map(mapping, found))) if isinstance(found, list) else None,
    )


def _instance(fields: Fields) -> MigInstance:
    return MigInstance(
        uuid=clean(fields.get("uuid")),
        profile=clean(fields.get("profile")),
        gpu_instance=whole(fields.get("gpu_instance")),
        compute_instance=whole(fields.get("compute_instance")),
        memory_used_bytes=whole(fields.get("memory_used_bytes")),
        memory_total_bytes=whole(fields.get("memory_total_bytes")),
    )


def _xid(fields: Fields) -> GpuXid | None:
    code, time = whole(fields.get("code")), number(fields.get("time"))
    if code is None or time is None:
        return None
    return GpuXid(code, time, clean(fields.get("source")) or "", clean(fields.get("detail")))
