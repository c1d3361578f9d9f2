"""What is known of a GPU. A value that the card cannot give is None, and so is a group of them: "not available" is not 0.

Units stand in the names, as in `facts.py`, which offers these types too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    memory_bytes: int | None = None
    command: str | None = None
    user: str | None = None
    job: str | None = None  # the id of our job that it belongs to


@dataclass(frozen=True, slots=True)
class GpuEcc:
    """Memory errors: volatile ones since the driver was loaded, aggregate ones in the card's life."""

    enabled: bool | None = None
    pending: bool | None = None  # whether it will be on after the next reset
    volatile_corrected: int | None = None
    volatile_uncorrected: int | None = None
    aggregate_corrected: int | None = None
    aggregate_uncorrected: int | None = None


@dataclass(frozen=True, slots=True)
class GpuRemappedRows:
    """Rows of memory replaced by spare ones (Ampere and later), by the kind of error that led to it."""

    correctable: int | None = None
    uncorrectable: int | None = None
    pending: bool | None = None  # a reset is needed for the replacement
    failure: bool | None = None  # there was no spare row


@dataclass(frozen=True, slots=True)
class GpuRetiredPages:
    """Pages of memory out of use (before Ampere)."""

    single_bit: int | None = None
    double_bit: int | None = None
    pending: bool | None = None


@dataclass(frozen=True, slots=True)
class GpuPcie:
    """The card's link to the host. `send` is from the card to the host, `receive` from the host to the card."""

    generation: int | None = None
    generation_max: int | None = None  # of card and slot together
    width: int | None = None
    width_max: int | None = None
    replays: int | None = None
    send_bytes_per_s: float | None = None
    receive_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class GpuNvLink:
    """`links`: whether each is up, None where that link does not say. Errors are sums over all links."""

    links: tuple[bool | None, ...] = ()
    send_bytes_per_s: float | None = None
    receive_bytes_per_s: float | None = None
    replay_errors: int | None = None
    recovery_errors: int | None = None
    crc_errors: int | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One instance of a card in MIG mode; its utilisation is not available."""

    uuid: str | None = None
    profile: str | None = None  # "1g.18gb"
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuMig:
    enabled: bool | None = None
    pending: bool | None = None  # the mode after the next reset
    instances: tuple[MigInstance, ...] | None = None


@dataclass(frozen=True, slots=True)
class GpuXid:
    """The last fault that the driver reported of a card."""

    code: int
    time: float
    source: str = ""  # "nvml" or "kernel log"
    detail: str | None = None  # the kernel log's own words


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str | None = None
    name: str | None = None
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    error: str | None = None  # why this card cannot be read ("GPU is lost")
    faults: tuple[str, ...] = ()  # readings that failed, and how
    pci_bus_id: str | None = None
    power_limit_default_watts: float | None = None
    power_limit_max_watts: float | None = None
    energy_joules: float | None = None  # a counter since the driver was loaded, read every 10 s
    temperature_slowdown_celsius: float | None = None
    temperature_shutdown_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    temperature_memory_max_celsius: float | None = None
    fan_percent: float | None = None
    clock_reasons: tuple[str, ...] | None = None  # why the clocks are not higher; () where nothing holds them
    performance_state: int | None = None  # 0 is the fastest
    persistence: bool | None = None
    compute_mode: str | None = None
    ecc: GpuEcc | None = None
    remapped_rows: GpuRemappedRows | None = None
    retired_pages: GpuRetiredPages | None = None
    pcie: GpuPcie | None = None
    nvlink: GpuNvLink | None = None
    mig: GpuMig | None = None
    xid: GpuXid | None = None
    xid_source: str | None = None  # where XIDs would be heard of; None: nowhere, so no XID says nothing
