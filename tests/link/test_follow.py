"""The bookkeeping of followed files, without a node."""

from __future__ import annotations

import itertools
from typing import Any

from dflash_tui.fleet.facts import LogArrived
from dflash_tui.link.follow import Tail, Tails


def test_a_file_that_silences_every_agent_is_given_up_and_the_others_go_on() -> None:
    told: list[LogArrived] = []
    sent: list[dict[str, Any]] = []
    tails = Tails("node", told.append, itertools.count(1).__next__)
    good, hung, behind = (Tail(number, {"path": f"/{number}"}, 0, lambda do: do()) for number in (1, 2, 3))
    for tail in (good, hung, behind):
        tails.add(tail)
    for _ in range(3):
        assert not told
        tails.connected(sent.append)
        assert tails.answered({"re": good.wire_id, "ok": True, "dev": 1, "ino": 1, "offset": 0})
        tails.disconnected()
    assert [(fact.tail, "mount" in fact.error) for fact in told] == [(hung.id, True)]
    sent.clear()
    tails.connected(sent.append)
    assert [frame["path"] for frame in sent] == ["/1", "/3"]


def test_connections_that_end_by_chance_give_up_no_file() -> None:
    told: list[LogArrived] = []
    tails = Tails("node", told.append, itertools.count(1).__next__)
    tail = Tail(1, {"path": "/1"}, 0, lambda do: do())
    tails.add(tail)
    for attempt in range(20):
        tails.connected(lambda _: None)
        if attempt % 3 == 2:
            tails.answered({"re": tail.wire_id, "ok": True, "dev": 1, "ino": 1, "offset": 0})
        tails.disconnected()
    assert not told
