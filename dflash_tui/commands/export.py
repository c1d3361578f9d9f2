"""`export`: an extraction in SpecForge's offline layout, as a job on the node."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from backends.spec import ExportSpec
from dflash_tui.commands.nodes import one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit
from dflash_tui.commands.output import clean, note
from dflash_tui.commands.submit import Order, add_wait_arguments, finish, refuse_read_only, submit
from dflash_tui.config import Settings

HELP = "write an extraction in SpecForge's offline layout"

_DEFAULTS = {field.name: field.default for field in fields(ExportSpec)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="DIR", help="folder that an extraction wrote, on the node")
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="folder for SpecForge's files; an earlier export is gone on with"
    )
    parser.add_argument(
        "--rows-per-folder",
        type=int,
        default=_DEFAULTS["rows_per_folder"],
        metavar="N",
        help="so many samples go into each folder (default: %(default)s)",
    )
    parser.add_argument("--dataset", default=None, metavar="DIR", help="another folder than the manifest names")
    add_wait_arguments(parser, waits=True)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "export")
    host = the_host(settings)
    spec = ExportSpec(
        output=path_on(host, args.output),
        to=path_on(host, args.to),
        rows_per_folder=args.rows_per_folder,
        dataset=None if args.dataset is None else path_on(host, args.dataset),
    )
    name = args.name or spec.to.rstrip("/").rpartition("/")[2]
    with one_node(settings) as node:
        return finish(node, submit(node, Order(spec, name)), args, show=show_result)


def show_result(result: Mapping[str, Any]) -> None:
    """How much is there now, and what SpecForge's draft config must say, on stderr."""
    kept = f", {result['kept']:,} of them from an earlier export" if result.get("kept") else ""
    note(f"{clean(str(result.get('output')))} holds {result.get('exported', 0):,} samples{kept}")
    if result.get("left_out"):
        note(f"{result['left_out']:,} samples are left out; specforge.json names their rows")
    ids = ", ".join(map(str, result.get("target_layer_ids") or ()))
    note(f"target_layer_ids of SpecForge's draft config: {clean(ids)}")
