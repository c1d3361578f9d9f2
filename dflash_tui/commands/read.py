"""`read`: a text file of a node at a line: highlighted and numbered on a terminal, the bytes as they are when piped."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.syntax import Syntax

from dflash_tui.commands.nodes import Node, connected, find_job, one_node, path_on
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import TerminalCleaner, console, note, print_json
from dflash_tui.config import LOCAL, Settings
from dflash_tui.fleet.format import size
from dflash_tui.fleet.source import SourceText, lines_of, place_of

HELP = "a text file of a node, at a line: highlighted on a terminal, as it is when piped"
_ANSWER_S = 600.0  # the link's own limits are shorter and know more
_CONTEXT = 10
_CHUNK = 64 * 1024
_MOST = 2 << 20  # bytes that are shown where not all of the file was asked for
_JSON_LIMIT = 16 << 20
# More, or longer lines, cost seconds of highlighting.
_HIGHLIGHT_LIMIT, _HIGHLIGHT_LINE = 512 * 1024, 5000


@dataclass(frozen=True, slots=True)
class Wanted:
    """Lines [first, last] of a file, `last` None for all that follow; `marked` is the one that was named."""

    first: int
    last: int | None
    marked: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE[:LINE]", help="a file on the node; with a line those around it, else the first 2 MiB"
    )
    parser.add_argument(
        "--lines", metavar="A-B", default="", help="these lines; A- and -B are open at one end, A is one line"
    )
    parser.add_argument("--context", type=int, metavar="N", help=f"lines before and after LINE (default: {_CONTEXT})")
    parser.add_argument("--all", action="store_true", help="the whole file, however long it is")
    parser.add_argument(
        "--job",
        metavar="JOB",
        help="the job whose traceback names a relative FILE: it is looked for where that job ran",
    )


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    if args.job is not None:
        with connected(settings) as nodes:
            node, job = find_job(nodes, args.job)
            return _read(args, node, args.file, job.id)
    with one_node(settings) as node:
        return _read(args, node, args.file, None)


def _read(args: argparse.Namespace, node: Node, text: str, job: str | None) -> Exit:
    path, line = place_of(text)
    if node.host == LOCAL and line is not None and Path(os.path.expanduser(text)).is_file():
        path, line = text, None  # a file whose very name ends like that
    if job is None and not path.startswith(("~", "<")):
        path = path_on(node.host, path)
    wanted = wanted_lines(line, args.lines, args.context, whole=args.all)
    if args.all and not args.json:
        return _copy(node, path, job)
    most = _JSON_LIMIT if args.all else _MOST
    # Asked for by its own line, so that a file that has no such line says so of that one.
    line, before = (wanted.first, 0) if wanted.marked is None else (wanted.marked, _MOST // 2)
    asked = node.link.source(path=path, of_job=job, line=line, before=before, after=most)
    found = node.answer(asked, _ANSWER_S)
    shown = _cut(found, wanted)
    more = found.left_off if len(found.data) == shown.end else 0
    if args.json and args.all and more:
        raise CommandError(
            Exit.BAD_INPUT,
            f"{found.size:,} bytes are too many for one JSON document",
            "take some lines with --lines, or leave out --json",
            node.host,
        )
    if args.json:
        _document(node, found, wanted, shown, more)
    elif sys.stdout.isatty():
        _show(found.path, wanted, shown)
    else:
        sys.stdout.buffer.write(shown.data)
        sys.stdout.buffer.flush()
    if more and not args.json:
        note(f"{node.host}: {size(more)} after this are not shown; --lines and --all show more")
    return Exit.OK


def wanted_lines(line: int | None, lines: str, context: int | None, *, whole: bool) -> Wanted:
    """What the options ask for. Raises CommandError where they say two things."""
    given = [name for name, there in (("LINE", line), ("--lines", lines), ("--all", whole)) if there]
    if len(given) > 1:
        raise CommandError(Exit.BAD_INPUT, f"{' and '.join(given)} name different lines", "give one of them")
    if context is not None and (context < 0 or line is None):
        why = f"--context must be 0 or more, not {context}" if context < 0 else "--context needs a LINE"
        raise CommandError(Exit.BAD_INPUT, why, "write FILE:LINE --context N")
    if line is not None:
        around = _CONTEXT if context is None else context
        return Wanted(max(1, line - around), line + around, line)
    if not lines:
        return Wanted(1, None)
    found = re.fullmatch(r"([0-9]{0,9})(-?)([0-9]{0,9})", lines)
    if found is None or not (found[1] or found[3]) or (found[3] and not found[2]):
        raise CommandError(Exit.BAD_INPUT, f"--lines {lines!r} are no lines", "write A-B, A-, -B or A")
    first = int(found[1] or 1)
    last = int(found[3]) if found[3] else None if found[2] else first
    if first < 1 or (last is not None and last < first):
        raise CommandError(Exit.BAD_INPUT, f"--lines {lines} has no line", "the first is 1, and B is not before A")
    return Wanted(first, last)


@dataclass(frozen=True, slots=True)
class Shown:
    """Whole lines from `first` on. end: where they end in the data that they are of."""

    first: int
    data: bytes
    end: int

    @property
    def last(self) -> int:
        ended = self.data.endswith(b"\n") or not self.data
        return self.first + self.data.count(b"\n") - (1 if ended else 0)


def _cut(found: SourceText, wanted: Wanted) -> Shown:
    """The lines that are wanted, of those that there are."""
    skipped = max(0, wanted.first - found.first_line)
    data = found.data.split(b"\n", skipped)[-1] if skipped else found.data
    first = found.first_line + skipped
    if wanted.last is not None:
        count = wanted.last - first + 1
        lines = data.split(b"\n", count)
        if len(lines) > count:
            rest = len(lines[-1])
            return Shown(first, data[: len(data) - rest], len(found.data) - rest)
    return Shown(first, data, len(found.data))


def _show(path: str, wanted: Wanted, shown: Shown) -> None:
    lines = lines_of(shown.data)
    code = "\n".join(lines)
    plain = len(code) > _HIGHLIGHT_LIMIT or max(map(len, lines), default=0) > _HIGHLIGHT_LINE
    console().print(
        Syntax(
            code,
            "text" if plain else Syntax.guess_lexer(path),
            theme="ansi_dark",
            line_numbers=True,
            start_line=shown.first,
            highlight_lines=set() if wanted.marked is None else {wanted.marked},
            word_wrap=True,
            background_color="default",
        )
    )


def _document(node: Node, found: SourceText, wanted: Wanted, shown: Shown, more: int) -> None:
    print_json(
        {
            "host": node.host,
            "file": found.path,
            "size": found.size,
            "line": wanted.marked,
            "first_line": shown.first,
            "last_line": shown.last,
            "bytes_left_off": more,
            "text": shown.data.decode("utf-8", "replace"),
        }
    )


def _copy(node: Node, path: str, job: str | None) -> Exit:
    """The whole file, piece by piece."""
    found = node.answer(node.link.source(path=path, of_job=job, before=0, after=_CHUNK), _ANSWER_S)
    terminal = sys.stdout.isatty()
    cleaner = TerminalCleaner()
    for data in _pieces(node, found):
        if terminal:
            sys.stdout.write(cleaner.feed(data))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(data)
    if terminal:
        sys.stdout.write(cleaner.feed(b"", True))
    sys.stdout.flush()
    return Exit.OK


def _pieces(node: Node, found: SourceText) -> Iterator[bytes]:
    """Up to the size that the file had at first. Raises CommandError where it became shorter, or another."""
    yield found.data
    offset, gap = found.end, found.gap_bytes
    while offset < found.size:
        position, data = node.answer(node.link.read(path=found.path, offset=offset, length=_CHUNK))
        if (position.dev, position.ino) != (found.dev, found.ino) or not (data or position.gap):
            raise CommandError(
                Exit.FAILED, f"{found.path} was replaced or cut short while it was read", "read it again", node.host
            )
        gap += position.gap
        yield data
        offset = position.offset + len(data)
    if gap:
        note(f"{node.host}: {gap:,} bytes of the file are a hole, and left out")
