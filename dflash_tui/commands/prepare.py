"""`prepare`: conversations into the dataset that the trainer reads, as a job on the node, and what came of it in figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from backends.spec import PrepareSpec
from dflash_tui.commands.nodes import input_on, model_on, one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit
from dflash_tui.commands.output import clean, console, note, table
from dflash_tui.commands.submit import Order, add_wait_arguments, finish, refuse_read_only, submit
from dflash_tui.config import Settings

HELP = "make the trainer's dataset from conversations"

_BAR_WIDTH = 40
_DEFAULTS = {field.name: field.default for field in fields(PrepareSpec)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="JSONL or Parquet files of conversations or tokenised rows, or folders of them, on the node; or"
        " hf://datasets/org/name[@revision], with :SPLIT or /PATH after it",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="folder whose tokenizer and chat template are used, on the node, or a name on the hub: org/name[@revision]",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the dataset, on the node")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=_DEFAULTS["max_tokens"],
        metavar="N",
        help="a longer row is cut on the right (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="at most so many conversations")
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--shuffle-seed",
        type=int,
        default=_DEFAULTS["shuffle_seed"],
        metavar="N",
        help="another order of the conversations; the same seed gives the same one (default: %(default)s)",
    )
    order.add_argument(
        "--no-shuffle", dest="shuffle_seed", action="store_const", const=None, help="keep the order of the inputs"
    )
    parser.add_argument(
        "--no-messages",
        dest="keep_messages",
        action="store_false",
        help="leave the messages themselves out of the dataset",
    )
    add_wait_arguments(parser, waits=True)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "prepare")
    host = the_host(settings)
    spec = PrepareSpec(
        model=model_on(host, args.model),
        inputs=tuple(input_on(host, name) for name in args.inputs),
        output=path_on(host, args.output),
        max_tokens=args.max_tokens,
        limit=args.limit,
        shuffle_seed=args.shuffle_seed,
        keep_messages=args.keep_messages,
    )
    name = args.name or spec.output.rstrip("/").rpartition("/")[2]
    with one_node(settings) as node:
        return finish(node, submit(node, Order(spec, name)), args, show=show_result)


def show_result(result: Mapping[str, Any]) -> None:
    """Lengths and supervised shares as a table and a histogram, and what was skipped, on stderr."""
    statistics = result.get("statistics") or {}
    out = console(sys.stderr)
    note(
        f"{result.get('samples', 0):,} samples, {result.get('tokens', 0):,} tokens,"
        f" {result.get('supervised_share', 0):.1%} supervised, {result.get('truncated', 0):,} cut on the right"
    )
    for reason, number in (result.get("skipped") or {}).items():
        note(f"{number:,} skipped: {clean(str(reason))}")
    names = {"lengths": "tokens", "supervised": "supervised tokens", "supervised_share": "supervised share"}
    shown = {name: statistics[name] for name in names if statistics.get(name)}
    if not shown:
        return
    columns = list(next(iter(shown.values())))
    figures = table("a sample's", *columns, right=columns)
    for name, values in shown.items():
        share = name == "supervised_share"
        figures.add_row(names[name], *(f"{values[key]:.0%}" if share else f"{values[key]:,.0f}" for key in columns))
    out.print(figures)
    buckets = statistics.get("histogram") or []
    bars = table("tokens", "samples", "supervised", "", right=("tokens", "samples", "supervised"))
    most = max((bucket["samples"] for bucket in buckets), default=0)
    for bucket in buckets:
        share = bucket["supervised_share"]
        length = -(-_BAR_WIDTH * bucket["samples"] // most) if most else 0  # a bucket with one sample shows
        bars.add_row(
            f"≤ {bucket['to']:,}", f"{bucket['samples']:,}", "" if share is None else f"{share:.0%}", "█" * length
        )
    out.print(bars)
