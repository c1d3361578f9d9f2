"""Everything that is known of one job, line by line. What nodes wrote never goes through markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from textual.content import Content

from dflash_tui.app.widgets.jobs_table import done_of, fraction, phase
from dflash_tui.app.widgets.sparkline import bar, sparkline
from dflash_tui.app.widgets.words import job_state, last_seen
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Diagnosis, Job
from dflash_tui.fleet.gpumemory import gpu_memory_line
from dflash_tui.fleet.series import Series, last
from dflash_tui.fleet.state import NodeView
from dflash_tui.fleet.strays import held
from dflash_tui.node.protocol import Launch

LABEL_WIDTH = 10
# So that progress and rate are one line each at 80 columns.
BAR_WIDTH = 24
HISTORY = 20


def job_detail(
    node: NodeView,
    job: Job,
    launch: Launch | None,
    diagnosis: Diagnosis | None = None,
    *,
    now: float,
    clock: Callable[[float | None], str],
) -> Content:
    """The job in lines; `launch` is what was asked for, `diagnosis` what its log says; None where it is not read yet.

    now: the console's time; clock: shows a time of it in the user's zone.
    """
    pairs = list(_lines(node, job, launch, diagnosis, now, clock))
    lines = [Content.assemble((f"{label:{LABEL_WIDTH}}", "dim"), fmt.one_line(text)) for label, text in pairs]
    return Content("\n").join(lines)


def _lines(
    node: NodeView,
    job: Job,
    launch: Launch | None,
    diagnosis: Diagnosis | None,
    now: float,
    clock: Callable[[float | None], str],
) -> Iterator[tuple[str, str]]:
    def at(time: float | None) -> str:
        return clock(None if time is None else node.console_time(time))

    yield "job", f"{job.id}  {job.verb} on {node.host}"
    seen = last_seen(node, now)
    parts = (
        job_state(job.state)[0],
        f"({seen}: it may have changed)" if seen else "",
        took(node, job, now),
        ended(job),
    )
    yield "state", "  ".join(filter(None, parts))
    yield from why(job, diagnosis)
    series = node.job_series.get(job.id, ())
    yield from _progress(job, series)
    yield from strays(job)
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


def why(job: Job, diagnosis: Diagnosis | None) -> list[tuple[str, str]]:
    """What ended a job: its own words, the cause that its log shows, the remedy, the cause's line and where it was raised.

    Where the words do not hold the cause they come last, since a small terminal shows the first lines only.
    """
    words = [("why", job.reason)] if job.reason else []
    if diagnosis is None or diagnosis.cause is None:
        return words
    cause, source = diagnosis.cause, diagnosis.source
    raised = [] if source is None else [("raised at", f"{source.file}:{source.line}")]
    if cause.text in job.reason:
        return words + raised
    remedy = [("remedy", diagnosis.remedy)] if diagnosis.remedy else []
    line = [] if cause.line is None else [(f"line {cause.line} ", cause.quote)]
    return [("cause", cause.text), *remedy, *line, *raised, *words]


def strays(job: Job) -> Iterator[tuple[str, str]]:
    """The processes that an orphaned job left, and what they hold."""
    for stray in job.strays:
        memory = held(stray)
        yield "stray", f"process {stray.pid}{' holding ' if memory else ''}{memory}: {stray.command}"


def _progress(job: Job, series: Series) -> Iterator[tuple[str, str]]:
    progress = job.progress
    done = fraction(job)
    doing = phase(job)
    if done is not None and progress is not None:
        track = bar(done, BAR_WIDTH).replace(" ", "░")
        whole = f"{track} {fmt.percent(100 * done)}  {done_of(job)}{_unit(job)}"
        left = "" if job.state.ended else f"  ETA {fmt.duration(progress.eta_s)}"
        yield "progress", whole + left
    if progress is None:
        if doing:
            yield "now", doing
        return
    if progress.unit == "bytes":  # a download: it has neither samples nor tokens
        if not job.state.ended:
            yield "rate", f"{fmt.megabytes_per_s(progress.bytes_per_s)} MB/s"
        yield "so far", f"{fmt.size(progress.bytes)} in {fmt.duration(progress.elapsed_s)}; {doing}"
        return
    if not job.state.ended and job.verb != "setup":
        rates = (
            f"{fmt.count(progress.samples_per_s)} samples/s  {fmt.count(progress.tokens_per_s)} tokens/s  "
            f"{fmt.megabytes_per_s(progress.bytes_per_s)} MB/s"
        )
        yield "rate", rates + (f"  {sparkline(series, min(HISTORY, len(series)))}" if last(series) is not None else "")
    counted = "" if done is not None else f", {done_of(job)}{_unit(job)}"
    skipped = f", {progress.skipped:,} skipped" if progress.skipped else ""
    made = f"{fmt.count(progress.tokens)} tokens, {fmt.size(progress.bytes)} in {fmt.duration(progress.elapsed_s)}"
    yield "so far", f"{made}{counted}{skipped}{f'; now {doing}' if doing and not job.state.ended else ''}"


def _unit(job: Job) -> str:
    """The word after what is done; bytes bring theirs with them."""
    return "" if job.progress is not None and job.progress.unit == "bytes" else f" {fmt.unit_of(job.verb)}"


def took(node: NodeView, job: Job, now: float) -> str:
    """For how long a job has run, or ran: "for 3m 10s"; "" before it has begun."""
    if job.started is None:
        return ""
    end = node.console_time(job.ended) if job.ended is not None else None if job.state.ended else now
    return "" if end is None else f"for {fmt.duration(end - node.console_time(job.started))}"


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
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(item)}" for key, item in value.items())
    return str(value)


def fields(event: Mapping[str, Any]) -> str:
    """The fields of an event but for its time and kind; empty ones and whole tables are left out."""
    return "  ".join(
        f"{name} {plain(value)}"
        for name, value in event.items()
        if name not in ("t", "event") and value is not None and not _is_table(value)
    )


def _is_table(value: Any) -> bool:
    """Rows of figures, which a command prints as a table."""
    return isinstance(value, Mapping) and any(isinstance(item, Mapping | list) for item in value.values())
