"""`show`: what a job was started with: its command line, its environment without secrets, the versions."""

from __future__ import annotations

import argparse
import sys

from rich.syntax import Syntax

from dflash_tui.commands.nodes import connected, find_job
from dflash_tui.commands.outcome import Exit
from dflash_tui.commands.output import clock, console, note, print_json, to_json
from dflash_tui.config import Settings
from dflash_tui.fleet.started import started_text

HELP = "what a job was started with: command line, environment (secrets hidden), versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="id of the job, or the beginning of it")


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    with connected(settings) as nodes:
        for node in nodes:
            if node.failure is not None and len(nodes) > 1:
                note(f"warning: {node.failure}")
        node, job = find_job(nodes, args.job)
        started = node.answer(node.link.command(job.id))
    if args.json:
        document = to_json(started)
        print_json({"host": node.host, "job": job.id, "hostname": document.pop("host"), **document})
        return Exit.OK
    text = started_text(job.id, node.host, started, clock(started.time))
    if sys.stdout.isatty():
        shown = Syntax(text.rstrip("\n"), "bash", theme="ansi_dark", background_color="default", word_wrap=True)
        console().print(shown)
    else:
        sys.stdout.write(text)
    return Exit.OK
