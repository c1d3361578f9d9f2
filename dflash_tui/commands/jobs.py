"""`jobs`: the jobs of each node."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_tui.commands.gpumemory import jobs_once_read
from dflash_tui.commands.nodes import connected
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import clean, clock, complain, console, duration, number, print_json, table
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job
from dflash_tui.fleet.gpumemory import gpu_memory_line
from dflash_tui.fleet.strays import held

MEMORY_WAIT_S = 5.0
_ROOM_FOR_REASONS = 160  # columns of a terminal
HELP = "the jobs of each node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", action="store_true", help="only those that have not ended")


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    outcome = Exit.OK
    documents: list[dict[str, Any]] = []
    rows: list[tuple[str, Job]] = []
    with connected(settings) as nodes:
        for node in nodes:
            try:
                if node.failure is not None:
                    raise node.failure
                jobs = jobs_once_read(node, 0.0 if args.running else MEMORY_WAIT_S)
            except CommandError as error:
                outcome = Exit.UNREACHABLE
                complain(str(error))
                documents.append({"host": node.host, "error": error.message, "remedy": error.remedy})
                continue
            wanted = tuple(job for job in jobs if not (args.running and job.state.ended))
            documents.append({"host": node.host, "jobs": wanted})
            rows += [(node.host, job) for job in wanted]
    if args.json:
        print_json(documents)
    elif rows:
        print_jobs(console(), rows, with_host=len(settings.hosts) > 1)
    elif outcome is Exit.OK:
        print("no jobs")
    return outcome


def print_jobs(screen: Console, rows: Sequence[tuple[str, Job]], *, with_host: bool) -> None:
    """The table of jobs; where the terminal is too narrow for the reasons beside it, they come after it."""
    wide = screen.width >= _ROOM_FOR_REASONS
    screen.print(jobs_table(rows, with_host=with_host, with_reason=wide))
    for _, job in () if wide else rows:
        if reason := _reason(job):
            screen.print(f"{job.id}: {reason.strip()}")


def jobs_table(rows: Sequence[tuple[str, Job]], *, with_host: bool, with_reason: bool = True) -> Table:
    """A job a line; columns that no job fills are left out."""
    titles = ("host", "job", "name", "state", "samples", "samples/s", "to go", "created", "GPUs", "reason")
    lines = [(host if with_host else "", *_cells(job), _reason(job) if with_reason else "") for host, job in rows]
    filled = [at for at in range(len(titles)) if any(line[at] for line in lines)]
    shown = table(*(titles[at] for at in filled), right=("samples", "samples/s", "to go"))
    for line in lines:
        shown.add_row(*(line[at] for at in filled))
    for column in shown.columns:
        column.no_wrap = column.header in ("job", "created")  # an id in pieces cannot be copied
    return shown


def _cells(job: Job) -> tuple[str, ...]:
    progress = job.progress
    rate = progress.samples_per_s if progress and not job.state.ended else None
    left = progress.eta_s if progress and not job.state.ended else None
    return (
        job.id,
        clean(job.name),
        job.state.value,
        f"{progress.done:,}/{number(progress.total)}" if progress else "",
        "" if rate is None else number(rate, digits=1),
        "" if left is None else duration(left),
        clock(job.created)[5:16],  # the year and the seconds stand in the id
        ",".join(gpu.uuid if gpu.index is None else str(gpu.index) for gpu in job.gpus),
    )


def _reason(job: Job) -> str:
    return clean(job.reason) + _strays(job) + _gpu_memory(job)


def _gpu_memory(job: Job) -> str:
    line = gpu_memory_line(job)
    return f" (GPU memory: {clean(line)})" if line else ""


def _strays(job: Job) -> str:
    if not job.strays:
        return ""
    pids = ", ".join(str(stray.pid) for stray in job.strays)
    memory = held(*job.strays)
    holding = f", holding {memory}" if memory else ""
    return f" (still alive: {pids}{holding}; `dflash-tui stop {job.id}` ends them)"
