"""`stop`: asks a job to end: it commits what it has, and the node proves that nothing of it is left."""

from __future__ import annotations

import argparse
import sys

from dflash_tui.commands.gpumemory import jobs_once_read
from dflash_tui.commands.nodes import connected, find_job
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import clean, print_json
from dflash_tui.commands.submit import refuse_read_only, wait_or_detach
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job, JobState
from dflash_tui.fleet.gpumemory import gpu_memory_line

MEMORY_WAIT_S = 15.0
HELP = "stop a job; what it has finished is kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="id of the job, or the beginning of it")
    parser.add_argument("--force", action="store_true", help="kill it without waiting for what is in work")
    parser.add_argument("--wait", action="store_true", help="return when nothing of it is left")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    refuse_read_only(settings, "stop")
    with connected(settings) as nodes:
        node, job = find_job(nodes, args.job)
        over = job.state.ended and not job.strays and job.state is not JobState.ORPHANED
        if not over:
            _confirm(job, node.host, args)
            node.answer(node.link.stop(job.id, args.force), timeout=120)
            job = next((found for found in node.answer(node.link.list_jobs()) if found.id == job.id), job)
            if args.wait:
                job = wait_or_detach(node, job, args)
        if args.wait:
            jobs = jobs_once_read(node, MEMORY_WAIT_S, only=job.id)
            job = next((found for found in jobs if found.id == job.id), job)
        if args.json:
            print_json(
                {
                    "host": node.host,
                    "job": job.id,
                    "state": job.state,
                    "reason": job.reason,
                    "strays": job.strays,
                    "gpu_memory": job.gpu_memory,
                    "already_ended": over,
                }
            )
        else:
            print(f"{job.id}: {'had ended already, ' if over else ''}{job.state}")
            memory = gpu_memory_line(job)
            if memory:
                print(f"GPU memory: {clean(memory)}")
        if job.strays:
            pids = ", ".join(str(stray.pid) for stray in job.strays)
            raise CommandError(
                Exit.FAILED, f"processes of job {job.id} are still alive ({pids})", "stop it with --force", node.host
            )
        return Exit.OK


def _confirm(job: Job, host: str, args: argparse.Namespace) -> None:
    if args.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    done = f" at {job.progress.done:,} of {job.progress.total:,} samples" if job.progress and job.progress.total else ""
    how = "killed at once; what is in work is lost" if args.force else "asked to end; what is done is kept"
    sys.stderr.write(f"{job.verb} {job.id} ({job.state}{done}) on {host} is {how}. Stop it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(Exit.BAD_INPUT, f"job {job.id} goes on", "answer y, or give --yes", host)
