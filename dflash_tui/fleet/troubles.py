"""What is wrong with a card, from its readings: pure, and silent about what is not available."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_tui.fleet.format import duration, one_line
from dflash_tui.fleet.gpu import Gpu
from dflash_tui.fleet.xids import Severity, meaning

__all__ = ["Severity", "Trouble", "troubles", "worst"]

# A program's XID is news for so long; one of the card is a mark for a day and a note after it: the log keeps what a reset
# has mended, and a card that is still ill shows it in its other readings.
PROGRAM_XID_S = 3600.0
CARD_XID_S = 86400.0
BUSY_PERCENT = 50.0
SLOWEST_AWAKE = 2  # performance state: P0 to P2 are those of work
# A corrected error now and then is what ECC is for.
MANY_CORRECTED = 1000

# Reasons for lower clocks that mean trouble; the others are a card at rest, or limits that somebody chose.
HELD_BACK: dict[str, tuple[Severity, str, str, str]] = {
    "hw_thermal_slowdown": (
        Severity.ALARM, "hot", "thermal slowdown now: the card protects itself from heat",
        "check its cooling and the air of the room",
    ),
    "hw_power_brake_slowdown": (
        Severity.ALARM, "power", "power brake now: the server tells the card to slow down",
        "check the power supplies of the node and their limits",
    ),
    "hw_slowdown": (
        Severity.ALARM, "slow", "hardware slowdown now: heat or power holds the clocks down",
        "check cooling and power of the node",
    ),
    "sw_thermal_slowdown": (
        Severity.WARNING, "hot", "thermal slowdown by the driver now: the card or its memory is at its limit",
        "check its cooling and the air of the room",
    ),
    "board_limit": (
        Severity.WARNING, "power", "the board's limit holds the clocks down", "check power and voltage of the node",
    ),
    "reliability": (
        Severity.WARNING, "slow", "the clocks are held down for reliability", "have the card tested",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trouble:
    """`word` fits beside a card (at most 7 characters); `line` says what is wrong with its figures, `remedy` what to do."""

    severity: Severity
    word: str
    line: str
    remedy: str


def worst(gpu: Gpu, now: float) -> Trouble | None:
    """The worst trouble that is worth a mark: an alarm or a warning."""
    found = troubles(gpu, now)
    return found[0] if found and found[0].severity < Severity.NOTE else None


def troubles(gpu: Gpu, now: float) -> tuple[Trouble, ...]:
    """Every trouble of a card, the worst first. `now`: seconds since 1970 by the clock of its node."""
    found = [
        *_lost(gpu), *_xid(gpu, now), *_memory(gpu), *_held_back(gpu), *_heat(gpu), *_power(gpu),
        *_pcie(gpu), *_nvlink(gpu), *_mig(gpu),
    ]  # fmt: skip
    found += [Trouble(Severity.NOTE, "reading", f"not read: {one_line(fault)}", "") for fault in gpu.faults]
    return tuple(sorted(found, key=lambda trouble: trouble.severity))


def _lost(gpu: Gpu) -> list[Trouble]:
    if gpu.error is None:
        return []
    remedy = "reboot the node; if it comes again, check power, seating and heat"
    return [Trouble(Severity.ALARM, "lost", one_line(gpu.error), remedy)]


def _xid(gpu: Gpu, now: float) -> list[Trouble]:
    xid = gpu.xid
    if xid is None:
        return []
    means, age = meaning(xid.code), max(0.0, now - xid.time)
    if means.about_program and age > PROGRAM_XID_S:
        return []
    line = f"XID {xid.code} {duration(age)} ago: {means.text}"
    if xid.detail:
        line += f" ({one_line(xid.detail)})"
    severity = means.severity if age <= CARD_XID_S else Severity.NOTE
    return [Trouble(severity, f"XID{xid.code}", line, means.remedy.replace("INDEX", str(gpu.index)))]


def _memory(gpu: Gpu) -> list[Trouble]:
    found = []
    reset = f"reset the card when it is idle: nvidia-smi --gpu-reset -i {gpu.index}"
    if (ecc := gpu.ecc) is not None:
        if ecc.volatile_uncorrected:
            line = f"uncorrected ECC errors: {ecc.volatile_uncorrected:,} since the driver was loaded"
            found.append(Trouble(Severity.ALARM, "ECC", line, f"stop using this card; {reset}, or have it replaced"))
        if ecc.aggregate_uncorrected and not ecc.volatile_uncorrected:
            line = f"uncorrected ECC errors: {ecc.aggregate_uncorrected:,} in the card's life, none since the driver was loaded"
            found.append(Trouble(Severity.NOTE, "ECC", line, "watch it; a card that collects them is to be replaced"))
        if (ecc.volatile_corrected or 0) >= MANY_CORRECTED:
            line = f"corrected ECC errors: {ecc.volatile_corrected:,} since the driver was loaded"
            found.append(Trouble(Severity.WARNING, "ECC", line, "have the card tested before it fails"))
        if ecc.enabled is not None and ecc.pending is not None and ecc.enabled != ecc.pending:
            line = f"ECC is {_on(ecc.enabled)} and will be {_on(ecc.pending)} after a reset"
            found.append(Trouble(Severity.NOTE, "ECC", line, reset))
    if (rows := gpu.remapped_rows) is not None:
        if rows.failure:
            line = "row remapping failed: the memory has no spare row left where it needs one"
            found.append(Trouble(Severity.ALARM, "remap", line, "stop using this card and have it replaced"))
        if rows.pending:
            line = "row remapping pending: bad memory is still in use"
            found.append(Trouble(Severity.WARNING, "remap", line, reset))
        if rows.uncorrectable and not rows.failure:
            line = f"rows remapped after uncorrectable errors: {rows.uncorrectable:,}"
            found.append(Trouble(Severity.NOTE, "remap", line, "watch it; a card that collects them is to be replaced"))
    if (pages := gpu.retired_pages) is not None and pages.pending:
        found.append(Trouble(Severity.WARNING, "retire", "page retirement pending: bad memory is still in use", reset))
    return found


def _held_back(gpu: Gpu) -> list[Trouble]:
    reasons = list(gpu.clock_reasons or ())
    if any(reason in reasons for reason in ("hw_thermal_slowdown", "hw_power_brake_slowdown")):
        reasons = [reason for reason in reasons if reason != "hw_slowdown"]  # it is true of both
    clock = "" if gpu.sm_clock_mhz is None else f" (SM {gpu.sm_clock_mhz} MHz)"
    found = [
        Trouble(severity, word, line + clock, remedy)
        for reason in reasons
        if reason in HELD_BACK
        for severity, word, line, remedy in (HELD_BACK[reason],)
    ]
    if "sw_power_cap" in reasons:
        limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f} W"
        found.append(
            Trouble(
                Severity.NOTE, "power", f"the power limit{limit} holds the clocks down{clock}", "usual under full load"
            )
        )
    return found


def _heat(gpu: Gpu) -> list[Trouble]:
    found = []
    for what, heat, limit in (
        ("the card", gpu.temperature_celsius, gpu.temperature_slowdown_celsius),
        ("its memory", gpu.memory_temperature_celsius, gpu.temperature_memory_max_celsius),
    ):
        if heat is not None and limit is not None and heat >= limit:
            line = f"{what} is at {heat:.0f} °C, its limit is {limit:.0f} °C"
            found.append(Trouble(Severity.WARNING, "hot", line, "check its cooling and the air of the room"))
    return found


def _power(gpu: Gpu) -> list[Trouble]:
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit is None or default is None or limit > default - 1:
        return []
    line = f"the power limit is {limit:.0f} W, the card's default is {default:.0f} W"
    return [Trouble(Severity.NOTE, "power", line, f"if nobody wants that: nvidia-smi -i {gpu.index} -pl {default:.0f}")]


def _pcie(gpu: Gpu) -> list[Trouble]:
    pcie, found = gpu.pcie, []
    if pcie is None:
        return []
    remedy = "reseat the card or its riser, or look whether the slot has so many lanes"
    # An idle card lowers the generation by itself to save power, and many in a low state the width as well.
    busy = gpu.utilisation_percent is not None and gpu.utilisation_percent >= BUSY_PERCENT
    asleep = not busy and gpu.performance_state is not None and gpu.performance_state > SLOWEST_AWAKE
    if not asleep and pcie.width is not None and pcie.width_max is not None and pcie.width < pcie.width_max:
        line = f"PCIe x{pcie.width} of x{pcie.width_max}: copies to and from the card are slower"
        found.append(Trouble(Severity.WARNING, "PCIe", line, remedy))
    if (
        busy
        and pcie.generation is not None
        and pcie.generation_max is not None
        and pcie.generation < pcie.generation_max
    ):
        line = f"PCIe generation {pcie.generation} of {pcie.generation_max} under load"
        found.append(Trouble(Severity.WARNING, "PCIe", line, remedy))
    return found


def _nvlink(gpu: Gpu) -> list[Trouble]:
    nvlink, found = gpu.nvlink, []
    if nvlink is None:
        return []
    known = [link for link in nvlink.links if link is not None]
    down = known.count(False)
    # With all of them down the card is simply not linked to another.
    if down and down < len(known):
        numbers = ", ".join(str(number) for number, link in enumerate(nvlink.links) if link is False)
        line = f"NVLink {down} of {len(known)} links down: {numbers}"
        found.append(
            Trouble(Severity.WARNING, "NVLink", line, "reset the card; if they stay down, have link and switch tested")
        )
    if nvlink.recovery_errors:
        line = f"NVLink recovered {nvlink.recovery_errors:,} times from errors"
        found.append(Trouble(Severity.WARNING, "NVLink", line, "have the link tested if the number grows"))
    for what, errors in (("replays", nvlink.replay_errors), ("CRC errors", nvlink.crc_errors)):
        if errors:
            found.append(
                Trouble(Severity.NOTE, "NVLink", f"NVLink {what}: {errors:,}", "watch whether the number grows")
            )
    return found


def _mig(gpu: Gpu) -> list[Trouble]:
    mig = gpu.mig
    if mig is None or mig.enabled is None or mig.pending is None or mig.enabled == mig.pending:
        return []
    line = f"MIG is {_on(mig.enabled)} and will be {_on(mig.pending)} after a reset"
    return [
        Trouble(Severity.NOTE, "MIG", line, f"reset the card when it is idle: nvidia-smi --gpu-reset -i {gpu.index}")
    ]


def _on(value: bool) -> str:
    return "on" if value else "off"
