"""`status`: what each node is doing now."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from dflash_tui.commands.jobs import print_jobs
from dflash_tui.commands.nodes import Node, connected
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import amount, clean, complain, console, number, print_json, table
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Gpu, Job, Metrics
from dflash_tui.fleet.troubles import Severity, troubles

HELP = "what each node is doing: link, host, GPUs, jobs"
METRICS_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    outcome = Exit.OK
    documents: list[dict[str, Any]] = []
    screen = console()
    with connected(settings) as nodes:
        for node in nodes:
            try:
                if node.failure is not None:
                    raise node.failure
                jobs = node.answer(node.link.list_jobs())
            except CommandError as error:
                outcome = Exit.UNREACHABLE
                complain(str(error))
                documents.append(
                    {"host": node.host, "link": node.link.state, "error": error.message, "remedy": error.remedy}
                )
                continue
            metrics = node.metrics(METRICS_TIMEOUT_S)
            documents.append(_document(node, metrics, jobs))
            if not args.json:
                _show(screen, node, metrics, jobs)
    if args.json:
        print_json(documents)
    return outcome


def _document(node: Node, metrics: Metrics | None, jobs: tuple[Job, ...]) -> dict[str, Any]:
    greeting = node.greeting
    assert greeting is not None  # a node without a failure has greeted
    return {
        "host": node.host,
        "hostname": greeting.hostname,
        "boot_id": greeting.boot_id,
        "agent_pid": greeting.agent_pid,
        "agent_python": greeting.python,
        "default_python": greeting.default_python,
        "user": greeting.user,
        "state_dir": greeting.state_dir,
        "clock_offset_s": greeting.clock_offset_s,
        "link": node.link.state,
        "metrics": metrics,
        "troubles": [] if metrics is None else _troubles(metrics),
        "jobs": jobs,
    }


def _troubles(metrics: Metrics) -> list[dict[str, Any]]:
    """Everything that is wrong with the cards, notes too."""
    return [
        {
            "gpu": gpu.index,
            "uuid": gpu.uuid,
            "severity": trouble.severity.name.lower(),
            "line": trouble.line,
            "remedy": trouble.remedy,
        }
        for gpu in metrics.gpus
        for trouble in troubles(gpu, metrics.time)
    ]


def _show(screen: Console, node: Node, metrics: Metrics | None, jobs: tuple[Job, ...]) -> None:
    greeting = node.greeting
    assert greeting is not None
    screen.print(
        f"{node.host}  {node.link.state}  {clean(greeting.user)}@{clean(greeting.hostname)}, agent {greeting.agent_pid}"
    )
    if metrics is None:
        screen.print("  metrics: n/a")
    else:
        host = metrics.host
        memory = f"{amount(host.memory_used_bytes)} of {amount(host.memory_total_bytes)}"
        cores = f"{number(host.cpu_percent, '%')} of {number(host.cpu_count)} cores"
        screen.print(f"  CPU {cores}, load {number(host.load_1, digits=2)}, memory {memory}")
        for disk in host.disks:
            screen.print(f"  disk {clean(disk.path)}: {amount(disk.free_bytes)} free of {amount(disk.total_bytes)}")
        if metrics.gpus:
            _show_gpus(screen, metrics.gpus)
            _show_instances(screen, metrics.gpus)
            _show_troubles(screen, metrics)
        else:
            screen.print(f"  GPUs: {clean(metrics.gpu_error or '') or 'none'}")
    running = tuple(job for job in jobs if not job.state.ended)
    if running:
        print_jobs(screen, [(node.host, job) for job in running], with_host=False)
    ended = len(jobs) - len(running)
    screen.print(f"  jobs: {len(running)} running, {ended} ended")


def _show_gpus(screen: Console, gpus: tuple[Gpu, ...]) -> None:
    shown = table(
        "  GPU",
        "name",
        "use",
        "memory",
        "power",
        "temperature",
        "SM clock",
        "processes",
        right=("use", "power", "temperature", "SM clock"),
    )
    for gpu in gpus:
        if gpu.error:
            shown.add_row(f"  {gpu.index}", clean(gpu.name or "n/a"), clean(gpu.error))
            continue
        shown.add_row(
            f"  {gpu.index}",
            clean(gpu.name or "n/a"),
            number(gpu.utilisation_percent, "%"),
            f"{amount(gpu.memory_used_bytes)} of {amount(gpu.memory_total_bytes)}",
            f"{number(gpu.power_watts)} of {number(gpu.power_limit_watts, 'W')}",
            number(gpu.temperature_celsius, "°C"),
            number(gpu.sm_clock_mhz, "MHz"),
            "n/a" if gpu.processes is None else str(len(gpu.processes)),
        )
    screen.print(shown)


def _show_instances(screen: Console, gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        for instance in (gpu.mig.instances if gpu.mig is not None else None) or ():
            memory = f"{amount(instance.memory_used_bytes)} of {amount(instance.memory_total_bytes)}"
            name, uuid = clean(instance.profile or "n/a"), clean(instance.uuid or "n/a")
            screen.print(f"  GPU {gpu.index} MIG {name}: memory {memory}, {uuid}")


def _show_troubles(screen: Console, metrics: Metrics) -> None:
    for gpu in metrics.gpus:
        for trouble in troubles(gpu, metrics.time):
            if trouble.severity < Severity.NOTE:
                remedy = f": {clean(trouble.remedy)}" if trouble.remedy else ""
                screen.print(f"  ! GPU {gpu.index} {trouble.severity.name.lower()}: {clean(trouble.line)}{remedy}")
