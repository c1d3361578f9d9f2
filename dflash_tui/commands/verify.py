"""`verify`: every file of an output folder checked, some of them computed anew, as a job on the node."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from backends.spec import DEVICES, VerifySpec
from dflash_tui.commands.nodes import model_on, one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit
from dflash_tui.commands.output import amount, clean, note
from dflash_tui.commands.submit import Order, add_gpu_arguments, add_wait_arguments, finish, refuse_read_only, submit
from dflash_tui.config import Settings

HELP = "check every file of an output folder; compute some of them anew"

_BESIDES = {
    "not_extracted": "rows of the dataset are not extracted",
    "unlisted": "files are in no manifest",
    "leftover": "unfinished files were left behind by a killed job",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="DIR", help="folder that an extraction wrote, on the node")
    parser.add_argument(
        "--recompute", type=int, default=0, metavar="K", help="compute K samples anew in float32 and compare"
    )
    parser.add_argument(
        "--model", default=None, metavar="MODEL", help="another than the manifest names: a folder, or a name on the hub"
    )
    parser.add_argument("--dataset", default=None, metavar="DIR", help="another folder than the manifest names")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="which samples are computed anew (default: %(default)s)"
    )
    add_gpu_arguments(parser)
    add_wait_arguments(parser, waits=True)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "verify")
    host = the_host(settings)
    spec = VerifySpec(
        output=path_on(host, args.output),
        recompute=args.recompute,
        model=None if args.model is None else model_on(host, args.model),
        dataset=None if args.dataset is None else path_on(host, args.dataset),
        device=args.device,
        seed=args.seed,
    )
    name = args.name or spec.output.rstrip("/").rpartition("/")[2]
    with one_node(settings) as node:
        return finish(node, submit(node, Order(spec, name, args.gpus, args.share)), args, show=show_result)


def show_result(result: Mapping[str, Any]) -> None:
    """What was found right, and what is no part of it, on stderr."""
    kept = f"{amount(result.get('bytes'))} in {clean(str(result.get('file_dtype')))}"
    note(f"every file is right: {result.get('verified', 0):,} samples, {result.get('tokens', 0):,} tokens, {kept}")
    if result.get("recomputed"):
        layers = (result.get("worst_error_by_layer") or {}).items()
        errors = ", ".join(f"{clean(layer)}: {error:.2g}" for layer, error in layers)
        note(f"{result['recomputed']:,} computed anew; worst relative error by layer: {errors}")
    for key, text in _BESIDES.items():
        if result.get(key):
            note(f"{result[key]:,} {text}")
