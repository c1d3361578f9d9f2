"""`demo`: the whole loop, on this machine or a node: a tiny model, real conversations, hidden states, some of them computed anew."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from backends.spec import FAMILIES, DemoSpec
from dflash_tui.commands.console import open_console
from dflash_tui.commands.follow import verdict
from dflash_tui.commands.nodes import Node, one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit, of_job
from dflash_tui.commands.output import clean, complain, number, print_json
from dflash_tui.commands.submit import Order, refuse_read_only, submit, wait_or_detach
from dflash_tui.config import LOCAL, Settings
from dflash_tui.fleet.facts import Job, JobState

HELP = "the whole loop with a tiny model, on this machine or a node"
RESULT_KEYS = (
    "samples",
    "tokens",
    "samples_per_s",
    "verified",
    "recomputed_worst_error",
    "layer_ids",
    "output",
    "model",
    "manifest",
)

_DEFAULTS = {field.name: field.default for field in fields(DemoSpec)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="folder for everything it makes (default: %(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, default=_DEFAULTS["samples"], metavar="N", help="conversations (default: %(default)s)"
    )
    parser.add_argument(
        "--recompute",
        type=int,
        default=_DEFAULTS["recompute"],
        metavar="K",
        help="samples computed anew (default: %(default)s)",
    )
    parser.add_argument(
        "--family",
        default=_DEFAULTS["family"],
        help=f"architecture of the model: {', '.join(FAMILIES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=_DEFAULTS["blocks"],
        metavar="N",
        help="blocks of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--hidden", type=int, default=_DEFAULTS["hidden"], metavar="N", help="its hidden size (default: %(default)s)"
    )


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "demo")
    settings = replace(settings, hosts=tuple(args.host) or (LOCAL,), screen="jobs")
    spec = DemoSpec(
        output=path_on(the_host(settings), str(args.output)),
        samples=args.samples,
        recompute=args.recompute,
        family=args.family,
        blocks=args.blocks,
        hidden=args.hidden,
    )
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not args.json
    if on_terminal:
        with one_node(settings) as node:
            job = submit(node, Order(spec, "demo"))
        open_console(settings)
    with one_node(settings) as node:
        job = _refreshed(node, job) if on_terminal else submit(node, Order(spec, "demo"))
        job = wait_or_detach(node, job, args, None if on_terminal or args.json else sys.stdout)
        return _result(node, job, args, on_terminal=on_terminal)


def _refreshed(node: Node, job: Job) -> Job:
    return next((found for found in node.answer(node.link.list_jobs()) if found.id == job.id), job)


def _result(node: Node, job: Job, args: argparse.Namespace, *, on_terminal: bool) -> Exit:
    outcome = of_job(job)
    if job.state is not JobState.DONE or job.result is None:
        document = verdict(node, job)
        line = f"{document.get('error', 'the demo did not finish')}: {document.get('remedy', '')}".rstrip(": ")
        complain(f"{line} (job {job.id}, {job.state})")
        document["exit_code"] = int(outcome or Exit.FAILED)
        if not on_terminal:
            _print_document(document, args)
        return outcome or Exit.FAILED
    result = {key: job.result.get(key) for key in RESULT_KEYS}
    whole = result["verified"] == result["samples"]
    if on_terminal:
        _show(result)
    else:
        _print_document(result, args)
    if not whole:
        complain(f"only {result['verified']} of {result['samples']} samples are verified (job {job.id})")
    return Exit.OK if whole else Exit.FAILED


def _print_document(document: Mapping[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print_json(document)
    else:  # one line, so that `tail -1` has it whole
        print(json.dumps(document), flush=True)


def _show(result: Mapping[str, Any]) -> None:
    print(
        f"{number(result['samples'])} samples, {number(result['tokens'])} tokens, {number(result['samples_per_s'], 'samples/s', 1)}"
    )
    print(
        f"{number(result['verified'])} verified; worst relative error of those computed anew: {result['recomputed_worst_error']}"
    )
    print(f"layer ids: {', '.join(map(str, result['layer_ids']))}")
    for key in ("output", "model", "manifest"):
        print(f"{key}: {clean(str(result[key]))}")
