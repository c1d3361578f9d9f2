"""The request `doctor`: first the clock by a few pings, then the node's own checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dflash_tui.fleet.checkup import clock_check, in_order
from dflash_tui.fleet.facts import Check, CheckStatus, Checkup
from dflash_tui.fleet.troubles import Severity, troubles
from dflash_tui.link import gpu_facts
from dflash_tui.link.errors import LinkError
from dflash_tui.link.requests import Reply
from dflash_tui.link.wire import clean, items, mapping
from dflash_tui.node import protocol

LIMIT_S = 50.0  # of the slowest check
_AGENT_MORE_S = 60.0  # the agent's own limit is shorter, for its answer knows more
_PINGS = 5
_STATUSES = {Severity.ALARM: CheckStatus.PROBLEM, Severity.WARNING: CheckStatus.WARNING}  # notes are for the screens

Request = Callable[..., "Future[Reply]"]


class _Clock:
    """Pings one after the other; the fastest round trip tells the offset best."""

    def __init__(self) -> None:
        self.best: tuple[float, float] | None = None  # round trip, offset
        self._sent = 0.0, 0.0

    def send(self, request: Request) -> Future[Reply]:
        self._sent = time.time(), time.monotonic()
        return request("ping")

    def take(self, reply: Reply) -> None:
        round_trip = time.monotonic() - self._sent[1]
        there = reply.header.get("time")
        if isinstance(there, (int, float)) and (self.best is None or round_trip < self.best[0]):
            self.best = round_trip, there - (self._sent[0] + round_trip / 2)


def ask(
    request: Request, host: str, *, python: str, paths: tuple[str, ...], write: bool, limit_s: float
) -> Future[Checkup]:
    """The checkup; errors of the link and refusals end the future. `request` is that of the link."""
    made: Future[Checkup] = Future()
    made.set_running_or_notify_cancel()
    clock = _Clock()

    def guarded(step: Callable[[Reply], None]) -> Callable[[Future[Reply]], None]:
        def call(done: Future[Reply]) -> None:
            try:
                step(done.result())
            except Exception as error:
                made.set_exception(error)

        return call

    def ponged(reply: Reply, left: int) -> None:
        clock.take(reply)
        if left:
            ping(left)
            return
        fields = {"python": python, "paths": list(paths), "write": write, "limit_s": limit_s, "host": host}
        asked = request("doctor", timeout=limit_s + _AGENT_MORE_S, **fields)
        asked.add_done_callback(guarded(lambda answer: made.set_result(checkup(host, answer.header, clock.best))))

    def ping(left: int) -> None:
        clock.send(request).add_done_callback(guarded(lambda reply: ponged(reply, left - 1)))

    ping(_PINGS)
    return made


def checkup(host: str, header: Mapping[str, Any], clock: tuple[float, float] | None) -> Checkup:
    """The agent's answer as facts; `clock`: the round trip and the offset in seconds. Raises LinkError."""
    rows = header.get("checks")
    if not isinstance(rows, list):
        raise LinkError(protocol.INTERNAL, f"the agent answered doctor with no checks: {dict(header)!r:.200}")
    checks = [check for row in rows if (check := _check(row)) is not None]
    checks += _cards(header.get("gpus"), time.time() + (clock[1] if clock is not None else 0.0))
    if clock is None:
        return Checkup(host, in_order(checks))
    round_trip, offset = clock
    ntp = header.get("ntp")
    checks.append(clock_check(offset, round_trip, ntp if isinstance(ntp, bool) else None))
    return Checkup(host, in_order(checks), offset, round_trip)


def _cards(rows: object, now: float) -> list[Check]:
    """What ails single cards, as the screens tell it; `now` by the node's clock."""
    found = []
    for place, row in enumerate(items(rows)):
        card = gpu_facts.gpu(place, mapping(row))
        for trouble in troubles(card, now):
            status = _STATUSES.get(trouble.severity)
            if status is not None:
                found.append(Check(f"GPU {card.index}", status, trouble.line, trouble.remedy))
    return found


def _check(row: object) -> Check | None:
    fields: Mapping[str, Any] = row if isinstance(row, dict) else {}
    name, found = clean(fields.get("name")), clean(fields.get("found"))
    if not name:
        return None
    try:
        status = CheckStatus(fields.get("status"))  # type: ignore[arg-type]  # whatever the node sent
    except ValueError:
        status = CheckStatus.UNKNOWN
    return Check(name, status, found or "", clean(fields.get("remedy")) or "")
