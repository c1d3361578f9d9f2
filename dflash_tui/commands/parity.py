"""`parity`: two output folders of one model, dataset and layers compared, as a job on the node."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from backends.spec import ParitySpec
from dflash_tui.commands.nodes import one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit, of_job
from dflash_tui.commands.output import clean, complain, console, note, table
from dflash_tui.commands.submit import Order, add_wait_arguments, finish, refuse_read_only, submit
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job

HELP = "compare two output folders layer by layer, as bf16 with fp8; exit code 1 where they differ too much"

# Two lines a title, so that the table fits into 80 columns.
_COLUMNS = {
    "error": "relative_error",
    "by\ntoken": "relative_error_by_token",
    "limit": "limit",
    "cosine": "cosine",
    "lowest\ncosine": "worst_cosine",
    "of the\nlargest": "worst_of_largest",
    "lost\nto 0": "lost_share",
    "worst\nrow": "worst_row",
    "its\nerror": "worst_row_error",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reference", metavar="REFERENCE", help="output folder that counts as right, on the node")
    parser.add_argument("output", metavar="DIR", help="output folder that is judged; parity.json is written there")
    parser.add_argument(
        "--samples", type=int, default=None, metavar="N", help="so many of those that both hold (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which samples (default: %(default)s)")
    add_wait_arguments(parser, waits=True)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "parity")
    host = the_host(settings)
    spec = ParitySpec(
        reference=path_on(host, args.reference),
        output=path_on(host, args.output),
        samples=args.samples,
        seed=args.seed,
    )
    name = args.name or spec.output.rstrip("/").rpartition("/")[2]
    with one_node(settings) as node:
        return finish(node, submit(node, Order(spec, name)), args, show=show_result, outcome=outcome)


def outcome(job: Job) -> Exit:
    """A job that is done and found a bad parity has failed, for scripts."""
    code = of_job(job)
    return Exit.FAILED if code is Exit.OK and (job.result or {}).get("verdict") != "good" else code


def show_result(result: Mapping[str, Any]) -> None:
    """The layers as a table on stdout; the verdict, and why it is bad, on stderr."""
    console().print(layers_table(result.get("layers") or {}))
    sides = " with ".join(_format(result.get(side)) for side in ("reference_format", "output_format"))
    note(
        f"parity is {clean(str(result.get('verdict')))}: {sides}, {result.get('samples', 0):,} samples,"
        f" {result.get('tokens', 0):,} tokens; kept in {result.get('report')}"
    )
    for reason in result.get("reasons") or ():
        complain(str(reason))


def layers_table(layers: Mapping[str, Any]) -> Table:
    """What parity found of each layer."""
    # One of the two has its place: only float8 loses values to 0.
    unseen = "worst_of_largest" if any(layer.get("lost_share") for layer in layers.values()) else "lost_share"
    columns = {title: key for title, key in _COLUMNS.items() if key != unseen}
    shown = table("layer", *columns, "", right=("layer", *columns))
    for layer_id, layer in layers.items():
        cells = [_figure(key, layer.get(key)) for key in columns.values()]
        shown.add_row(clean(layer_id), *cells, "good" if layer.get("good") else "BAD")
    return shown


def _figure(key: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "n/a"
    if key == "worst_row":
        return f"{value:,}"
    if key in ("lost_share", "worst_of_largest"):
        return f"{value:.2%}"
    return f"{value:.5f}" if "cosine" in key else f"{value:.3g}"


def _format(side: Any) -> str:
    if not isinstance(side, Mapping):
        return "n/a"
    dtype, stored = side.get("dtype"), side.get("file_dtype")
    how = f"{dtype} stored as {stored}" if stored != dtype else str(dtype)
    return clean(f"{side.get('backend')} {how}")
