"""The jobs of all nodes, one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import set_cell_size

from dflash_tui.app.widgets.rows import Cell, Row, RowsView, cell
from dflash_tui.app.widgets.sparkline import bar, sparkline
from dflash_tui.app.widgets.words import job_state
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Job
from dflash_tui.fleet.state import Fleet, NodeView


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job: its node and its id."""

    host: str
    job: str


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    right: bool = False
    wide: int = 0  # shown from this many columns on


COLUMNS = (
    Column("state", 13),
    Column("name", 14),
    Column("node", 8),
    Column("verb", 8, wide=110),
    Column("progress", 13),
    Column("done/total", 15, right=True, wide=130),
    Column("samples/s", 9, right=True),
    Column("history", 24, wide=160),
    Column("tokens/s", 9, right=True, wide=100),
    Column("MB/s", 7, right=True, wide=100),
    Column("ETA", 7, right=True),
    Column("age", 7, right=True),
)


def layout(width: int) -> list[tuple[Column, int]]:
    """The columns that fit and their widths; the name and the node take what is left, two to one."""
    shown = [column for column in COLUMNS if width >= column.wide]
    spare = max(0, width - sum(column.width for column in shown) - len(shown) + 1)
    node = min(22, spare // 3)
    extra = {"node": node, "name": min(40, spare - node)}
    return [(column, column.width + extra.get(column.title, 0)) for column in shown]


def heading(width: int) -> str:
    """The titles of the columns, as a line over the table."""
    parts = (
        set_cell_size(column.title.rjust(size) if column.right else column.title, size)
        for column, size in layout(max(0, width - 2))
    )
    return "  " + " ".join(parts)


def fraction(job: Job) -> float | None:
    """How much of a job is done, 0 to 1; None where it is not known."""
    progress = job.progress
    if progress is None or not progress.total:
        return None
    return min(1.0, (progress.done + progress.skipped) / progress.total)


def phase(job: Job) -> str:
    """What a job is doing by its own words ("importing torch"), "" where it has not said."""
    if job.progress is not None and job.progress.phase:
        return job.progress.phase
    event = job.last_event or {}
    said = event.get("phase") if event.get("event") == "phase" else None
    return said if isinstance(said, str) else ""


def done_of(job: Job) -> str:
    """Samples done and in all: "520/1,000"; of a download bytes."""
    progress = job.progress
    if progress is None:
        return fmt.NOT_AVAILABLE
    if progress.unit == "bytes":
        return fmt.size_of(progress.done, progress.total)
    total = fmt.NOT_AVAILABLE if progress.total is None else f"{progress.total:,}"
    return f"{progress.done:,}/{total}"


class JobsTable(RowsView):
    """Jobs as lines. `clock` gives the console's time, from which ages are counted."""

    def __init__(self, clock: Callable[[], float], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._clock = clock
        self._jobs: dict[JobRow, tuple[NodeView, Job]] = {}
        self._ages: dict[JobRow, str] = {}  # as they were drawn last
        self._filter = ""

    def set_filter(self, text: str) -> None:
        """Shows only jobs that `text` (any case) occurs in."""
        self._filter = text.strip().lower()
        self._set()

    def show(self, fleet: Fleet) -> None:
        """Shows the jobs of the fleet; draws those that changed, and no other."""

        before, self._jobs = self._jobs, {JobRow(node.host, job.id): (node, job) for node, job in fleet.jobs()}
        self._set()
        self.refresh_rows(
            row
            for row, (node, job) in self._jobs.items()
            if row not in before or before[row][1] is not job or before[row][0].live is not node.live
        )

    def job_of(self, row: Row | None) -> tuple[NodeView, Job] | None:
        return self._jobs.get(row) if isinstance(row, JobRow) else None

    def refresh_ages(self) -> None:
        """Draws the jobs anew whose age reads otherwise by now."""
        self.refresh_rows(
            row for row, age in self._ages.items() if row in self._jobs and age != self._age(*self._jobs[row])
        )

    def _age(self, node: NodeView, job: Job) -> str:
        return fmt.duration(self._clock() - node.console_time(job.created))

    def _set(self) -> None:
        self.set_rows(row for row, (node, job) in self._jobs.items() if self._matches(node, job))

    def _matches(self, node: NodeView, job: Job) -> bool:
        return any(self._filter in text.lower() for text in (job.id, job.name, job.verb, str(job.state), node.host))

    def draw_row(self, row: Row, width: int) -> Sequence[Cell]:
        found = self.job_of(row)
        if found is None:
            return ()
        node, job = found
        cells: list[Cell] = []
        for column, size in layout(width):
            if cells:
                cells.append((" ", ""))
            cells.append(self._cell(column, size, node, job))
        return cells

    def _cell(self, column: Column, size: int, node: NodeView, job: Job) -> Cell:
        progress = job.progress
        rated = None if progress is None or job.state.ended else progress
        dim = "" if node.live and not job.state.ended else "dim"
        match column.title:
            case "state":
                text, style = job_state(job.state)
                # A node that is out of sight cannot say that its job still runs.
                return cell(f"{text} {'' if node.live or job.state.ended else '(?)'}", size, style)
            case "name":
                return cell(job.name or job.id, size, dim or "strong")
            case "node":
                return cell(node.host, size, dim)
            case "verb":
                return cell(job.verb, size, dim)
            case "progress":
                done = fraction(job)
                doing = phase(job)
                if not done and doing and not job.state.ended:
                    return cell(doing, size, dim or "accent")
                text = bar(done, size - 5) + fmt.percent(None if done is None else 100 * done).rjust(5)
                return (text, dim or ("dim" if done is None else "good"))
            case "done/total":
                return cell(done_of(job), size, dim, right=True)
            case "history":
                return cell(sparkline(node.job_series.get(job.id, ()), size), size, "accent")
            case "age":
                age = self._ages[JobRow(node.host, job.id)] = self._age(node, job)
                return cell(age, size, dim, right=True)
            case _:
                text = "" if rated is None else rate(column.title, rated)
                return cell(text, size, dim, right=True)


def rate(title: str, progress: object) -> str:
    """The value of a column of rates ("" where the title names none)."""
    value = getattr(progress, _RATES[title][0])
    return _RATES[title][1](value)


_RATES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "samples/s": ("samples_per_s", fmt.count),
    "tokens/s": ("tokens_per_s", fmt.count),
    "MB/s": ("bytes_per_s", fmt.megabytes_per_s),
    "ETA": ("eta_s", fmt.duration),
}
