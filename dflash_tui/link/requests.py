"""Requests that wait for their answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from dflash_tui.fleet.facts import Job
from dflash_tui.link import facts
from dflash_tui.link.errors import LinkError, RequestRefused
from dflash_tui.link.facts import clean
from dflash_tui.node import protocol

_T = TypeVar("_T")
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of the agent: its header without `re` and `ok`, and the bytes after it."""

    header: Mapping[str, Any]
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class FilePosition:
    """dev, ino: which file it was. offset: of the first byte that was read. size: of the whole file, bytes.

    gap: bytes that were asked for and skipped before `offset`: a hole, given back to the disk.
    """

    dev: int
    ino: int
    offset: int
    size: int
    gap: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    future: Future[Reply]
    op: str
    timeout: float
    deadline: float


class Requests:
    """The table of what was asked and is not answered yet. Every method may be called from any thread."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}

    def new_id(self) -> int:
        return next(self._ids)

    def open(self, op: str, timeout: float, fields: Mapping[str, Any]) -> tuple[bytes, Future[Reply]]:
        """The frame to send and the future of its answer. Raises TypeError where a field is no JSON."""
        number = self.new_id()
        frame = protocol.encode({**fields, "op": op, "id": number})
        if len(frame) > protocol.MAX_HEADER:
            raise LinkError("bad-request", f"the request {op} is longer than {protocol.MAX_HEADER} bytes")
        future: Future[Reply] = Future()
        with self._lock:
            self._waiting[number] = _Waiting(future, op, timeout, time.monotonic() + timeout)
        return frame, future

    def answer(self, header: Mapping[str, Any], payload: bytes) -> None:
        """Gives an answer to who waits for it; one that nobody waits for any more is dropped."""
        number = header.get("re")
        with self._lock:
            waiting = self._waiting.pop(number, None) if isinstance(number, int) else None
        if waiting is None or not waiting.future.set_running_or_notify_cancel():
            return
        if header.get("ok") is True:
            rest = {name: value for name, value in header.items() if name not in ("re", "ok", "n")}
            waiting.future.set_result(Reply(rest, payload))
        else:
            waiting.future.set_exception(refusal(header, f"{self._host} refused {waiting.op}"))

    def fail_all(self, error: LinkError) -> None:
        with self._lock:
            failed = list(self._waiting.values())
            self._waiting.clear()
        for waiting in failed:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(error)

    def expire(self, now: float) -> None:
        """Ends what was not answered in its time; `now` by the monotonic clock."""
        with self._lock:
            late = {number: waiting for number, waiting in self._waiting.items() if waiting.deadline <= now}
            for number in late:
                del self._waiting[number]
        for waiting in late.values():
            if waiting.future.set_running_or_notify_cancel():
                message = f"{self._host} did not answer {waiting.op} within {waiting.timeout:g} s"
                waiting.future.set_exception(LinkError(protocol.TIMED_OUT, message, "try again, or look at the node"))


def refusal(header: Mapping[str, Any], default: str) -> RequestRefused:
    """The error that an answer carries."""
    error = header.get("error")
    fields: Mapping[str, Any] = error if isinstance(error, dict) else {}
    return RequestRefused(
        clean(fields.get("code")) or protocol.INTERNAL,
        clean(fields.get("message")) or default,
        clean(fields.get("remedy")) or "",
    )


def then(asked: Future[Reply], make: Callable[[Reply], _T]) -> Future[_T]:
    """A future of what `make` makes of the reply."""
    made: Future[_T] = Future()

    def pass_on(done: Future[Reply]) -> None:
        if not made.set_running_or_notify_cancel():
            return
        try:
            made.set_result(make(done.result()))
        except Exception as error:
            made.set_exception(error)

    asked.add_done_callback(pass_on)
    return made


def job_of(reply: Reply) -> Job:
    found = facts.job(reply.header.get("job"))
    if found is None:
        raise LinkError(protocol.INTERNAL, f"the agent answered with no job record: {dict(reply.header)!r:.200}")
    return found


def position_of(reply: Reply) -> FilePosition:
    names = ("dev", "ino", "offset", "size", "gap")
    return FilePosition(*(facts.whole(reply.header.get(name)) or 0 for name in names))


def beside(**fields: Mapping[str, str]) -> dict[str, Any]:
    """Those fields of a request that hold something."""
    return {name: dict(value) for name, value in fields.items() if value}
