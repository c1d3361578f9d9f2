"""`verify`: every file of an output folder checked, some of them computed anew, as a job on the node."""

from __future__ import annotations

import argparse

from backends.spec import DEVICES, VerifySpec
from dflash_tui.commands.nodes import model_on, one_node, path_on, the_host
from dflash_tui.commands.outcome import Exit
from dflash_tui.commands.submit import Order, add_gpu_arguments, add_wait_arguments, finish, refuse_read_only, submit
from dflash_tui.config import Settings

HELP = "check every file of an output folder; compute some of them anew"


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
        return finish(node, submit(node, Order(spec, name, args.gpus, args.share)), args)
