"""From a spec to a job that has ended: plan, launch, wait. What `launch`, `prepare`, `verify`, `demo` and `restart` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from backends.spec import Spec
from dflash_tui.commands.follow import reporter, verdict, wait
from dflash_tui.commands.nodes import Node
from dflash_tui.commands.outcome import CommandError, Exit, of_job
from dflash_tui.commands.output import clean, complain, note, print_json
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job
from dflash_tui.link import new_job_id
from dflash_tui.link.facts import launch_of
from dflash_tui.node.protocol import Launch
from dflash_tui.node.setup.spec import SetupSpec

PLAN_TIMEOUT_S = 180.0  # importing torch on a cold file system takes its time
# Longer than the link waits, which waits longer than the agent: the nearest to the work knows best why it is late.
_AROUND_A_PLAN_S = 70.0
_LAUNCH_S = 110.0


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be started."""

    spec: Spec | SetupSpec
    name: str
    gpus: tuple[str, ...] = ()
    share: bool = False

    @property
    def launch(self) -> Launch:
        return Launch(self.name, self.spec.verb, "", self.spec.to_json(), self.gpus, self.share)


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        type=gpu_list,
        default=(),
        metavar="LIST",
        help="GPUs by index or UUID, as 0,1 (default: none, the CPU)",
    )
    parser.add_argument("--share", action="store_true", help="take the GPUs even where others use them")


def add_wait_arguments(parser: argparse.ArgumentParser, *, waits: bool) -> None:
    parser.add_argument("--name", default="", help="what the job is called in lists")
    if waits:
        parser.add_argument("--detach", dest="wait", action="store_false", help="start it and return at once")
    else:
        parser.add_argument(
            "--wait", action="store_true", help="follow the job to its end; the exit code tells how it went"
        )


def gpu_list(text: str) -> tuple[str, ...]:
    """The names in "0,1"."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different GPUs, as 0,1")
    return names


def refuse_read_only(settings: Settings, what: str) -> None:
    """Raises CommandError where nothing may be changed."""
    if settings.read_only:
        raise CommandError(
            Exit.BAD_INPUT,
            f"{what} changes the node, and this is read-only",
            "leave out --read-only, or read_only in config.toml",
        )


def ask_plan(node: Node, order: Order) -> Mapping[str, Any]:
    """What the node's worker Python says of the order, refusals included. Raises CommandError where it cannot be asked."""
    spec = order.spec
    fields, secrets = spec.to_json(), node.secrets_for(spec.verb, spec.to_json())
    future = node.link.plan(
        spec.verb, fields, gpus=order.gpus, share=order.share, timeout=PLAN_TIMEOUT_S, env=node.env, secrets=secrets
    )
    return node.answer(future, PLAN_TIMEOUT_S + _AROUND_A_PLAN_S)


def plan_or_refuse(node: Node, order: Order) -> Mapping[str, Any]:
    """The plan of an order that can be started; warnings go to stderr. Raises CommandError with the refusal."""
    plan = ask_plan(node, order)
    for line in plan.get("warnings") or ():
        note(f"warning: {line}")
    if not plan.get("ok"):
        raise CommandError(
            Exit.BAD_INPUT, clean(str(plan.get("error"))), clean(str(plan.get("remedy") or "")), node.host
        )
    return plan


def submit(node: Node, order: Order) -> Job:
    """Plans, then launches. Raises CommandError; then nothing was started."""
    plan_or_refuse(node, order)
    return start(node, order.launch)


def start(node: Node, launch: Launch) -> Job:
    """Launches. The id is made here, so that a repeated request starts nothing twice."""
    secrets = node.secrets_for(launch.verb, launch.spec)
    launch = launch._replace(env={**launch.env, **node.env})
    return node.answer(node.link.launch(new_job_id(launch.verb), launch, secrets=secrets), _LAUNCH_S)


def finish(
    node: Node,
    job: Job,
    args: argparse.Namespace,
    stream: IO[str] | None = None,
    show: Callable[[Mapping[str, Any]], None] | None = None,
    outcome: Callable[[Job], Exit] = of_job,
) -> Exit:
    """Tells of a started job and, where that was asked for, waits for its end; `show` then shows a person its result.

    outcome: the exit code of a job that has ended.
    """
    if not args.wait:
        if args.json:
            print_json(
                {"host": node.host, "job": job.id, "verb": job.verb, "state": job.state, "log": f"{job.directory}/log"}
            )
        else:
            print(job.id, flush=True)
            if sys.stderr.isatty():
                note(f"`dflash-tui logs -f {job.id} --host {node.host}` shows its log")
        return Exit.OK
    if not args.json:
        note(f"job {job.id} on {node.host}")
    job = wait_or_detach(node, job, args, stream)
    document = verdict(node, job)
    if args.json:
        print_json({**document, "exit_code": int(outcome(job))})
    else:
        print(job.id, flush=True)
        if show is not None and job.result is not None:
            show(job.result)
    if "error" in document:
        remedy = f": {document['remedy']}" if document["remedy"] else ""
        complain(f"{node.host}: {document['error']}{remedy} (job {job.id}, {job.state})")
    return outcome(job)


def wait_or_detach(node: Node, job: Job, args: argparse.Namespace, stream: IO[str] | None = None) -> Job:
    """The job at its end; ctrl+C leaves it running. Raises CommandError."""
    try:
        with reporter(stream) as shown:
            return wait(node, job, shown)
    except KeyboardInterrupt:
        remedy = f"`dflash-tui logs -f {job.id} --host {node.host}` shows it, `dflash-tui stop {job.id} --host {node.host}` ends it"
        raise CommandError(Exit.CTRL_C, f"no longer waiting; job {job.id} goes on", remedy, node.host) from None


def launch_of_job(node: Node, job: str) -> Launch:
    """What a job was started with, from its launch.json. Raises CommandError."""
    _, data = node.answer(node.link.read(job=job, file="launch", length=1 << 16))
    try:
        return launch_of(data)
    except ValueError as error:
        raise CommandError(
            Exit.FAILED,
            f"launch.json of job {job} cannot be read: {error}",
            "launch it anew with `dflash-tui launch`",
            node.host,
        ) from None
