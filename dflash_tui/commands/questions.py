"""What `doctor` asks of a node that starts nothing: what its backends can do with a model, what its vLLM accepts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from backends.questions import CapabilitiesSpec, VllmOptionsSpec
from backends.spec import DTYPES, Spec
from dflash_tui.commands.nodes import Node, connected, model_on
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import clean, complain, console, note, print_json, table
from dflash_tui.commands.submit import PLAN_TIMEOUT_S, gpu_list
from dflash_tui.config import Settings
from dflash_tui.fleet.capabilities import about, some_can, verdicts
from dflash_tui.fleet.facts import Checkup

_MORE_S = 30.0  # for the worker Python to start
_AROUND_S = 70.0
_OF_A_MODEL = ("dtype", "gpus", "tensor_parallel", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the backends can do with a model (nothing else is looked at then)")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of the model on the node, or its name on the hub: can hf, can each vLLM of the node, and why not",
    )
    group.add_argument("--dtype", choices=DTYPES, help="of the model (default: bfloat16)")
    group.add_argument("--gpus", type=gpu_list, metavar="LIST", help="by index or UUID, as 0,1 (default: all)")
    group.add_argument("--cpu", action="store_true", default=None, help="as if there were no GPUs")
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="GPUs of one vLLM server (default: 1)")
    group.add_argument(
        "--vllm-python",
        action="append",
        default=[],
        metavar="PYTHON",
        help="a Python on the node that vLLM is in, beside those that setup made; may be repeated",
    )
    group = parser.add_argument_group("what its `vllm serve` accepts (nothing else is looked at then)")
    group.add_argument(
        "--vllm-options",
        nargs="*",
        metavar="WORD",
        help="lists its options, those with all of the words: of the first --vllm-python, else of the newest vLLM",
    )


def wanted(args: argparse.Namespace) -> bool:
    """Whether the command asks one of these instead of a checkup. Raises CommandError where it asks for two things."""
    if args.model is not None and args.vllm_options is not None:
        raise CommandError(Exit.BAD_INPUT, "--model and --vllm-options are two questions", "ask one after the other")
    if args.model is None:
        given = [name for name in _OF_A_MODEL if getattr(args, name) is not None]
        if args.vllm_python and args.vllm_options is None:
            given.append("vllm_python")
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise CommandError(
                Exit.BAD_INPUT, f"{names} without --model means nothing", "name the model, or leave it out"
            )
    if args.path and (args.model is not None or args.vllm_options is not None):
        raise CommandError(Exit.BAD_INPUT, "--path is of the checkup", "leave it out")
    return args.model is not None or args.vllm_options is not None


def run(args: argparse.Namespace, settings: Settings, show: Callable[[Checkup], None]) -> Exit:
    """show: prints a checkup."""

    def spec_on(host: str) -> Spec:
        if args.model is None:
            python = args.vllm_python[0] if args.vllm_python else ""
            return VllmOptionsSpec(python, tuple(args.vllm_options))
        given: dict[str, Any] = {name: getattr(args, name) for name in ("dtype", "gpus", "tensor_parallel")}
        return CapabilitiesSpec(
            model=model_on(host, args.model),
            device="cpu" if args.cpu else "auto",
            vllm_pythons=tuple(args.vllm_python),
            **{name: value for name, value in given.items() if value is not None},
        )

    def show_model(host: str, answer: Mapping[str, Any]) -> None:
        for line in answer.get("warnings") or ():
            note(f"warning: {line}")
        console().print(f"{clean(answer['model'])}: {clean(about(answer))}", style="bold")
        show(verdicts(host, answer))

    outcome = Exit.OK
    documents: list[dict[str, Any]] = []
    specs = {host: spec_on(host) for host in settings.hosts}
    with connected(settings) as nodes:
        if args.model is None and not args.json and sys.stderr.isatty():
            note("asking vLLM, which takes it half a minute to import")
        for node in nodes:
            try:
                if node.failure is not None:
                    raise node.failure
                answer = _ask(node, specs[node.host])
            except CommandError as error:
                outcome = max(outcome, error.code)
                complain(str(error))
                documents.append(error.to_json())
                continue
            documents.append({"host": node.host, **answer})
            if args.model is not None and not some_can(answer):
                outcome = max(outcome, Exit.FAILED)
            if not args.json:
                (show_options if args.model is None else show_model)(node.host, answer)
    if args.json:
        print_json(documents)
    return outcome


def _ask(node: Node, spec: Spec) -> Mapping[str, Any]:
    """The node's answer. Raises CommandError, also where it is a refusal."""
    fields = spec.to_json()
    limit_s = PLAN_TIMEOUT_S if isinstance(spec, CapabilitiesSpec) else fields["limit_s"] + _MORE_S
    secrets = node.secrets_for(spec.verb, fields)
    future = node.link.plan(spec.verb, fields, timeout=limit_s, env=node.env, secrets=secrets)
    answer = node.answer(future, limit_s + _AROUND_S)
    if not answer.get("ok"):
        message, remedy = clean(str(answer.get("error"))), clean(str(answer.get("remedy") or ""))
        raise CommandError(Exit.BAD_INPUT, message, remedy, node.host)
    return answer


def show_options(host: str, answer: Mapping[str, Any]) -> None:
    """An option a row, its other names, choices and default under it."""
    options: Sequence[Mapping[str, Any]] = answer["options"]
    screen = console()
    screen.print(
        f"{host}: vLLM {clean(answer['version'])} in {clean(answer['python'])}, {len(options)} of {answer['all']} options"
    )
    shown = table("option", "what it does")
    for option in options:
        name = Text(clean(option["names"][0]), "bold")
        if option["value"]:
            name.append(f" {clean(option['value'])}", "not bold")
        told = Text(clean(option["help"]))
        more = [*option["names"][1:], *([f"default {option['default']}"] if option["default"] else [])]
        if more:
            told.append(f"\n{clean(', '.join(more))}", "dim")
        shown.add_row(name, told)
    if options:
        screen.print(shown)
