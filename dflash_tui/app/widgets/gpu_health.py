"""The health of a GPU in lines: its troubles, then every group of readings with its units; "N/A" is dimmed."""

from __future__ import annotations

from datetime import tzinfo

from textual.content import Content

from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.gpu import Gpu, GpuNvLink
from dflash_tui.fleet.troubles import Severity, Trouble, troubles
from dflash_tui.fleet.xids import meaning

LABEL_WIDTH = 10
SIGNS = {
    Severity.ALARM: ("! ALARM", "bold $error"),
    Severity.WARNING: ("! warning", "$warning"),
    Severity.NOTE: ("- note", "dim"),
}
REASONS = {
    "gpu_idle": "idle",
    "applications_clocks_setting": "application clocks",
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "heat (by the driver)",
    "hw_thermal_slowdown": "heat (by the hardware)",
    "hw_power_brake_slowdown": "power brake",
    "display_clocks_setting": "display clocks",
    "board_limit": "board limit",
    "reliability": "reliability",
}


def trouble_lines(gpu: Gpu, now: float, *, notes: bool) -> list[Content]:
    """A line for each trouble and, indented, one for what to do: of the notes, or of what is worse. `now`: the node's clock."""
    found = [trouble for trouble in troubles(gpu, now) if (trouble.severity is Severity.NOTE) == notes]
    return [line for trouble in found for line in _trouble(trouble)]


def _trouble(trouble: Trouble) -> list[Content]:
    sign, style = SIGNS[trouble.severity]
    lines = [Content.assemble((f"{sign:10}", style), trouble.line)]
    if trouble.remedy:
        lines.append(Content.assemble(" " * LABEL_WIDTH, (trouble.remedy, "italic")))
    return lines


def health_lines(gpu: Gpu, now: float, zone: tzinfo | None = None) -> list[Content]:
    """One line for each group; a group that the card does not have says so."""
    return [
        _line("power", _power(gpu)),
        _line("heat", _heat(gpu)),
        _line("clocks", _clocks(gpu)),
        _line("ECC", _ecc(gpu)),
        _line("memory", _memory(gpu)),
        _line("PCIe", _pcie(gpu)),
        _line("NVLink", _nvlink(gpu.nvlink)),
        *_mig(gpu),
        _line("XID", _xid(gpu, now, zone)),
        _line("settings", _settings(gpu)),
    ]


def _line(label: str, text: str) -> Content:
    """`text` with each N/A dimmed."""
    parts: list[str | tuple[str, str]] = [(f"{label:{LABEL_WIDTH}}", "dim")]
    for number, piece in enumerate(fmt.one_line(text).split(fmt.NOT_AVAILABLE)):
        if number:
            parts.append((fmt.NOT_AVAILABLE, "dim"))
        parts.append(piece)
    return Content.assemble(*parts)


def _whole(value: int | None) -> str:
    return fmt.NOT_AVAILABLE if value is None else f"{value:,}"


def _yes(value: bool | None, yes: str = "yes", no: str = "no") -> str:
    return fmt.NOT_AVAILABLE if value is None else yes if value else no


def _rate(value: float | None) -> str:
    return fmt.NOT_AVAILABLE if value is None else f"{fmt.megabytes_per_s(value)} MB/s"


def _power(gpu: Gpu) -> str:
    limits = f"default {fmt.number(gpu.power_limit_default_watts)}, most {fmt.number(gpu.power_limit_max_watts)}"
    energy = fmt.NOT_AVAILABLE if gpu.energy_joules is None else f"{fmt.count(gpu.energy_joules)}J"
    return f"{fmt.watts(gpu.power_watts, gpu.power_limit_watts)} ({limits})  energy {energy}"


def _heat(gpu: Gpu) -> str:
    slow, off = gpu.temperature_slowdown_celsius, gpu.temperature_shutdown_celsius
    return (
        f"card {fmt.number(gpu.temperature_celsius, '°C')} (slows {fmt.number(slow)}, stops {fmt.number(off)})  "
        f"memory {fmt.number(gpu.memory_temperature_celsius, '°C')} (most {fmt.number(gpu.temperature_memory_max_celsius)})  "
        f"fan {fmt.percent(gpu.fan_percent)}"
    )


def _clocks(gpu: Gpu) -> str:
    state = fmt.NOT_AVAILABLE if gpu.performance_state is None else f"P{gpu.performance_state}"
    if gpu.clock_reasons is None:
        held = fmt.NOT_AVAILABLE
    else:
        held = ", ".join(REASONS.get(reason, reason) for reason in gpu.clock_reasons) or "nothing"
    return f"state {state}  held back by {held}"


def _ecc(gpu: Gpu) -> str:
    ecc = gpu.ecc
    if ecc is None:
        return fmt.NOT_AVAILABLE
    mode = _yes(ecc.enabled, "on", "off")
    if ecc.pending is not None and ecc.pending != ecc.enabled:
        mode += f" ({_yes(ecc.pending, 'on', 'off')} after a reset)"
    return (
        f"{mode}  corrected {_whole(ecc.volatile_corrected)}, uncorrected {_whole(ecc.volatile_uncorrected)}"
        f"  in its life {_whole(ecc.aggregate_corrected)}, {_whole(ecc.aggregate_uncorrected)}"
    )


def _memory(gpu: Gpu) -> str:
    rows, pages = gpu.remapped_rows, gpu.retired_pages
    if rows is not None:
        return (
            f"rows remapped {_whole(rows.correctable)} corrected, {_whole(rows.uncorrectable)} uncorrected  "
            f"pending {_yes(rows.pending)}  failed {_yes(rows.failure)}"
        )
    if pages is not None:
        return (
            f"pages retired {_whole(pages.single_bit)} single-bit, {_whole(pages.double_bit)} double-bit  "
            f"pending {_yes(pages.pending)}"
        )
    return f"remapped rows {fmt.NOT_AVAILABLE}  retired pages {fmt.NOT_AVAILABLE}"


def _pcie(gpu: Gpu) -> str:
    pcie = gpu.pcie
    if pcie is None:
        return fmt.NOT_AVAILABLE
    return (
        f"gen {_whole(pcie.generation)} of {_whole(pcie.generation_max)}, "
        f"x{_whole(pcie.width)} of x{_whole(pcie.width_max)}  "
        f"to host {_rate(pcie.send_bytes_per_s)}  from host {_rate(pcie.receive_bytes_per_s)}  "
        f"replays {_whole(pcie.replays)}"
    )


def _nvlink(nvlink: GpuNvLink | None) -> str:
    if nvlink is None:
        return fmt.NOT_AVAILABLE
    text = f"{nvlink.links.count(True)} of {len(nvlink.links)} links up"
    for what, state in (("down", False), (fmt.NOT_AVAILABLE, None)):
        numbers = [str(number) for number, link in enumerate(nvlink.links) if link is state]
        if numbers:
            text += f" ({what}: {', '.join(numbers)})"
    errors = f"{_whole(nvlink.replay_errors)} replays, {_whole(nvlink.recovery_errors)} recoveries, {_whole(nvlink.crc_errors)} CRC"
    return f"{text}  out {_rate(nvlink.send_bytes_per_s)}  in {_rate(nvlink.receive_bytes_per_s)}  errors: {errors}"


def _mig(gpu: Gpu) -> list[Content]:
    mig = gpu.mig
    if mig is None:
        return [_line("MIG", fmt.NOT_AVAILABLE)]
    text = _yes(mig.enabled, "on", "off")
    if mig.pending is not None and mig.pending != mig.enabled:
        text += f" ({_yes(mig.pending, 'on', 'off')} after a reset)"
    if mig.enabled:
        text += f"  instances: {fmt.NOT_AVAILABLE if mig.instances is None else len(mig.instances)}"
    lines = [_line("MIG", text)]
    for instance in mig.instances or ():
        used = fmt.size_of(instance.memory_used_bytes, instance.memory_total_bytes)
        name, uuid = instance.profile or fmt.NOT_AVAILABLE, instance.uuid or fmt.NOT_AVAILABLE
        lines.append(_line("", f"{name:12} memory {used}  use {fmt.NOT_AVAILABLE}  {uuid}"))
    return lines


def _xid(gpu: Gpu, now: float, zone: tzinfo | None) -> str:
    if gpu.xid is None:
        if gpu.xid_source is None:
            return f"{fmt.NOT_AVAILABLE} (neither NVML nor the kernel's log tells of them)"
        return f"none heard of (by {gpu.xid_source})"
    when = fmt.clock(gpu.xid.time, now=now, zone=zone)
    return f"{gpu.xid.code} at {when} (by {gpu.xid.source}): {meaning(gpu.xid.code).text}"


def _settings(gpu: Gpu) -> str:
    persistence = _yes(gpu.persistence, "on", "off")
    return f"persistence {persistence}  compute mode {gpu.compute_mode or fmt.NOT_AVAILABLE}  bus {gpu.pci_bus_id or fmt.NOT_AVAILABLE}"
