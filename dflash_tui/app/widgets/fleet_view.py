"""Nodes and their GPUs, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dflash_tui.app.widgets.rows import Cell, Row, RowsView, cell
from dflash_tui.app.widgets.sparkline import bar, sparkline
from dflash_tui.app.widgets.words import last_seen, link_state, why
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Gpu, HostMetrics, MigInstance
from dflash_tui.fleet.state import Fleet, NodeView, gpu_key
from dflash_tui.fleet.troubles import Severity, Trouble, worst

# What hotter than this is worth a look, in percent of a limit and in degrees.
WARM_CELSIUS = 85


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One line: kind is "node", "host", "gpu", "mig", "note" or "space"; key is that of the GPU, place the MIG instance's."""

    kind: str
    host: str
    key: str = ""
    place: int = 0


class FleetView(RowsView):
    """The fleet as lines. `clock` gives the console's time, from which ages are counted."""

    def __init__(self, clock: Callable[[], float], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._clock = clock
        self._known: dict[str, NodeView] = {}
        self._gpus: dict[tuple[str, str], Gpu] = {}
        self._filter = ""

    def set_filter(self, text: str) -> None:
        """Shows only nodes and GPUs that `text` (any case) occurs in."""
        self._filter = text.strip().lower()
        self.set_rows(self._lines())
        self.refresh()

    def show(self, fleet: Fleet) -> None:
        """Shows the fleet; draws the lines of nodes that changed, and no other."""
        changed = {node.host for node in fleet.nodes if self._known.get(node.host) is not node}
        self._known = {node.host: node for node in fleet.nodes}
        for node in fleet.nodes:
            if node.host in changed and node.metrics is not None:
                self._gpus = {key: gpu for key, gpu in self._gpus.items() if key[0] != node.host} | {
                    (node.host, gpu_key(gpu)): gpu for gpu in node.metrics.gpus
                }
        self.set_rows(self._lines())
        self.refresh_rows(row for row in self.rows if isinstance(row, FleetRow) and row.host in changed)

    def refresh_ages(self) -> None:
        """Draws anew what grows old by itself: the heads of nodes that are not live."""
        self.refresh_rows(
            row
            for row in self.rows
            if isinstance(row, FleetRow) and row.kind == "node" and not self._known[row.host].live
        )

    def node_of(self, row: Row | None) -> NodeView | None:
        return self._known.get(row.host) if isinstance(row, FleetRow) else None

    def gpu_of(self, row: Row | None) -> Gpu | None:
        return self._gpus.get((row.host, row.key)) if isinstance(row, FleetRow) else None

    def selectable(self, row: Row) -> bool:
        return isinstance(row, FleetRow) and row.kind in ("node", "gpu")

    # Lines.

    def _lines(self) -> Iterator[FleetRow]:
        first = True
        for node in self._known.values():
            whole = self._node_matches(node)
            gpus = () if node.metrics is None else node.metrics.gpus
            shown = [gpu for gpu in gpus if whole or self._gpu_matches(gpu)]
            if not whole and not shown:
                continue
            if not first:
                yield FleetRow("space", node.host)
            first = False
            yield FleetRow("node", node.host)
            if node.metrics is not None:
                yield FleetRow("host", node.host)
                if not gpus or node.metrics.gpu_error or node.metrics.stale:
                    yield FleetRow("note", node.host)
            elif node.agent is not None:
                yield FleetRow("note", node.host)
            for gpu in shown:
                yield FleetRow("gpu", node.host, gpu_key(gpu))
                for place in range(len(instances_of(gpu))):
                    yield FleetRow("mig", node.host, gpu_key(gpu), place)

    def _node_matches(self, node: NodeView) -> bool:
        names = [node.host, str(node.link.state), node.agent.hostname if node.agent else ""]
        return any(self._filter in name.lower() for name in names)

    def _gpu_matches(self, gpu: Gpu) -> bool:
        names = [gpu.name, gpu.uuid, gpu.error]
        for instance in instances_of(gpu):
            names += [instance.uuid, instance.profile]
        for process in gpu.processes or ():
            names += [str(process.pid), process.command, process.job]
        return any(self._filter in name.lower() for name in names if name)

    def draw_row(self, row: Row, width: int) -> Sequence[Cell]:
        if not isinstance(row, FleetRow) or (node := self._known.get(row.host)) is None:
            return ()
        if row.kind == "node":
            return self._draw_node(node, width)
        if row.kind == "host" and node.metrics is not None:
            return (cell("  " + host_line(node.metrics.host, width - 2), width, "dim"),)
        if row.kind == "note":
            bad = node.metrics is not None and node.metrics.gpu_error
            return (cell("  " + gpu_note(node), width, "warn" if bad else "dim"),)
        gpu = self.gpu_of(row)
        if row.kind == "gpu" and gpu is not None:
            trouble = None if node.metrics is None else worst(gpu, node.metrics.time)
            return draw_gpu(gpu, node.gpu_series.get(row.key, ()), width, dim=not node.live, trouble=trouble)
        if row.kind == "mig" and gpu is not None and row.place < len(instances_of(gpu)):
            return draw_instance(instances_of(gpu)[row.place], width)
        return ()

    def _draw_node(self, node: NodeView, width: int) -> Sequence[Cell]:
        now = self._clock()
        state, style = link_state(node, now)
        parts: list[Cell] = [(fmt.one_line(node.host), "strong"), ("  ", ""), (state, style)]
        seen, reason = last_seen(node, now), why(node)
        if seen:
            parts += [("  ", ""), (seen, "warn")]
        if reason and not node.live:
            parts += [("  ", ""), (reason, style)]
        if node.agent is not None:
            agent = node.agent
            if agent.hostname != node.host:
                parts += [("  ", ""), (fmt.one_line(agent.hostname), "")]
            active = sum(not job.state.ended for job in node.jobs.values())
            jobs = "1 job" if len(node.jobs) == 1 else f"{len(node.jobs)} jobs"
            parts += [("  ", ""), (f"{jobs}, {active} active", "dim")]
            parts += [("  ", ""), (fmt.one_line(f"agent {agent.agent_pid} as {agent.user}"), "dim")]
        return parts


def gpu_note(node: NodeView) -> str:
    """Why the GPUs of a node are not all they could be, on one line."""
    metrics = node.metrics
    if metrics is None:
        return "waiting for its first readings"
    if metrics.stale:
        return f"readings are stale: the driver has not answered for {fmt.duration(metrics.age_s)}"
    if metrics.gpu_error:
        return f"no GPU can be read: {metrics.gpu_error}" if not metrics.gpus else metrics.gpu_error
    return "no GPU on this node: jobs run on its CPU"


def host_line(host: HostMetrics, width: int) -> str:
    """CPU, memory, load, disk and network of a node, the most important first, as many as fit."""
    cpu = f"CPU {fmt.percent(host.cpu_percent)}"
    if host.cpu_count is not None:
        cpu += f" of {host.cpu_count}"
    parts = [
        cpu,
        f"mem {fmt.size_of(host.memory_used_bytes, host.memory_total_bytes)}",
        f"load {'N/A' if host.load_1 is None else f'{host.load_1:.1f}'}",
    ]
    parts += [f"{disk.path} {fmt.size(disk.free_bytes)} free" for disk in host.disks[:1]]
    parts.append(
        f"net in {fmt.megabytes_per_s(host.net_receive_bytes_per_s)}"
        f" out {fmt.megabytes_per_s(host.net_send_bytes_per_s)} MB/s"
    )
    parts.append(
        f"disk read {fmt.megabytes_per_s(host.disk_read_bytes_per_s)}"
        f" write {fmt.megabytes_per_s(host.disk_write_bytes_per_s)} MB/s"
    )
    parts += [f"{disk.path} {fmt.size(disk.free_bytes)} free" for disk in host.disks[1:]]
    if host.swap_total_bytes:
        parts.append(f"swap {fmt.size_of(host.swap_used_bytes, host.swap_total_bytes)}")
    parts.append(f"up {fmt.duration(host.uptime_s)}")
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > width:
            break
        line += "  " + part
    return line


def instances_of(gpu: Gpu) -> tuple[MigInstance, ...]:
    return (gpu.mig.instances if gpu.mig is not None else None) or ()


def draw_instance(instance: MigInstance, width: int) -> Sequence[Cell]:
    """A MIG instance under its card: what NVML tells of one is its memory."""
    text = f"MIG {instance.profile or fmt.NOT_AVAILABLE}  use {fmt.NOT_AVAILABLE}  "
    text += f"{fmt.size_of(instance.memory_used_bytes, instance.memory_total_bytes)}  {instance.uuid or ''}"
    return (("     ", ""), cell(text, max(0, width - 5), "dim"))


def draw_gpu(
    gpu: Gpu, series: Sequence[float | None], width: int, *, dim: bool = False, trouble: Trouble | None = None
) -> Sequence[Cell]:
    """One GPU in `width` columns: 75 hold everything, more make the name, the bar and the sparkline longer.

    A trouble stands in the place of the clock, which the lines below tell too.
    """
    spare = max(0, width - 75)
    name_width = 10 + min(16, spare)
    spare -= name_width - 10
    extra_clock = 10 if spare >= 40 else 0
    spare -= extra_clock
    bar_width = 6 + min(24, spare // 3)
    spark_width = 8 + min(112, spare - (bar_width - 6))
    name = (gpu.name or fmt.NOT_AVAILABLE).removeprefix("NVIDIA ")
    head = [cell(str(gpu.index), 2, "strong", right=True), (" ", ""), cell(name, name_width)]
    if gpu.error:
        return [*head, (" ", ""), cell(f"! {gpu.error}", max(0, width - name_width - 4), "bad")]
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    usage = "dim" if dim else "good"
    hot = gpu.temperature_celsius is not None and gpu.temperature_celsius >= WARM_CELSIUS
    fraction = None if gpu.utilisation_percent is None else gpu.utilisation_percent / 100
    cells = [
        *head,
        (" ", ""),
        (bar(fraction, bar_width), usage),
        cell(fmt.percent(gpu.utilisation_percent), 5, "" if fraction is not None else "dim", right=True),
        (" ", ""),
        (sparkline(series, spark_width, high=100), "dim" if dim else "accent"),
        cell(fmt.size_of(used, total), 16, right=True),
        cell(fmt.watts(gpu.power_watts, gpu.power_limit_watts), 12, right=True),
        cell(fmt.number(gpu.temperature_celsius, "°C"), 5, "warn" if hot else "", right=True),
        cell(fmt.number(gpu.sm_clock_mhz, "MHz"), 8, "dim", right=True)
        if trouble is None
        else cell(f"!{trouble.word}", 8, "bad" if trouble.severity is Severity.ALARM else "warn", right=True),
    ]
    if extra_clock:
        cells.append(cell(f"mem {fmt.number(gpu.memory_clock_mhz)}", extra_clock, "dim", right=True))
    return cells
