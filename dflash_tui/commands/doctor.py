"""`doctor`: what each node can do, what it lacks, and how to mend it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from dflash_tui.commands import questions
from dflash_tui.commands.nodes import Node, connected, path_on
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import clean, complain, console, note, print_json, table
from dflash_tui.config import Settings
from dflash_tui.fleet.checkup import SIGNS, has_problem, summary
from dflash_tui.fleet.facts import CheckStatus, Checkup
from dflash_tui.link.doctor import LIMIT_S

HELP = "what each node can do, what it lacks and how to mend it; exit code 1 where there is a problem"
_LONGEST_S = 600.0
_ANSWER_S = 90.0  # after the limit: the link's own is shorter and knows more
_STYLES = {CheckStatus.PROBLEM: "bold red", CheckStatus.WARNING: "yellow", CheckStatus.OK: "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder on the node that jobs will write to: its space, its speed; may be repeated",
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=LIMIT_S,
        metavar="S",
        help="seconds that the slowest check may take: importing torch from a network disk (default: %(default)g)",
    )
    questions.add_arguments(parser)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {_LONGEST_S:g}")
    return value


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    if questions.wanted(args):
        return questions.run(args, settings, lambda checkup: show(console(), checkup))
    outcome = Exit.OK
    documents: list[dict[str, Any]] = []
    paths = {host: tuple(path_on(host, path) for path in args.path) for host in settings.hosts}
    with connected(settings) as nodes:
        if not args.json and sys.stderr.isatty():
            note(f"looking at {', '.join(node.host for node in nodes if node.failure is None)}: up to a minute")
        asked = {
            node.host: node.link.doctor(paths=paths[node.host], write=not settings.read_only, limit_s=args.limit)
            for node in nodes
            if node.failure is None
        }
        for node in nodes:
            try:
                if node.failure is not None:
                    raise node.failure
                checkup = node.answer(asked[node.host], args.limit + _ANSWER_S)
            except CommandError as error:
                outcome = max(outcome, error.code)
                complain(str(error))
                documents.append(error.to_json())
                continue
            if has_problem(checkup.checks):
                outcome = max(outcome, Exit.FAILED)
            documents.append(_document(node, checkup))
            if not args.json:
                show(console(), checkup)
    if args.json:
        print_json(documents)
    return outcome


def _document(node: Node, checkup: Checkup) -> dict[str, Any]:
    counts: dict[str, int] = {
        f"{status}s": sum(check.status is status for check in checkup.checks) for status in _COUNTED
    }
    return {
        "host": node.host,
        **counts,
        "clock_offset_s": checkup.clock_offset_s,
        "round_trip_s": checkup.round_trip_s,
        "checks": checkup.checks,
    }


_COUNTED = (CheckStatus.PROBLEM, CheckStatus.WARNING)


def show(screen: Console, checkup: Checkup) -> None:
    """One line a check, the remedy under what it mends."""
    screen.print(f"{checkup.host}: {summary(checkup.checks)}")
    shown = table("status", "check", "found")
    shown.columns[0].no_wrap = shown.columns[1].no_wrap = True
    for check in checkup.checks:
        found = Text(clean(check.found))
        if check.remedy:
            found.append(f"\n-> {clean(check.remedy)}", "bold")
        status = Text(f"{SIGNS[check.status]} {check.status}", _STYLES.get(check.status, ""))
        shown.add_row(status, clean(check.name), found)
    screen.print(shown)
