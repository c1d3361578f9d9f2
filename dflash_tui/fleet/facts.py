"""The facts that a link tells the console. Every value that a node may be unable to give is None: "not available" is not 0.

Units stand in the names: bytes, percent, watts, celsius, mhz, s (seconds), time (seconds since 1970, by the node's clock
unless the name says otherwise).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dflash_tui.fleet.gpu import Gpu as Gpu
from dflash_tui.fleet.gpu import GpuEcc as GpuEcc
from dflash_tui.fleet.gpu import GpuMig as GpuMig
from dflash_tui.fleet.gpu import GpuNvLink as GpuNvLink
from dflash_tui.fleet.gpu import GpuPcie as GpuPcie
from dflash_tui.fleet.gpu import GpuProcess as GpuProcess
from dflash_tui.fleet.gpu import GpuRemappedRows as GpuRemappedRows
from dflash_tui.fleet.gpu import GpuRetiredPages as GpuRetiredPages
from dflash_tui.fleet.gpu import GpuXid as GpuXid
from dflash_tui.fleet.gpu import MigInstance as MigInstance


class LinkState(StrEnum):
    CONNECTING = "connecting"
    AUTHENTICATING = "authenticating"
    BOOTSTRAPPING = "bootstrapping"
    LIVE = "live"
    STALE = "stale"  # 3 s without a beat
    LOST = "lost"  # 10 s without a beat
    RETRYING = "retrying"
    REFUSED = "refused"  # an error that trying again will not mend: a changed host key, no Python
    CLOSED = "closed"


class JobState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"
    ORPHANED = "orphaned"

    @property
    def ended(self) -> bool:
        return self not in (JobState.STARTING, JobState.RUNNING, JobState.PAUSED, JobState.STOPPING)


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HostMetrics:
    cpu_count: int | None = None
    cpu_percent: float | None = None  # of all cores together, 0 to 100
    load_1: float | None = None
    load_5: float | None = None
    load_15: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swap_total_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    net_receive_bytes_per_s: float | None = None
    net_send_bytes_per_s: float | None = None
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    time: float
    host: HostMetrics
    gpus: tuple[Gpu, ...] = ()
    gpu_source: str = "none"  # "nvml", "nvidia-smi" or "none"
    gpu_error: str | None = None
    age_s: float = 0.0
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """The runner's last progress event. Rates are over its last window, not since the start.

    unit: what `done` and `total` count: "samples", or "bytes" of a download.
    """

    done: int = 0
    total: int | None = None
    skipped: int = 0
    tokens: int = 0
    bytes: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None
    eta_s: float | None = None
    phase: str | None = None
    unit: str = "samples"


@dataclass(frozen=True, slots=True)
class Side:
    """One backend of a comparison, as its runner last told of it.

    state: waiting, starting, running, done, failed or stopped. elapsed_s: since its start. startup_s: until its first sample was done.
    Rates are those since the start-up, not those of a window. gpus: UUIDs.
    """

    side: str
    state: str = "waiting"
    phase: str | None = None
    done: int = 0
    total: int | None = None
    tokens: int = 0
    bytes: int = 0
    elapsed_s: float | None = None
    startup_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stray:
    """A process that outlived its job's supervisor. gpu_bytes: as the driver tells; memory_bytes: resident in the node's memory."""

    pid: int
    ticks: int
    command: str = ""
    gpu_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class JobGpu:
    index: int | None
    uuid: str
    name: str | None = None
    baseline_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class JobGpuMemory:
    """A GPU after its job's end. `freed` is None where the card was not read since then, or cannot be; `note` says why."""

    index: int | None
    uuid: str
    used_bytes: int | None = None
    baseline_bytes: int | None = None
    freed: bool | None = None
    holders: tuple[GpuProcess, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    name: str
    verb: str
    state: JobState
    created: float
    started: float | None = None
    ended: float | None = None
    gpus: tuple[JobGpu, ...] = ()
    exit_code: int | None = None
    exit_signal: int | None = None
    reason: str = ""
    log_size: int = 0
    directory: str = ""
    python: str = ""
    progress: Progress | None = None
    strays: tuple[Stray, ...] = ()
    result: Mapping[str, Any] | None = None
    last_event: Mapping[str, Any] | None = None
    supervisor_pid: int | None = None
    runner_pid: int | None = None
    stop_requested: float | None = None
    sides: Mapping[str, Side] = field(default_factory=dict)  # of a comparison: "hf" and "vllm"
    gpu_memory: tuple[JobGpuMemory, ...] = ()  # only after the end, and as long as the node tells of it


class CheckStatus(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"  # it could not be looked at


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that `doctor` looked at: what was found, and what mends it ("" where there is nothing to mend)."""

    name: str
    status: CheckStatus
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """What a node can do and what it lacks: the worst first, else in the order of the node."""

    host: str
    checks: tuple[Check, ...]
    clock_offset_s: float | None = None  # the node's clock less the console's, the round trip taken out
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a job failed: what scripts go by, the words, and the line of the log (from 1) that shows it, where one does."""

    id: str
    text: str
    line: int | None
    quote: str


@dataclass(frozen=True, slots=True)
class Source:
    """A line of a source file on the node."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log says of a failure; `cause` is None where it shows none. source: of the root exception.

    lines: of the log. skipped_bytes: of its middle, not looked at.
    """

    failed: bool
    cause: Cause | None
    remedy: str | None
    source: Source | None
    lines: int
    skipped_bytes: int


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link of a node went into another state; `local_time` by the console's clock."""

    host: str
    state: LinkState
    local_time: float
    detail: str = ""
    remedy: str = ""
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class AgentGreeted:
    host: str
    hostname: str
    boot_id: str
    agent_pid: int
    python: str
    default_python: str
    user: str
    state_dir: str
    clock_offset_s: float  # the node's clock less the console's


@dataclass(frozen=True, slots=True)
class BeatArrived:
    host: str
    local_time: float


@dataclass(frozen=True, slots=True)
class MetricsArrived:
    host: str
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class JobsArrived:
    """The jobs that changed; `whole` where these are all that there are."""

    host: str
    jobs: tuple[Job, ...]
    gone: tuple[str, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class LogArrived:
    """Bytes of a file that is being followed, from `offset` on. `data` is what the node wrote: never markup."""

    host: str
    tail: int
    offset: int
    data: bytes = field(repr=False, default=b"")
    gap_bytes: int = 0
    reset: str = ""  # "truncated" or "rotated": what was shown is no more
    error: str = ""


Fact = LinkChanged | AgentGreeted | BeatArrived | MetricsArrived | JobsArrived | LogArrived
