"""The lines below the fleet: a node, or a GPU with its processes. What nodes wrote never goes through markup."""

from __future__ import annotations

from textual.content import Content

from dflash_tui.app.widgets.gpu_health import health_lines, trouble_lines
from dflash_tui.app.widgets.words import WAITING, job_state, why
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Gpu
from dflash_tui.fleet.state import NodeView


def gpu_detail(node: NodeView, gpu: Gpu) -> Content:
    """The GPU's identity, clocks and troubles, then one line a process, then its health."""
    head = f"GPU {gpu.index} of {node.host}: {gpu.name or fmt.NOT_AVAILABLE}  {gpu.uuid or 'no UUID'}"
    clocks = f"SM {fmt.number(gpu.sm_clock_mhz, ' MHz')}  memory {fmt.number(gpu.memory_clock_mhz, ' MHz')}"
    lines: list[Content] = [
        Content.assemble((fmt.one_line(head), "bold")),
        Content(clocks),
    ]
    now = node.metrics.time if node.metrics is not None else 0.0
    lines += trouble_lines(gpu, now, notes=False)
    if gpu.processes is None:
        lines.append(Content("processes: N/A"))
    elif not gpu.processes:
        lines.append(Content("no process on this GPU"))
    else:
        lines.append(Content.assemble((f"{'PID':>8}  {'memory':>10}  {'user':10}  job and command", "dim")))
        for process in gpu.processes:
            user = fmt.one_line(process.user or fmt.NOT_AVAILABLE)
            command = process.command or f"{fmt.NOT_AVAILABLE} (outside of this container)"
            job = "" if process.job is None else f"{fmt.one_line(process.job)}  "
            head = f"{process.pid:>8}  {fmt.size(process.memory_bytes):>10}  {user:10}  "
            lines.append(Content.assemble(head, (job, "bold"), fmt.one_line(command)))
    lines += trouble_lines(gpu, now, notes=True)
    lines += health_lines(gpu, now)
    return Content("\n").join(lines)


def node_detail(node: NodeView) -> Content:
    """The node's link, agent, disks and active jobs."""
    lines = [Content.assemble((fmt.one_line(f"{node.host}: {node.link.state}"), "bold"))]
    reason = why(node)
    if reason:
        lines.append(Content(reason))
    if node.link.state in WAITING:
        lines.append(Content("r connects again now"))
    if node.agent is not None:
        agent = node.agent
        offset = f"{agent.clock_offset_s:+.1f} s" if abs(agent.clock_offset_s) >= 0.05 else "equal to here"
        lines.append(
            Content(fmt.one_line(f"{agent.user}@{agent.hostname}  agent {agent.agent_pid}, Python {agent.python}"))
        )
        lines.append(Content(fmt.one_line(f"worker Python {agent.default_python}  jobs in {agent.state_dir}")))
        lines.append(Content(fmt.one_line(f"boot {agent.boot_id}  clock {offset}")))
    if node.metrics is not None:
        metrics = node.metrics
        for disk in metrics.host.disks:
            space = f"{disk.path}: {fmt.size(disk.free_bytes)} free of {fmt.size(disk.total_bytes)}"
            lines.append(Content(fmt.one_line(space)))
        lines.append(Content(f"GPUs read by {metrics.gpu_source}"))
    lines += [
        Content(fmt.one_line(f"{job_state(job.state)[0]}  {job.id}  {job.name}"))
        for job in node.jobs.values()
        if not job.state.ended
    ]
    return Content("\n").join(lines)
