"""`logs`: a job's log or events; `-f` follows it over lost links, with no byte lost or twice."""

from __future__ import annotations

import argparse
import queue
import sys
import time
from collections.abc import Callable, Iterator

from dflash_tui.commands.nodes import Node, connected, find_job
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import TerminalCleaner, note, print_json
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job, JobsArrived, LinkChanged, LinkState, LogArrived

HELP = "print a job's log; -f follows it"
_CHUNK = 64 * 1024
_JSON_LIMIT = 16 * 1024 * 1024  # a JSON document is built in memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="id of the job, or the beginning of it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument("-n", "--lines", type=int, default=None, metavar="N", help="only the last N lines")
    parser.add_argument("--events", action="store_true", help="its events, one JSON object a line, in place of its log")
    parser.add_argument("--raw", action="store_true", help="bytes as they are, even on a terminal")


def run(args: argparse.Namespace, settings: Settings) -> Exit:
    if args.json and args.follow:
        raise CommandError(
            Exit.BAD_INPUT,
            "--json prints one document and cannot follow",
            "use `logs -f --events`, which prints JSON lines",
        )
    if args.lines is not None and args.lines < 0:
        raise CommandError(
            Exit.BAD_INPUT, f"--lines must be 0 or more, not {args.lines}", "leave it out for the whole log"
        )
    file = "events" if args.events else "log"
    with connected(settings) as nodes:
        for node in nodes:
            if node.failure is not None and len(nodes) > 1:
                note(f"warning: {node.failure}")
        node, job = find_job(nodes, args.job)
        size, start = _where(node, job, file, args.lines)
        if args.json:
            return _document(node, job, file, start, size)
        write = _writer(raw=args.raw or not sys.stdout.isatty())
        end = _follow(node, job, file, start, write) if args.follow else _copy(node, job, file, start, size, write)
        write(b"", True)
        return end


def _where(node: Node, job: Job, file: str, lines: int | None) -> tuple[int, int]:
    """The size of the file and the offset of the first byte wanted."""
    try:
        position, _ = node.answer(node.link.read(job=job.id, file=file, offset=0, length=0))
    except CommandError as error:
        if error.code is Exit.NOT_FOUND:  # a job that has not written anything yet
            return 0, 0
        raise
    if lines is None:
        return position.size, 0
    start, seen = position.size, 0
    while start > 0:
        step = min(_CHUNK, start)
        start -= step
        for begin, data in reversed(list(_pieces(node, job, file, start, start + step))):
            end = len(data)
            if begin + end == position.size and data.endswith(b"\n"):
                end -= 1  # the newline that ends the last line begins no line
            while (found := data.rfind(b"\n", 0, end)) >= 0:
                seen += 1
                if seen >= lines:
                    return position.size, begin + found + 1 if lines else position.size
                end = found
    return position.size, 0 if lines else position.size


def _copy(node: Node, job: Job, file: str, offset: int, size: int, write: Callable[[bytes, bool], None]) -> Exit:
    gap = 0
    for start, data in _pieces(node, job, file, offset, size):
        gap += start - offset
        offset = start + len(data)
        if data and gap:
            _tell_of_gap(node, gap)
            gap = 0
        write(data, False)
    if gap:
        _tell_of_gap(node, gap)
    return Exit.OK


def _pieces(node: Node, job: Job, file: str, offset: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of what is there between two offsets; holes are passed over."""
    while offset < stop:
        asked = node.link.read(job=job.id, file=file, offset=offset, length=min(_CHUNK, stop - offset))
        position, data = node.answer(asked)
        if not data and not position.gap:
            return
        yield position.offset, data
        offset = position.offset + len(data)


def _tell_of_gap(node: Node, gap: int) -> None:
    note(f"{node.host}: {gap:,} bytes of the log were given back to the disk")


def _follow(node: Node, job: Job, file: str, offset: int, write: Callable[[bytes, bool], None]) -> Exit:
    """Until the job has ended and every byte of the file is written."""
    tail = node.link.follow(job=job.id, file=file, offset=offset)
    size: int | None = None  # of the file, once it cannot grow any more
    away = False
    try:
        while size is None or offset < size:
            try:
                fact = node.facts.get(timeout=0.5)
            except queue.Empty:
                fact = None
            if isinstance(fact, LogArrived) and fact.tail == tail.id:
                if fact.error and (offset or job.state.ended):
                    remedy = "see whether the job's folder is still there"
                    raise CommandError(Exit.FAILED, fact.error, remedy, node.host)
                if fact.error:  # a job that has not written anything yet
                    time.sleep(0.5)
                    tail = node.link.follow(job=job.id, file=file, offset=offset)
                    continue
                if fact.gap_bytes:
                    _tell_of_gap(node, fact.gap_bytes)
                if fact.reset:
                    note(f"{node.host}: the file was {fact.reset}")
                    size = None
                write(fact.data, False)
                offset = fact.offset + len(fact.data)
                tail.ack(len(fact.data))
            elif isinstance(fact, LinkChanged):
                if fact.state is LinkState.REFUSED:
                    raise CommandError(Exit.UNREACHABLE, fact.detail, fact.remedy, node.host)
                if fact.state in (LinkState.LOST, LinkState.RETRYING) and not away:
                    note(f"{node.host}: the link is lost ({fact.detail}); trying again")
                    away = True
                elif fact.state is LinkState.LIVE:
                    away = False
            elif isinstance(fact, JobsArrived):
                job = next((found for found in fact.jobs if found.id == job.id), job)
            if job.state.ended and size is None and not away:
                size = _final_size(node, job, file)
    finally:
        tail.close()
    return Exit.OK


def _final_size(node: Node, job: Job, file: str) -> int | None:
    try:
        return _where(node, job, file, None)[0]
    except CommandError as error:
        if error.code is Exit.UNREACHABLE:  # the link went meanwhile: asked again when it is back
            return None
        raise


def _writer(*, raw: bool) -> Callable[[bytes, bool], None]:
    cleaner = TerminalCleaner()

    def write_raw(data: bytes, final: bool) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def write_clean(data: bytes, final: bool) -> None:
        sys.stdout.write(cleaner.feed(data, final))
        sys.stdout.flush()

    return write_raw if raw else write_clean


def _document(node: Node, job: Job, file: str, start: int, size: int) -> Exit:
    if size - start > _JSON_LIMIT:
        remedy = "take the last lines with -n, or leave out --json"
        raise CommandError(
            Exit.BAD_INPUT, f"{size - start:,} bytes are too many for one JSON document", remedy, node.host
        )
    data = bytearray()
    _copy(node, job, file, start, size, lambda more, final: data.extend(more))
    print_json(
        {
            "host": node.host,
            "job": job.id,
            "file": file,
            "offset": start,
            "size": size,
            "text": data.decode("utf-8", "replace"),
        }
    )
    return Exit.OK
