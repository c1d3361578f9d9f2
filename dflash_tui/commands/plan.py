"""`plan`: what an extraction would take on each node, before anything is loaded."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from backends.fp8 import FLOAT8
from backends.spec import BACKENDS, DEVICES, DTYPES, PRESETS, ExtractSpec
from dflash_tui.commands.nodes import connected, model_on, path_on
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import amount, clean, complain, console, note, number, print_json, table
from dflash_tui.commands.submit import Order, add_gpu_arguments, ask_plan
from dflash_tui.config import Settings

HELP = "what an extraction would take, and whether it can be: layers, bytes, memory, disk"

MODEL_HELP = "folder of the model on the node, or its name on the hub: org/name[@revision]"
_DEFAULTS = {field.name: field.default for field in fields(ExtractSpec)}

_NUMBERS = {
    "pack_tokens": "tokens of a pack of the hf backend",
    "max_sample_tokens": "a longer sample is refused",
    "min_free_bytes": "the job ends before the disk has less left",
    "worker_restarts": "how often a lost worker is replaced",
    "tensor_parallel": "GPUs of one vLLM server",
    "concurrency": "requests at a time to each vLLM server",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_extract_arguments(parser)


def add_extract_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of `ExtractSpec` as options."""
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--dataset", required=True, metavar="DIR", help="folder made by `prepare`, on the node")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the hidden states, on the node")
    parser.add_argument("--backend", choices=BACKENDS, default=_DEFAULTS["backend"])
    parser.add_argument(
        "--layers",
        type=layers_of,
        default=_DEFAULTS["layers"],
        metavar="LAYERS",
        help=f"{' or '.join(PRESETS)}, or ids as 2,10,18 (0 = embeddings, N = before the final norm)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=_DEFAULTS["dtype"], help="of the model, and of the files")
    parser.add_argument(
        "--fp8",
        dest="file_dtype",
        action="store_const",
        const=FLOAT8,
        default=_DEFAULTS["file_dtype"],
        help="files in float8 with a scale a token: half the bytes of 16 bits (the trainer: --hidden-states-backend fp8)",
    )
    parser.add_argument("--device", choices=DEVICES, default=_DEFAULTS["device"])
    add_gpu_arguments(parser)
    parser.add_argument("--first", type=int, default=_DEFAULTS["first"], metavar="N", help="first sample")
    parser.add_argument(
        "--last", type=int, default=_DEFAULTS["last"], metavar="N", help="sample to stop before (default: all)"
    )
    add_numbers(parser, _NUMBERS, _DEFAULTS)
    parser.add_argument(
        "--vllm-python",
        default=_DEFAULTS["vllm_python"],
        metavar="PYTHON",
        help="the Python on the node that vLLM is in (default: the newest that setup made)",
    )
    parser.add_argument(
        "--server-url",
        default=_DEFAULTS["server_url"],
        metavar="URL",
        help="of a vLLM server that runs already and extracts these layers; none is started then",
    )
    parser.add_argument(
        "--stall",
        dest="stall_s",
        type=int,
        default=_DEFAULTS["stall_s"],
        metavar="SECONDS",
        help="a vLLM server that finishes no sample for so long is started anew (default: %(default)s)",
    )
    parser.add_argument("extra_args", nargs="*", metavar="-- ARGUMENT", help="for `vllm serve`, untouched")


def add_numbers(parser: argparse.ArgumentParser, words: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
    """Fields of a spec that are whole numbers, as options of their names."""
    for name, meaning in words.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=defaults[name],
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )


def layers_of(text: str) -> str | tuple[int, ...]:
    """A preset or layer ids as typed. Raises ArgumentTypeError."""
    if text in PRESETS:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {' nor '.join(PRESETS)} nor layer ids, as 2,10,18"
        ) from None


def extract_order(args: argparse.Namespace, host: str) -> Order:
    """The order of the options. Raises SpecError, CommandError."""
    values: dict[str, Any] = {name: getattr(args, name) for name in _DEFAULTS if name != "gpus"}
    values["extra_args"] = tuple(values["extra_args"])
    values["model"] = model_on(host, values["model"])
    for name in ("dataset", "output"):
        values[name] = path_on(host, values[name])
    spec = ExtractSpec(**values)
    return Order(spec, getattr(args, "name", "") or spec.output.rstrip("/").rpartition("/")[2], args.gpus, args.share)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    outcome = Exit.OK
    documents: list[dict[str, Any]] = []
    orders = {host: extract_order(args, host) for host in settings.hosts}
    with connected(settings) as nodes:
        for node in nodes:
            refused: dict[str, Any] = {}
            try:
                if node.failure is not None:
                    raise node.failure
                plan = ask_plan(node, orders[node.host])
                if not plan.get("ok"):
                    refused = {"vllm": plan["vllm"]} if plan.get("vllm") else {}
                    if refused and not args.json:
                        show_vllm(node.host, plan["vllm"])
                    message, remedy = clean(str(plan.get("error"))), clean(str(plan.get("remedy") or ""))
                    raise CommandError(Exit.BAD_INPUT, message, remedy, node.host)
            except CommandError as error:
                outcome = max(outcome, error.code)
                complain(str(error))
                documents.append({**error.to_json(), **refused})
                continue
            documents.append({"host": node.host, **plan})
            if not args.json:
                show_plan(node.host, {name: value for name, value in plan.items() if name != "vllm"})
                if plan.get("vllm"):
                    show_vllm(node.host, {**plan["vllm"], "warnings": ()})  # they stand among the plan's own
    if args.json:
        print_json(documents)
    return outcome


def show_vllm(host: str, vllm: Mapping[str, Any]) -> None:
    """What is known of the node's vLLM and the model as a table, the known faults and its server's command after it."""
    known = {True: "yes", False: "no"}.get(vllm["ok"], "not known") if "ok" in vllm else "taken on trust"
    facts = {name: value for name, value in vllm.items() if name not in ("tried", "command") and value}
    if "flags" in facts:
        facts["flags"] = shlex.join(facts["flags"])
    show_plan(host, {"can extract": known, **facts})
    if vllm.get("command"):
        console().print(clean(shlex.join(vllm["command"])), markup=False, highlight=False, soft_wrap=True)


def show_plan(host: str, plan: Mapping[str, Any]) -> None:
    """The facts of a plan as a table, its warnings after it."""
    shown = table("plan", host)
    for key, value in plan.items():
        if key in ("ok", "error", "remedy", "warnings"):
            continue
        shown.add_row(key.removesuffix("_bytes").replace("_", " "), _UNITS.get(key, _plain)(value))
    console().print(shown)
    for line in plan.get("warnings") or ():
        note(f"warning: {line}")


def _plain(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(str(key))} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(clean(str(item)) for item in value)
    return clean(str(value))


_UNITS: dict[str, Callable[[Any], str]] = dict.fromkeys(
    (
        "download_bytes",
        "download_free_bytes",
        "bytes_per_token",
        "bytes_total",
        "disk_free_bytes",
        "memory_bytes_per_worker",
    ),
    amount,
)
