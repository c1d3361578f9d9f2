"""`diagnose`: why a job failed: the cause, the line of the log that shows it, and the remedy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from dflash_tui.commands.nodes import connected, find_job, one_node
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import clean, console, note, number, print_json, to_json
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Diagnosis
from dflash_tui.link import diagnose as wire

_ANSWER_S = 210.0  # the link's own limit is shorter and knows more
HELP = "why a job failed, from its log; exit code 1 where a failure is found"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        metavar="FILE|JOB",
        help="a log here, a job's id or its beginning; with --host also a log there, as a path from / on",
    )


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    text: str = args.log
    if not args.host and (Path(text).exists() or "/" in text or text.endswith((".log", ".txt"))):
        return _told({"file": text}, _local(text), as_json=args.json)
    if text.startswith("/"):
        with one_node(settings) as node:
            return _told(
                {"host": node.host, "file": text},
                node.answer(node.link.diagnose(path=text), _ANSWER_S),
                as_json=args.json,
            )
    with connected(settings) as nodes:
        for node in nodes:
            if node.failure is not None and len(nodes) > 1:
                note(f"warning: {node.failure}")
        node, job = find_job(nodes, text)
        found = node.answer(node.link.diagnose(job=job.id), _ANSWER_S)
        return _told({"host": node.host, "job": job.id}, found, as_json=args.json)


def _local(text: str) -> Diagnosis:
    from dflash_tui.node.diagnose import find  # its tables are no other command's business

    try:
        return wire.diagnosis(find.diagnose(os.path.expanduser(text)))
    except OSError as error:
        raise CommandError(
            Exit.BAD_INPUT, f"{text} cannot be read: {error.strerror or error}", "give a log, or the id of a job"
        ) from None


def _told(where: Mapping[str, str], found: Diagnosis, *, as_json: bool) -> Exit:
    if as_json:
        print_json({**where, **to_json(found)})
    else:
        show(console(), found)
    return Exit.FAILED if found.failed else Exit.OK


def show(screen: Console, found: Diagnosis) -> None:
    """The cause, the line that shows it, where it was raised and the remedy: a line each."""
    if found.cause is None:
        screen.print(f"no failure in {number(found.lines)} lines")
    else:
        screen.print(f"failed: {clean(found.cause.text)}  [{found.cause.id}]", style="bold")
        if found.cause.line is not None:
            screen.print(f"  line {found.cause.line}: {clean(found.cause.quote)}")
        if found.source is not None:
            screen.print(f"  raised at {clean(found.source.file)}:{found.source.line}")
        if found.remedy:
            screen.print(f"-> {clean(found.remedy)}", style="bold")
    if found.skipped_bytes:
        screen.print(f"  ({number(found.skipped_bytes)} bytes of its middle were not looked at)")
