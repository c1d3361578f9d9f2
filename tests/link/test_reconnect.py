"""A link that is cut, frozen or refused: what is told of it, what waits, and how it goes on."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from dflash_tui.fleet.facts import BeatArrived, JobsArrived, LinkState, LogArrived
from dflash_tui.link import LinkError, LinkOptions, NodeLink, Tail
from tests.link.conftest import LIMIT_S, Facts, Opener, wait_until
from tests.sshd import Sshd


class Acker:
    """Takes what a tail brings and says so, as the console does."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._seen = 0
        self.digest = hashlib.sha256()
        self.size = 0
        self.next_offset = 0

    def take(self, tail: Tail) -> int:
        """Takes what is new; how many bytes there are by now."""
        while self._seen < len(self._facts.all):
            fact = self._facts.all[self._seen]
            self._seen += 1
            if isinstance(fact, LogArrived) and fact.tail == tail.id:
                assert not fact.error and not fact.reset and not fact.gap_bytes
                assert fact.offset == self.next_offset
                self.next_offset += len(fact.data)
                self.digest.update(fact.data)
                self.size += len(fact.data)
                tail.ack(len(fact.data))
        return self.size


def test_a_tail_of_a_growing_file_loses_no_byte_and_brings_none_twice_over_abrupt_disconnects(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    path, total = tmp_path / "growing.log", 6 << 20
    path.touch()
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    tail = link.follow(path=str(path), offset=0)
    acker = Acker(facts)
    pace = threading.Event()

    def grow() -> None:
        rng = random.Random(7)
        with path.open("ab", buffering=0) as file:
            while file.tell() < total:
                file.write(rng.randbytes(rng.randrange(1, 40_000)))
                pace.wait(0.005)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for cut in (1, 2, 3):
            start = len(facts.all)
            wait_until(lambda: acker.take(tail) > cut * total // 8, "some of the file came")  # noqa: B023 - called in this turn of the loop
            assert sshd.drop_connections() > 0
            facts.wait_state(LinkState.LIVE, start=start)
    finally:
        pace.set()
        writer.join()
    size = path.stat().st_size
    wait_until(lambda: acker.take(tail) >= size, "all of the file came")
    assert acker.digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts.states().count(LinkState.LIVE) >= 4


def test_a_tail_waits_for_the_console_to_take_what_came(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    path = tmp_path / "big"
    path.write_bytes(os.urandom(3 << 20))
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    tail = link.follow(path=str(path), offset=0)
    wait_until(lambda: len(facts.bytes_of(tail.id)) >= 512 * 1024, "the window is full")
    start = len(facts.all)
    facts.wait(BeatArrived, start=start)
    facts.wait(BeatArrived, start=len(facts.all))
    assert len(facts.bytes_of(tail.id)) == 512 * 1024
    acker = Acker(facts)
    wait_until(lambda: acker.take(tail) == 3 << 20, "all came")
    assert acker.digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    tail.close()


def test_a_file_that_was_truncated_or_replaced_meanwhile_is_told(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old " * 100)
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    tail = link.follow(path=str(path), offset=0)
    facts.wait(LogArrived, lambda fact: len(fact.data) == 400)
    start = len(facts.all)
    sshd.stop()
    facts.wait_state(LinkState.RETRYING, start=start)
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"new")
    sshd.start()
    facts.wait(LogArrived, lambda fact: fact.reset == "rotated", start=start)
    told = facts.wait(LogArrived, lambda fact: fact.data == b"new", start=start)
    assert told.offset == 0 and told.tail == tail.id


def test_a_file_that_is_not_there_ends_its_tail_and_nothing_else(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    tail = link.follow(path=str(tmp_path / "nowhere"))
    assert "nowhere" in facts.wait(LogArrived, lambda fact: fact.tail == tail.id).error
    assert link.request("ping").result(LIMIT_S).header["time"] > 0


@pytest.mark.parametrize("server", [False, True], ids=["agent", "sshd"])
def test_a_frozen_far_end_becomes_stale_then_lost_and_comes_back(
    sshd: Sshd, options: LinkOptions, open_link: Opener, server: bool
) -> None:
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    start = len(facts.all)
    assert sshd.freeze(server=server)
    asked = link.request("ping", timeout=LIMIT_S)
    facts.wait_state(LinkState.RETRYING, start=start)
    assert facts.states(start)[:3] == [LinkState.STALE, LinkState.LOST, LinkState.RETRYING]
    with pytest.raises(LinkError) as caught:
        asked.result(LIMIT_S)
    assert caught.value.code == "lost"
    facts.wait_state(LinkState.LIVE, start=start)
    facts.wait(JobsArrived, lambda fact: fact.whole, start=start)
    assert link.request("ping").result(LIMIT_S).header["time"] > 0


def test_a_short_silence_is_stale_and_then_live_again_on_the_same_agent(
    sshd: Sshd, options: LinkOptions, open_link: Opener
) -> None:
    link, facts = open_link("node", options)
    agent = link.wait_live(LIMIT_S).agent_pid
    start = len(facts.all)
    sshd.freeze()
    facts.wait_state(LinkState.STALE, start=start)
    sshd.thaw()
    facts.wait_state(LinkState.LIVE, start=start)
    assert LinkState.LOST not in facts.states(start)
    assert link.wait_live(LIMIT_S).agent_pid == agent


def test_a_server_that_is_down_is_tried_again_until_it_is_back(
    sshd: Sshd, options: LinkOptions, open_link: Opener
) -> None:
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    start = len(facts.all)
    sshd.stop()
    first = facts.wait_state(LinkState.RETRYING, start=start)
    assert first.retry_in_s is not None and 0 < first.retry_in_s <= 30
    with pytest.raises(LinkError) as caught:
        link.request("ping").result(LIMIT_S)
    assert caught.value.code == "not-connected"
    refused = facts.wait_state(LinkState.RETRYING, start=facts.all.index(first) + 1)
    assert "refuses" in refused.detail
    sshd.start()
    facts.wait_state(LinkState.LIVE, start=start)


def test_one_node_that_is_down_leaves_the_others_alone(make_sshd: Callable[..., Sshd], open_link: Opener) -> None:
    servers = [make_sshd() for _ in range(2)]
    links = [open_link("node", LinkOptions(ssh_config=server.ssh_config)) for server in servers]
    for link, _ in links:
        link.wait_live(LIMIT_S)
    start = len(links[1][1].all)
    servers[0].stop()
    links[0][1].wait_state(LinkState.RETRYING)
    links[1][1].wait(BeatArrived, start=start)
    assert links[1][1].states(start) == []


def test_a_request_that_is_not_answered_in_time_ends_and_the_link_stays(
    sshd: Sshd, options: LinkOptions, open_link: Opener
) -> None:
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    start = len(facts.all)
    sshd.freeze()
    with pytest.raises(LinkError) as caught:
        link.request("ping", timeout=0.5).result(LIMIT_S)
    assert caught.value.code == "timed-out"
    sshd.thaw()
    assert "time" in link.request("ping").result(LIMIT_S).header
    assert LinkState.RETRYING not in facts.states(start)


def test_closing_ends_what_is_still_asked(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, _ = open_link("node", options)
    link.wait_live(LIMIT_S)
    sshd.freeze()
    asked: Future[object] = link.request("ping", timeout=LIMIT_S)
    link.close()
    with pytest.raises(LinkError):
        asked.result(LIMIT_S)
    late = link.request("ping")
    with pytest.raises(LinkError):
        late.result(LIMIT_S)


def test_nothing_stays_open_after_many_connections(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted, not walked
    threads = threading.active_count()
    for _ in range(3):
        start = len(facts.all)
        sshd.drop_connections()
        facts.wait_state(LinkState.LIVE, start=start)
    wait_until(lambda: threading.active_count() <= threads, "the old threads are gone")
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # noqa: PTH208 - counted, not walked
    closing: NodeLink = link
    closing.close()
