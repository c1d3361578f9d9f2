"""`launch` and `restart`: an extraction as a job that outlives this command."""

from __future__ import annotations

import argparse

from dflash_tui.commands import compare, parity
from dflash_tui.commands.nodes import connected, find_job, one_node, the_host
from dflash_tui.commands.outcome import CommandError, Exit, of_job
from dflash_tui.commands.output import clean
from dflash_tui.commands.plan import add_extract_arguments, extract_order
from dflash_tui.commands.submit import (
    PLAN_TIMEOUT_S,
    add_wait_arguments,
    finish,
    launch_of_job,
    refuse_read_only,
    start,
    submit,
)
from dflash_tui.config import Settings

HELP = "start an extraction; prints the id of its job"
RESTART_HELP = "the same once more under a new id; samples that are done are not done again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_extract_arguments(parser)
    add_wait_arguments(parser, waits=False)


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "launch")
    order = extract_order(args, the_host(settings))
    with one_node(settings) as node:
        return finish(node, submit(node, order), args)


def add_restart_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="id of a job that has ended, or the beginning of it")
    parser.add_argument(
        "--wait", action="store_true", help="follow the job to its end; the exit code tells how it went"
    )


def run_restart(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "restart")
    with connected(settings) as nodes:
        node, job = find_job(nodes, args.job)
        if not job.state.ended:
            raise CommandError(
                Exit.BAD_INPUT, f"job {job.id} is {job.state}", f"`dflash-tui stop {job.id}` ends it first", node.host
            )
        if job.strays:
            raise CommandError(
                Exit.BAD_INPUT,
                f"processes of job {job.id} are still alive",
                f"`dflash-tui stop {job.id}` ends them first",
                node.host,
            )
        launch = launch_of_job(node, job.id)
        plan = node.answer(
            node.link.plan(
                launch.verb,
                launch.spec,
                python=launch.python,
                gpus=launch.gpus,
                share=launch.share,
                timeout=PLAN_TIMEOUT_S,
                env={**launch.env, **node.env},
                secrets=node.secrets_for(launch.verb, launch.spec),
            ),
            PLAN_TIMEOUT_S + 10,
        )
        if not plan.get("ok"):
            raise CommandError(
                Exit.BAD_INPUT, clean(str(plan.get("error"))), clean(str(plan.get("remedy") or "")), node.host
            )
        outcome = {"parity": parity.outcome, "compare": compare.outcome}.get(launch.verb, of_job)
        return finish(node, start(node, launch), args, outcome=outcome)
