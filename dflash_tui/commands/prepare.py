"""`prepare`: conversations into the dataset that the trainer reads, as a job on the node."""

from __future__ import annotations

import argparse
from dataclasses import fields

from backends.spec import PrepareSpec
from dflash_tui.commands.nodes import one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit
from dflash_tui.commands.submit import Order, add_wait_arguments, finish, refuse_read_only, submit
from dflash_tui.config import Settings

HELP = "make the trainer's dataset from conversations in JSONL"

_DEFAULTS = {field.name: field.default for field in fields(PrepareSpec)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="JSONL", help="files of conversations, on the node")
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="folder whose tokenizer and chat template are used, on the node"
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
        model=path_on(host, args.model),
        inputs=tuple(path_on(host, name) for name in args.inputs),
        output=path_on(host, args.output),
        max_tokens=args.max_tokens,
        limit=args.limit,
        keep_messages=args.keep_messages,
    )
    with one_node(settings) as node:
        return finish(node, submit(node, Order(spec, args.name or spec.output.rstrip("/").rpartition("/")[2])), args)
