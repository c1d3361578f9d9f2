"""The requests `source` and `command`: a file around one of its lines, in as many pieces as it takes, and how a job was started."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dflash_tui.fleet.source import SourceText
from dflash_tui.fleet.started import StartedServer, StartedWith
from dflash_tui.link.errors import LinkError
from dflash_tui.link.requests import FilePosition, Reply, position_of, then
from dflash_tui.link.wire import clean, items, mapping, number, whole
from dflash_tui.node import protocol

AROUND = 1 << 20  # bytes before a line, and as many from it on
_LIMIT_S = 100.0  # longer than the agent's own, for its answer knows more
_AT_ONCE = 8  # pieces that are asked for before the first of them is there
# Control characters but newline and tab, and what turns the direction of text round.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Ask = Callable[..., Future[Reply]]
Read = Callable[..., Future[tuple[FilePosition, bytes]]]


def ask_source(
    request: Ask,
    read: Read,
    *,
    job: str | None,
    file: str,
    path: str | None,
    of_job: str | None,
    line: int,
    before: int,
    after: int,
) -> Future[SourceText]:
    """`request` and `read` are those of the link; errors of the link and refusals end the future."""
    fields: dict[str, Any] = {"line": line, "before": before}
    if job is not None:
        fields |= {"job": job, "file": file}
    else:
        fields |= {"path": path, **({} if of_job is None else {"of_job": of_job})}
    made: Future[SourceText] = Future()
    made.set_running_or_notify_cancel()

    def first(done: Future[Reply]) -> None:
        try:
            _Pieces(read, done.result(), line, after, made).start()
        except Exception as error:
            made.set_exception(error)

    request("source", timeout=_LIMIT_S, **fields).add_done_callback(first)
    return made


class _Pieces:
    """The rest of what is wanted, after the first answer. Its callbacks come one at a time, from the link's thread."""

    def __init__(self, read: Read, first: Reply, line: int, after: int, made: Future[SourceText]) -> None:
        self._read = read
        self._made = made
        self._header = first.header
        self._where = position_of(first)
        self._line = line
        self._path = self._header.get("path")
        if not isinstance(self._path, str):
            raise LinkError(protocol.INTERNAL, f"the agent answered source with no path: {dict(first.header)!r:.200}")
        self._gap = self._where.gap
        at = whole(self._header.get("line_offset")) or 0
        begin, stop = self._where.offset + len(first.payload), min(self._where.size, at + after)
        self._data: dict[int, bytes] = {self._where.offset: first.payload[: max(0, stop - self._where.offset)]}
        step = protocol.MAX_PAYLOAD
        self._wanted = [(offset, min(offset + step, stop)) for offset in range(begin, stop, step)]
        self._open = 0

    def start(self) -> None:
        while self._wanted and self._open < _AT_ONCE:
            self._ask(*self._wanted.pop(0))
        if not self._open and not self._made.done():
            self._finish()

    def _ask(self, offset: int, stop: int) -> None:
        self._open += 1

        def came(done: Future[tuple[FilePosition, bytes]]) -> None:
            self._open -= 1
            if self._made.done():
                return
            try:
                self._take(offset, stop, *done.result())
            except Exception as error:
                self._made.set_exception(error)
                return
            self.start()

        self._read(path=self._path, offset=offset, length=stop - offset).add_done_callback(came)

    def _take(self, offset: int, stop: int, position: FilePosition, data: bytes) -> None:
        if (position.dev, position.ino) != (self._where.dev, self._where.ino):
            raise LinkError("changed", f"{clean(self._path)} became another file while it was read", "open it again")
        self._gap += position.gap
        self._data[position.offset] = data
        end = position.offset + len(data)
        if end < stop and end > offset:  # a hole, which one answer does not read over
            self._wanted.insert(0, (end, stop))

    def _finish(self) -> None:
        data = b"".join(self._data[offset] for offset in sorted(self._data))
        self._made.set_result(
            SourceText(
                path=str(self._path),
                line=self._line,
                first_line=whole(self._header.get("first_line")) or 1,
                offset=self._where.offset - self._where.gap,
                size=self._where.size,
                data=data,
                gap_bytes=self._gap,
                dev=self._where.dev,
                ino=self._where.ino,
            )
        )


def ask_command(request: Ask, job: str) -> Future[StartedWith]:
    """How a job was started; `argv` is empty where that was not written down."""
    return then(request("command", job=job), lambda reply: started_with(reply.header))


def started_with(header: Mapping[str, Any]) -> StartedWith:
    """The node's answer; text is cleaned of what could steer a terminal."""
    command = mapping(header.get("command"))
    return StartedWith(
        argv=_texts(command.get("argv")),
        cwd=_text(command.get("cwd")),
        time=number(command.get("time")),
        environment=_variables(command.get("environment")),
        hidden=_texts(command.get("hidden")),
        added=_texts(command.get("added")),
        secrets=_texts(command.get("secrets")),
        host=_text(command.get("host")),
        system=_text(command.get("system")),
        driver=clean(command.get("driver")),
        servers=tuple(
            StartedServer(
                worker=whole(fields.get("worker")),
                pid=whole(fields.get("pid")),
                argv=_texts(fields.get("command")),
                cwd=_text(fields.get("cwd")),
                environment=_variables(fields.get("environment")),
            )
            for fields in map(mapping, items(header.get("servers")))
        ),
        versions=_variables(header.get("versions")),
    )


def _text(value: object) -> str:
    return _UNSAFE.sub("", value) if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(item) for item in items(value))


def _variables(value: object) -> dict[str, str | None]:
    return {_text(name): _text(item) if isinstance(item, str) else None for name, item in mapping(value).items()}
