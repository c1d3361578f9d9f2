"""`compare`: both backends on the same samples as one job, watched to its verdict; and what earlier comparisons found."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console

from backends.spec import DEVICES, DTYPES, PRESETS, CompareSpec
from dflash_tui.commands.comparison import show_result
from dflash_tui.commands.follow import verdict
from dflash_tui.commands.nodes import Node, connected, find_job, model_on, one_node, path_on, the_host
from dflash_tui.commands.outcome import CommandError, Exit, of_job
from dflash_tui.commands.output import clean, clock, complain, console, print_json, table
from dflash_tui.commands.plan import MODEL_HELP, add_numbers, layers_of
from dflash_tui.commands.sides import side_words
from dflash_tui.commands.submit import (
    Order,
    add_gpu_arguments,
    add_wait_arguments,
    finish,
    launch_of_job,
    refuse_read_only,
    submit,
)
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job

HELP = "hf and vllm on the same samples: which is faster here, how sure that is, and whether both write the same"

VERB = CompareSpec.verb
_ROOM_FOR_SENTENCES = 160  # columns of a terminal
_DEFAULTS = {field.name: field.default for field in fields(CompareSpec)}
_REQUIRED = ("model", "dataset", "output")
_NUMBERS = {
    "first": "first sample",
    "samples": "so many samples from there on",
    "pack_tokens": "tokens of a pack of the hf backend",
    "max_sample_tokens": "a longer sample is refused",
    "min_free_bytes": "the job ends before the disk has less left",
    "tensor_parallel": "GPUs of one vLLM server",
    "concurrency": "requests at a time to each vLLM server",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    past = parser.add_mutually_exclusive_group()
    past.add_argument("--list", action="store_true", help="the comparisons of the hosts, those that run too")
    past.add_argument("--show", metavar="JOB", help="what a comparison found, by its id or the beginning of it")
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--dataset", metavar="DIR", help="folder made by `prepare`, on the node")
    parser.add_argument(
        "--output", metavar="DIR", help="folder for the report, on the node; an earlier comparison's is done anew"
    )
    parser.add_argument(
        "--layers",
        type=layers_of,
        default=_DEFAULTS["layers"],
        metavar="LAYERS",
        help=f"{' or '.join(PRESETS)}, or ids as 2,10,18 (0 = embeddings, N = before the final norm)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=_DEFAULTS["dtype"], help="of the model, and of the files")
    parser.add_argument("--device", choices=DEVICES, default=_DEFAULTS["device"])
    add_gpu_arguments(parser)
    parser.add_argument(
        "--together",
        action="store_true",
        help="both at a time, each on half of the GPUs (default: one after the other)",
    )
    parser.add_argument("--keep-files", action="store_true", help="do not remove the hidden states at the end")
    add_numbers(parser, _NUMBERS, _DEFAULTS)
    parser.add_argument(
        "--vllm-python",
        default=_DEFAULTS["vllm_python"],
        metavar="PYTHON",
        help="the Python on the node that vLLM is in (default: the newest that setup made)",
    )
    add_wait_arguments(parser, waits=True)
    parser.add_argument("extra_args", nargs="*", metavar="-- ARGUMENT", help="for `vllm serve`, untouched")


def compare_order(args: argparse.Namespace, host: str) -> Order:
    """The order of the options. Raises SpecError, CommandError."""
    missing = [f"--{name}" for name in _REQUIRED if getattr(args, name) is None]
    if missing:
        raise CommandError(
            Exit.BAD_INPUT,
            f"compare: the following arguments are required: {', '.join(missing)}",
            "or --list and --show JOB for earlier comparisons",
        )
    values: dict[str, Any] = {name: getattr(args, name) for name in _DEFAULTS if name != "gpus"}
    values["extra_args"] = tuple(values["extra_args"])
    values["model"] = model_on(host, values["model"])
    for name in ("dataset", "output"):
        values[name] = path_on(host, values[name])
    spec = CompareSpec(**values)
    return Order(spec, args.name or _base(spec.output), args.gpus, args.share)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    if args.list:
        return _list(args, settings)
    if args.show is not None:
        return _show(args, settings)
    refuse_read_only(settings, "compare")
    order = compare_order(args, the_host(settings))
    with one_node(settings) as node:
        return finish(node, submit(node, order), args, show=show_result, outcome=outcome)


def outcome(job: Job) -> Exit:
    """A comparison that is done and found that both did not write the same has failed, for scripts."""
    code = of_job(job)
    parity = (job.result or {}).get("parity")
    good = isinstance(parity, Mapping) and parity.get("verdict") == "good"
    return Exit.FAILED if code is Exit.OK and not good else code


# --- earlier ones ---------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace, settings: Settings) -> Exit:
    code = Exit.OK
    documents: list[dict[str, Any]] = []
    with connected(settings) as nodes:
        for node in nodes:
            try:
                documents += [_entry(node, job) for job in reversed(_jobs(node)) if job.verb == VERB]
            except CommandError as error:
                code = max(code, error.code)
                complain(str(error))
                documents.append({"host": node.host, "error": error.message, "remedy": error.remedy})
    if args.json:
        print_json(documents)
        return code
    found = [document for document in documents if "job" in document]
    if found:
        print_list(console(), found)
    elif code is Exit.OK:
        print("no comparisons")
    return code


def print_list(screen: Console, entries: Sequence[Mapping[str, Any]]) -> None:
    """The newest first; where the terminal is too narrow for the sentences beside them, they come after."""
    entries = sorted(entries, key=lambda entry: float(entry["created"]), reverse=True)
    wide = screen.width >= _ROOM_FOR_SENTENCES
    shown = table("created", "host", "job", "model", "state", "ratio", *(("verdict",) if wide else ()))
    for column in shown.columns[:3]:
        column.no_wrap = True  # an id in pieces cannot be copied
    for entry in entries:
        ratio = entry["ratio"]
        words = f"{entry['faster'] or '?'} {ratio:.2f}" if isinstance(ratio, (int, float)) else ""
        when = clock(entry["created"])[5:16]  # the year and the seconds stand in the id
        cells = [when, entry["host"], entry["job"], _base(entry["model"]), entry["state"], words]
        shown.add_row(*map(clean, [*cells, _words(entry)] if wide else cells))
    screen.print(shown)
    for entry in () if wide else entries:
        if words := _words(entry):
            screen.print(f"{entry['job']}: {words}")


def _words(entry: Mapping[str, Any]) -> str:
    return str(entry["sentence"] or entry["reason"])


def _jobs(node: Node) -> tuple[Job, ...]:
    if node.failure is not None:
        raise node.failure
    return node.answer(node.link.list_jobs())


def _model(node: Node, job: Job) -> str:
    """The model that a comparison without a result was started with; "" where its folder does not tell."""
    try:
        return str(launch_of_job(node, job.id).spec.get("model") or "")
    except CommandError as error:
        if error.code not in (Exit.FAILED, Exit.NOT_FOUND):
            raise
        return ""


def _entry(node: Node, job: Job) -> dict[str, Any]:
    """A comparison as one line of the list."""
    result = job.result or {}
    found = result.get("verdict")
    told: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    return {
        "host": node.host,
        "job": job.id,
        "created": job.created,
        "model": str(result.get("model") or _model(node, job)),
        "state": job.state.value,
        **{name: told.get(name) for name in ("faster", "ratio", "low", "high")},
        "sentence": clean(str(told.get("sentence") or "")),
        "reason": clean(job.reason) or ("" if job.state.ended else side_words(job)),
    }


def _show(args: argparse.Namespace, settings: Settings) -> Exit:
    with connected(settings) as nodes:
        node, job = find_job(nodes, args.show)
        if job.verb != VERB:
            raise CommandError(
                Exit.BAD_INPUT,
                f"job {job.id} is no comparison but {job.verb}",
                "`dflash-tui compare --list` lists them",
            )
        code = outcome(job) if job.state.ended else Exit.OK
        document = verdict(node, job) if job.state.ended else _entry(node, job)
        document = {**document, "created": job.created, "sides": job.sides}
        if args.json:
            print_json({**document, "exit_code": int(code)})
            return code
        if not job.state.ended:
            print(f"{job.id} is {job.state}, {side_words(job)}")
        elif job.result is not None:
            show_result(job.result)
        if "error" in document:
            remedy = f": {document['remedy']}" if document["remedy"] else ""
            complain(f"{node.host}: {document['error']}{remedy} (job {job.id}, {job.state})")
        return code


def _base(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
