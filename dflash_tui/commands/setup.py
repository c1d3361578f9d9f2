"""`setup`: the pinned Python environments of a node as one job; or a folder of wheels for a node without a network."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_tui.commands import wheels
from dflash_tui.commands.nodes import Node, one_node, path_on, the_host
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import amount, clean, print_json, table
from dflash_tui.commands.output import console as terminal
from dflash_tui.commands.submit import Order, add_wait_arguments, finish, plan_or_refuse, refuse_read_only, start
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job
from dflash_tui.node.setup.spec import Refusal, SetupSpec

HELP = "make a node's Python environments: the worker's, and vLLM's and the trainer's where asked for"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", default="", metavar="VERSION", help="make the environment vllm-VERSION too")
    parser.add_argument("--trainer", action="store_true", help="make the trainer's environment too")
    parser.add_argument(
        "--torch",
        default="",
        metavar="SPEC",
        help="a version, or a requirement as torch==2.12.0, in place of the pinned",
    )
    parser.add_argument(
        "--pins",
        type=Path,
        metavar="FILE",
        help='a TOML file, here, with requirements of your own: worker = ["torch==…", …]',
    )
    parser.add_argument(
        "--wheels", default="", metavar="DIR", help="a folder of wheels on the node, in place of an index"
    )
    parser.add_argument("--plan", action="store_true", help="say what would be made, and make nothing")
    parser.add_argument(
        "--download", type=Path, metavar="DIR", help="touch no node: fill a folder here with the wheels that it needs"
    )
    parser.add_argument(
        "--node-python",
        default="",
        metavar="X.Y",
        help="with --download: the node's Python (default: this one's version)",
    )
    parser.add_argument("--cpu", action="store_true", help="with --download: for nodes without a GPU")
    add_wait_arguments(parser, waits=True)
    parser.epilog = (
        "--python names the base Python on the node, 3.11 or newer (default: the first good one there).\n\n"
        + (parser.epilog or "")
    )


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    if args.download is not None:
        return wheels.fill(args.download, spec_of(args, "", ""), args.node_python, cpu=args.cpu, as_json=args.json)
    if args.node_python or args.cpu:
        raise CommandError(Exit.BAD_INPUT, "--node-python and --cpu are for --download", "leave them out")
    host = the_host(settings)
    spec = spec_of(args, path_on(host, args.wheels) if args.wheels else "", args.python or "")
    order = Order(spec, args.name or "setup")
    if args.plan:
        with one_node(settings) as node:
            plan = plan_or_refuse(node, order)  # which says its warnings
        if args.json:
            print_json({"host": node.host, **plan})
        else:
            _show_plan(node.host, plan)
        return Exit.OK
    refuse_read_only(settings, "setup")
    with one_node(settings) as node:
        plan_or_refuse(node, order)
        job = start(node, order.launch)
        outcome = finish(node, job, args)
        if args.wait and not args.json and outcome is Exit.OK:
            _show(node, job)
        return outcome


def spec_of(args: argparse.Namespace, folder: str, python: str) -> SetupSpec:
    """The spec of the options. Raises CommandError."""
    spec = SetupSpec(args.vllm, args.trainer, args.torch, python, folder, _pins(args.pins))
    try:
        spec.check()
    except Refusal as refusal:
        raise CommandError(Exit.BAD_INPUT, refusal.message, refusal.remedy) from None
    return spec


def _pins(file: Path | None) -> dict[str, list[str]]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(Exit.BAD_INPUT, f"{file}: {error.strerror}", "name a TOML file that can be read") from None
    except ValueError as error:
        raise CommandError(
            Exit.BAD_INPUT, f"{file} is no TOML: {error}", 'write it as worker = ["torch==2.13.0"]'
        ) from None


def _show_plan(host: str, plan: Mapping[str, Any]) -> None:
    """An environment a line with what goes into it, then where and how; what there is none of is left out."""
    shown = table("setup", host)
    for name, requirements in (plan.get("makes") or {}).items():
        shown.add_row(f"makes {clean(str(name))}", clean(", ".join(map(str, requirements))))
    whole = ", ".join(map(str, plan.get("already_whole") or ()))
    rows = {
        "whole already": whole,
        "folder": plan.get("where"),
        "base Python": f"{plan.get('base_version')} ({plan.get('base_python')})",
        "pip from": plan.get("pip_from"),
        "wheels from": plan.get("wheels"),
        "NVIDIA driver": plan.get("driver") or "none: for the CPU",
        "takes at most": amount(plan.get("bytes_total")),
        "disk free": amount(plan.get("disk_free_bytes")),
    }
    for title, value in rows.items():
        if value:
            shown.add_row(title, clean(str(value)))
    terminal().print(shown)


def _show(node: Node, job: Job) -> None:
    ended = next((found for found in node.answer(node.link.list_jobs()) if found.id == job.id), job)
    shown = table("environment", "python", "versions", "size", "path")
    for record in (ended.result or {}).get("environments") or ():
        shown.add_row(*_row(record))
    terminal().print(shown)


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    versions: Mapping[str, Any] = record.get("versions") or {}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    path = str(record.get("executable"))
    return (
        clean(str(record.get("name"))),
        clean(str(record.get("python"))),
        clean(text),
        amount(record.get("bytes")),
        clean(path),
    )
