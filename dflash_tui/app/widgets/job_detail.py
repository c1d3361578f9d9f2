"""Everything that is known of one job, line by line. What nodes wrote never goes through markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from textual.content import Content

from dflash_tui.app.widgets.jobs_table import done_of
from dflash_tui.app.widgets.sparkline import sparkline
from dflash_tui.app.widgets.words import job_state, last_seen
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Job
from dflash_tui.fleet.gpumemory import gpu_memory_line
from dflash_tui.fleet.series import last
from dflash_tui.fleet.state import NodeView
from dflash_tui.node.protocol import Launch

LABEL_WIDTH = 10


def job_detail(
    node: NodeView, job: Job, launch: Launch | None, *, now: float, clock: Callable[[float | None], str]
) -> Content:
    """The job in lines; `launch` is what was asked for, None where it is not read yet.

    now: the console's time; clock: shows a time of it in the user's zone.
    """
    pairs = list(_lines(node, job, launch, now, clock))
    lines = [Content.assemble((f"{label:{LABEL_WIDTH}}", "dim"), fmt.one_line(text)) for label, text in pairs]
    return Content("\n").join(lines)


def _lines(
    node: NodeView, job: Job, launch: Launch | None, now: float, clock: Callable[[float | None], str]
) -> Iterator[tuple[str, str]]:
    def at(time: float | None) -> str:
        return clock(None if time is None else node.console_time(time))

    yield "job", f"{job.id}  {job.verb} on {node.host}"
    seen = last_seen(node, now)
    yield "state", " ".join([job_state(job.state)[0], f"({seen}: it may have changed)" if seen else "", ended(job)])
    if job.reason:
        yield "why", job.reason
    progress = job.progress
    if progress is not None:
        phase = f"{progress.phase}  " if progress.phase else ""
        skipped = f", {progress.skipped:,} skipped" if progress.skipped else ""
        yield (
            "progress",
            (
                f"{phase}{done_of(job)} samples{skipped}, {fmt.count(progress.tokens)} tokens, "
                f"{fmt.size(progress.bytes)} in {fmt.duration(progress.elapsed_s)}"
            ),
        )
        if not job.state.ended:
            yield (
                "rate",
                (
                    f"{fmt.count(progress.samples_per_s)} samples/s  {fmt.count(progress.tokens_per_s)} tokens/s  "
                    f"{fmt.megabytes_per_s(progress.bytes_per_s)} MB/s  ETA {fmt.duration(progress.eta_s)}"
                ),
            )
    series = node.job_series.get(job.id, ())
    if last(series) is not None:
        yield "history", sparkline(series, min(60, len(series)))
    for stray in job.strays:
        memory = "" if stray.gpu_bytes is None else f" holding {fmt.size(stray.gpu_bytes)} of GPU memory"
        yield "stray", f"process {stray.pid}{memory}: {stray.command}"
    if launch is not None:
        for name in ("output", "model", "dataset", "inputs"):
            if launch.spec.get(name):
                yield name, plain(launch.spec[name])
    yield "times", f"made {at(job.created)}  started {at(job.started)}  ended {at(job.ended)}"
    if job.stop_requested is not None:
        yield "stop", f"asked for at {at(job.stop_requested)}"
    yield "GPUs", "  ".join(f"{gpu.index} {gpu.name or ''} {gpu.uuid}" for gpu in job.gpus) or "none: the CPU"
    memory = gpu_memory_line(job)
    if memory:
        yield "GPU memory ", memory
    if job.result is not None:
        yield "result", fields(job.result)
    elif job.last_event is not None:
        yield "event", f"{job.last_event.get('event', '')}: {fields(job.last_event)}"
    yield "folder", f"{job.directory}  log {fmt.size(job.log_size)}"
    yield "python", job.python or fmt.NOT_AVAILABLE


def ended(job: Job) -> str:
    """How the process ended: "exit status 2", "signal 9", or "" while it runs."""
    if job.exit_signal is not None:
        return f"signal {job.exit_signal}"
    return "" if job.exit_code is None else f"exit status {job.exit_code}"


def plain(value: Any) -> str:
    """A JSON value as one reads it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(item) for item in value)
    return str(value)


def fields(event: Mapping[str, Any]) -> str:
    """The fields of an event but for its time and kind, empty ones left out."""
    return "  ".join(
        f"{name} {plain(value)}" for name, value in event.items() if name not in ("t", "event") and value is not None
    )
