"""Files that are followed: bytes in order, none lost and none twice, over as many connections as it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_tui.fleet.facts import LogArrived
from dflash_tui.link.facts import clean, whole
from dflash_tui.link.requests import refusal
from dflash_tui.node import protocol

WINDOW = 512 * 1024  # bytes that may be on their way and not yet acknowledged
_CREDIT_STEP = 64 * 1024
# An agent that opens a file on a mount that hangs falls silent with it: nothing else of the node would ever be seen.
_SILENCED_MOST = 3


class Tail:
    """One file that is followed. `ack` and `close` may be called from any thread; the rest is the link's.

    What arrives is emitted as `LogArrived` with this `id`. After `WINDOW` bytes nothing more comes until `ack` says how
    many were taken.
    """

    def __init__(self, number: int, what: Mapping[str, Any], offset: int, post: Callable[[Callable[[], None]], None]):
        self.id = number
        self._what = what
        self._post = post
        self._tails: Tails | None = None
        self.offset = offset  # of the next byte; negative: from the end, not known yet
        self.dev: int | None = None
        self.ino: int | None = None
        self.wire_id: int | None = None  # of the tail request on this connection
        self.answered = False  # that request was
        self.silenced = 0  # how many connections in a row ended while the agent was busy with this request
        self.unacked = 0
        self.owed = 0  # credit to give, held back until it is worth a frame

    def ack(self, nbytes: int) -> None:
        """`nbytes` of what arrived were taken; as many more may come."""
        self._post(lambda: self._tails.acked(self, nbytes) if self._tails else None)

    def close(self) -> None:
        """Nothing more is emitted soon after this."""
        self._post(lambda: self._tails.remove(self) if self._tails else None)

    def request(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"op": "tail", "id": self.wire_id, **self._what, "offset": self.offset}
        if self.dev and self.ino:  # 0 means that there was no file yet
            fields |= {"dev": self.dev, "ino": self.ino}
        return fields | {"credit": max(0, WINDOW - self.unacked)}


class Tails:
    """All tails of a link; used by the link's thread alone."""

    def __init__(self, host: str, emit: Callable[[LogArrived], None], new_id: Callable[[], int]) -> None:
        self._host = host
        self._emit = emit
        self._new_id = new_id
        self._tails: list[Tail] = []
        self._by_wire: dict[int, Tail] = {}
        self._send: Callable[[dict[str, Any]], None] | None = None

    def connected(self, send: Callable[[dict[str, Any]], None]) -> None:
        """A new agent is there: every tail goes on where it was."""
        self._send = send
        self._by_wire.clear()
        for tail in self._tails:
            self._open(tail)

    def disconnected(self) -> None:
        # The agent answers in order: the first request that it did not answer is the one that it was at.
        at = next((tail for tail in self._by_wire.values() if not tail.answered), None)
        self._send = None
        self._by_wire.clear()
        if at is not None:
            at.silenced += 1
            if at.silenced >= _SILENCED_MOST:
                self._end(
                    at, f"{self._host} fell silent {at.silenced} times when this file was opened: does its mount hang?"
                )

    def add(self, tail: Tail) -> None:
        tail._tails = self
        self._tails.append(tail)
        if self._send:
            self._open(tail)

    def remove(self, tail: Tail) -> None:
        if tail not in self._tails:
            return
        self._tails.remove(tail)
        if self._send and tail.wire_id in self._by_wire:
            del self._by_wire[tail.wire_id]
            self._send({"op": "untail", "id": self._new_id(), "tail": tail.wire_id})

    def acked(self, tail: Tail, nbytes: int) -> None:
        nbytes = min(nbytes, tail.unacked)
        tail.unacked -= nbytes
        tail.owed += nbytes
        if self._send and tail.wire_id in self._by_wire and (tail.owed >= _CREDIT_STEP or not tail.unacked):
            self._send({"op": "credit", "tail": tail.wire_id, "bytes": tail.owed})
            tail.owed = 0

    def answered(self, header: Mapping[str, Any]) -> bool:
        """The answer to a tail request; False where it is none."""
        tail = self._by_wire.get(header["re"])
        if tail is None:
            return False
        tail.answered, tail.silenced = True, 0
        if header.get("ok") is not True:
            self._end(tail, str(refusal(header, f"{self._host} refused to follow the file")))
            return True
        self._place(tail, header)
        return True

    def arrived(self, header: Mapping[str, Any], payload: bytes) -> None:
        """A `tail` push."""
        wire = whole(header.get("tail"))
        tail = self._by_wire.get(wire) if wire is not None else None
        if tail is None:
            return
        error = clean(header.get("error"))
        if error is not None:
            self._end(tail, error)
            return
        reset = clean(header.get("reset")) or ""
        offset = whole(header.get("offset"))
        self._place(tail, header)
        gap = whole(header.get("gap")) or 0
        if not reset and offset is not None and tail.offset >= 0:
            # The position decides, so that a frame sent twice or a hole that went unsaid cannot corrupt the copy.
            if offset < tail.offset:
                payload = payload[tail.offset - offset :]
                offset, gap = tail.offset, 0
                if not payload:
                    return
            else:
                gap = offset - tail.offset
        start = tail.offset if offset is None else offset
        tail.offset = start + len(payload)
        tail.unacked += len(payload)
        self._emit(LogArrived(self._host, tail.id, start, payload, gap, reset))

    def _open(self, tail: Tail) -> None:
        assert self._send is not None
        tail.wire_id = self._new_id()
        tail.answered = False
        tail.owed = 0
        self._by_wire[tail.wire_id] = tail
        self._send(tail.request())

    def _place(self, tail: Tail, header: Mapping[str, Any]) -> None:
        for name in ("dev", "ino"):
            value = whole(header.get(name))
            if value is not None:
                setattr(tail, name, value)
        offset = whole(header.get("offset"))
        if offset is not None and (tail.offset < 0 or header.get("reset")):
            tail.offset = offset

    def _end(self, tail: Tail, error: str) -> None:
        self._tails.remove(tail)
        if tail.wire_id is not None:
            self._by_wire.pop(tail.wire_id, None)
        self._emit(LogArrived(self._host, tail.id, max(tail.offset, 0), error=error))


def what_file(job: str | None, file: str, path: str | None) -> dict[str, Any]:
    """The fields that name a file. Raises ValueError where both or none of `job` and `path` are given."""
    if (job is None) == (path is None):
        raise ValueError("either a job or a path must be given")
    if path is not None:
        return {"path": path}
    if file not in protocol.JOB_FILES:
        raise ValueError(f"a job has no file {file!r}; it has {', '.join(protocol.JOB_FILES)}")
    return {"job": job, "file": file}
