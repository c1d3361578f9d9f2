"""The comparisons of all nodes, one line each: those that run first, then the newest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.cells import set_cell_size

from dflash_tui.app.widgets.comparison import model_of, summary
from dflash_tui.app.widgets.jobs_table import Column, JobRow
from dflash_tui.app.widgets.rows import Cell, Row, RowsView, cell
from dflash_tui.app.widgets.words import job_state
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.comparison import number
from dflash_tui.fleet.facts import Job
from dflash_tui.fleet.state import Fleet, NodeView
from dflash_tui.node.protocol import Launch

VERB = "compare"
COLUMNS = (
    Column("state", 13),
    Column("made", 16),
    Column("node", 8),
    Column("model", 12),
    Column("name", 16, wide=110),
    Column("samples", 9, right=True, wide=110),
    Column("result", 24),
)


def layout(width: int) -> list[tuple[Column, int]]:
    """The columns that fit and their widths; the model, the name and the node get a part of what is left, the result the rest."""
    shown = [column for column in COLUMNS if width >= column.wide]
    spare = max(0, width - sum(column.width for column in shown) - len(shown) + 1)
    most = {"model": 16, "name": 22, "node": 8}
    extra = {column.title: min(most[column.title], spare // 4) for column in shown if column.title in most}
    extra["result"] = spare - sum(extra.values())
    return [(column, column.width + extra.get(column.title, 0)) for column in shown]


def heading(width: int) -> str:
    """The titles of the columns, as a line over the table."""
    cells = (
        set_cell_size(column.title.rjust(size) if column.right else column.title, size)
        for column, size in layout(max(0, width - 2))
    )
    return "  " + " ".join(cells)


class CompareTable(RowsView):
    """Comparisons as lines. `clock` shows a time of the console in the user's zone."""

    def __init__(self, clock: Callable[[float | None], str], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._clock = clock
        self._jobs: dict[JobRow, tuple[NodeView, Job]] = {}
        self._launches: Mapping[JobRow, Launch] = {}
        self._filter = ""

    def set_filter(self, text: str) -> None:
        """Shows only comparisons that `text` (any case) occurs in."""
        self._filter = text.strip().lower()
        self._set()

    def show(self, fleet: Fleet, launches: Mapping[JobRow, Launch]) -> None:
        """Shows the comparisons of the fleet; draws those that changed, and no other."""
        before, self._jobs = self._jobs, {JobRow(node.host, job.id): (node, job) for node, job in comparisons(fleet)}
        known = self._launches.keys()
        self._launches = dict(launches)
        self._set()
        self.refresh_rows(
            row
            for row, (node, job) in self._jobs.items()
            if row not in before
            or before[row][1] is not job
            or before[row][0].live is not node.live
            or (row in self._launches) is not (row in known)
        )

    def job_of(self, row: Row | None) -> tuple[NodeView, Job] | None:
        return self._jobs.get(row) if isinstance(row, JobRow) else None

    def _set(self) -> None:
        self.set_rows(row for row, (node, job) in self._jobs.items() if self._matches(row, node, job))

    def _matches(self, row: JobRow, node: NodeView, job: Job) -> bool:
        model = model_of(job, self._launches.get(row))
        return any(self._filter in text.lower() for text in (job.id, job.name, model, str(job.state), node.host))

    def draw_row(self, row: Row, width: int) -> Sequence[Cell]:
        found = self.job_of(row)
        if found is None:
            return ()
        cells: list[Cell] = []
        for column, size in layout(width):
            if cells:
                cells.append((" ", ""))
            cells.append(self._cell(column, size, *found))
        return cells

    def _cell(self, column: Column, size: int, node: NodeView, job: Job) -> Cell:
        dim = "" if node.live and not job.state.ended else "dim"
        row = JobRow(node.host, job.id)
        match column.title:
            case "state":
                text, style = job_state(job.state)
                return cell(f"{text}{'' if node.live or job.state.ended else ' (?)'}", size, style)
            case "made":
                return cell(self._clock(node.console_time(job.created)), size, dim)
            case "node":
                return cell(node.host, size, dim)
            case "model":
                model = model_of(job, self._launches.get(row))
                return cell(model.rstrip("/").rpartition("/")[2] or "...", size, dim or "strong")
            case "name":
                return cell(job.name or job.id, size, dim)
            case "samples":
                return cell(_samples(job), size, dim, right=True)
            case _:
                text, style = summary(job)
                return cell(text, size, style)


def comparisons(fleet: Fleet) -> list[tuple[NodeView, Job]]:
    """Every comparison with its node: those that still run first, then the newest first."""
    return [(node, job) for node, job in fleet.jobs() if job.verb == VERB]


def _samples(job: Job) -> str:
    total = number((job.result or {}).get("samples"))
    totals = [total, *(side.total for side in job.sides.values())]
    return next((f"{int(value):,}" for value in totals if value), fmt.NOT_AVAILABLE)
