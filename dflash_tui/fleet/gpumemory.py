"""What became of the memory of a job's GPUs after its end, as one line for every place that shows a job."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_tui.fleet.facts import GpuProcess, Job, JobGpuMemory
from dflash_tui.fleet.format import size

_COMMAND_LENGTH = 60
_NAMED = 3


def gpu_memory_line(job: Job) -> str:
    """ "freed on GPU 0, 1", "GPU 1: 71.2 GiB still held by pid 4242 (VLLM::EngineCore)"; "" where nothing is told of any."""
    freed = [entry for entry in job.gpu_memory if entry.freed]
    parts = [f"freed on GPU {', '.join(map(_name, freed))}"] if freed else []
    parts += [f"GPU {_name(entry)}: {_kept(entry, job.id)}" for entry in job.gpu_memory if not entry.freed]
    return "; ".join(parts)


def undecided(job: Job) -> bool:
    """Whether the node has yet to find out of a card, or cannot."""
    return any(entry.freed is None for entry in job.gpu_memory)


def _name(entry: JobGpuMemory) -> str:
    return entry.uuid if entry.index is None else str(entry.index)


def _kept(entry: JobGpuMemory, job: str) -> str:
    if entry.freed is None:
        return f"not known whether it is freed: {entry.note}" if entry.note else "not known whether it is freed"
    over = None if entry.used_bytes is None else entry.used_bytes - (entry.baseline_bytes or 0)
    if entry.holders:
        return f"{size(over)} still held by {_named(entry.holders, job)}"
    if entry.note.startswith("held by "):
        return f"{size(over)} still {entry.note}"
    return f"not freed: {entry.note}" if entry.note else "not freed"


def _named(holders: Sequence[GpuProcess], job: str) -> str:
    named = ", ".join(_holder(holder, job) for holder in holders[:_NAMED])
    more = len(holders) - _NAMED
    return f"{named} and {more} more" if more > 0 else named


def _holder(holder: GpuProcess, job: str) -> str:
    command = f" ({holder.command[:_COMMAND_LENGTH].strip()})" if holder.command else ""
    other = f" of job {holder.job}" if holder.job and holder.job != job else ""
    return f"pid {holder.pid}{command}{other}"
