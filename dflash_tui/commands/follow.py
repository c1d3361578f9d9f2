"""Waiting for a job: its progress on a terminal as a bar, elsewhere as lines; a lost link is waited out."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dflash_tui.commands.nodes import Node
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import amount, clean, console, duration, note, number
from dflash_tui.commands.sides import side_figures, side_words
from dflash_tui.fleet import facts as fleet_facts
from dflash_tui.fleet.facts import Job, JobsArrived, LinkChanged, LinkState
from dflash_tui.fleet.format import unit_of

_LOOK_AGAIN_S = 5.0  # the node tells by itself; this mends a push that was missed
_EVENTS_TAIL = 64 * 1024
_LEAST_BAR = 6  # columns: the bar and the spaces around it


class Reporter(Protocol):
    def show(self, job: Job) -> None: ...


class Lines:
    """A line where the phase changes and at each tenth of the samples."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last: tuple[Any, ...] | None = None

    def show(self, job: Job) -> None:
        progress = job.progress or fleet_facts.Progress()
        tenth = _tenth(progress)
        sides = tuple((side.state, side.phase, _tenth(side)) for side in job.sides.values())
        seen = (job.state, sides or (progress.phase, tenth))
        if seen != self._last:
            self._last = seen
            figures = f", {side_words(job)}" if sides else _figures(job)
            print(f"{job.verb} {job.id}: {job.state}{figures}", file=self._stream, flush=True)


def _tenth(seen: fleet_facts.Progress | fleet_facts.Side) -> int:
    return seen.done * 10 // seen.total if seen.total else 0


class Bar:
    """One bar on the terminal, or one for each side of a comparison."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._sides: dict[str, TaskID] = {}

    def show(self, job: Job) -> None:
        for name, side in job.sides.items():
            if name not in self._sides:
                self._sides[name] = self._progress.add_task(f"{name:>5}", total=None, figures="")
            self._progress.update(self._sides[name], completed=side.done, total=side.total, figures=side_figures(side))
        at_work = any(side.state in ("starting", "running") for side in job.sides.values())
        if not at_work:
            self._show_job(job)
        if self._task is not None:
            self._progress.update(self._task, visible=not at_work)

    def _show_job(self, job: Job) -> None:
        seen = job.progress or fleet_facts.Progress()
        if self._task is None:
            self._task = self._progress.add_task("", total=None, figures="")
        phase = clean(seen.phase or "") or job.state.value
        description = f"{job.verb}: {phase}"
        room = self._progress.console.width - len(description) - _LEAST_BAR
        figures = _figures(job, phase=False, room=room).removeprefix(", ")
        self._progress.update(
            self._task, description=description, completed=seen.done + seen.skipped, total=seen.total, figures=figures
        )


def _figures(job: Job, *, phase: bool = True, room: int | None = None) -> str:
    """The figures of a job, each after a comma. room: characters; where they are too few, the lesser rates are left out."""
    progress = job.progress
    if progress is None:
        return ""
    parts = [clean(progress.phase)] if phase and progress.phase else []
    if progress.total and progress.unit == "bytes":
        parts.append(f"{amount(progress.done)} of {amount(progress.total)}")
    elif progress.total:
        parts.append(f"{progress.done:,} of {progress.total:,} {unit_of(job.verb)}")
    if progress.samples_per_s:
        parts.append(number(progress.samples_per_s, "samples/s", 1))
    if progress.tokens_per_s:
        parts.append(number(progress.tokens_per_s, "tokens/s"))
    if progress.bytes_per_s:
        parts.append(f"{amount(progress.bytes_per_s)}/s")
    if progress.eta_s is not None and not job.state.ended:
        parts.append(f"{duration(progress.eta_s)} to go")
    lesser = [part for part in parts if part.endswith(("B/s", " tokens/s"))]
    while room is not None and lesser and sum(len(part) + 2 for part in parts) - 2 > room:
        parts.remove(lesser.pop())
    return "".join(f", {part}" for part in parts)


@contextmanager
def reporter(stream: IO[str] | None = None) -> Iterator[Reporter]:
    """A bar where stderr is a terminal; else lines to `stream` (stderr where None)."""
    if stream is None and sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        with Progress(*columns, console=console(sys.stderr)) as progress:
            yield Bar(progress)
    else:
        yield Lines(stream or sys.stderr)


def wait(node: Node, job: Job, shown: Reporter) -> Job:
    """The job once it has ended. A lost link is said and waited out. Raises CommandError, KeyboardInterrupt."""
    node.forget_facts()  # those from before the job
    away = node.link.state not in (LinkState.LIVE, LinkState.STALE)
    asked = time.monotonic()
    job = _look(node, job)
    while not job.state.ended:
        shown.show(job)
        try:
            fact = node.facts.get(timeout=0.5)
        except queue.Empty:
            fact = None
        if isinstance(fact, JobsArrived):
            known = {found.id: found for found in fact.jobs}
            if job.id in fact.gone or (fact.whole and job.id not in known):
                message, remedy = f"job {job.id} is no longer there", "somebody removed its folder"
                raise CommandError(Exit.NOT_FOUND, message, remedy, node.host)
            job = known.get(job.id, job)
        elif isinstance(fact, LinkChanged):
            if fact.state is LinkState.REFUSED:
                raise CommandError(Exit.UNREACHABLE, fact.detail, fact.remedy, node.host)
            if fact.state in (LinkState.LOST, LinkState.RETRYING) and not away:
                note(f"{node.host}: the link is lost ({fact.detail}); the job goes on there, trying again")
            if fact.state is LinkState.LIVE and away:
                note(f"{node.host}: the link is back")
            away = fact.state is not LinkState.LIVE and (away or fact.state in (LinkState.LOST, LinkState.RETRYING))
        if not away and time.monotonic() - asked > _LOOK_AGAIN_S:
            asked = time.monotonic()
            job = _look(node, job)
    shown.show(job)
    return job


def _look(node: Node, job: Job) -> Job:
    try:
        return next((found for found in node.answer(node.link.list_jobs()) if found.id == job.id), job)
    except CommandError:  # the link went meanwhile: its own facts say so
        return job


def last_event(node: Node, job: Job) -> dict[str, Any]:
    """The last whole event of a job, {} where it has none."""
    try:
        _, data = node.answer(node.link.read(job=job.id, file="events", offset=-_EVENTS_TAIL))
    except CommandError:
        return {}
    for line in reversed(data.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            return event
    return {}


def verdict(node: Node, job: Job) -> dict[str, Any]:
    """What came of a job that has ended, as JSON: `error` and `remedy` where it did not end well."""
    document: dict[str, Any] = {
        "host": node.host,
        "job": job.id,
        "verb": job.verb,
        "state": job.state.value,
        "log": f"{job.directory}/log",
    }
    document["result"] = job.result
    event = last_event(node, job)
    if event.get("event") in ("failed", "interrupted"):
        document["error"] = clean(str(event.get("message", "")))
        document["remedy"] = clean(str(event.get("remedy") or ""))
    elif job.state.value != "done":
        document["error"] = clean(job.reason) or f"the job is {job.state}"
        document["remedy"] = f"`dflash-tui logs {job.id} --host {node.host}` shows its log"
    return document
