"""A real sshd, links to it, and the facts that they tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from dflash_tui.fleet.facts import Fact, LinkChanged, LinkState, LogArrived
from dflash_tui.link import LinkOptions, NodeLink, parse_target
from tests.sshd import Sshd

LIMIT_S = 120.0  # how long anything may take before a test gives up; nothing waits this long by design
T = TypeVar("T")


class Facts:
    """Every fact that was emitted, in order, and a way to wait for one."""

    def __init__(self) -> None:
        self.all: list[Fact] = []
        self._changed = threading.Condition()

    def __call__(self, fact: Fact) -> None:
        with self._changed:
            self.all.append(fact)
            self._changed.notify_all()

    def wait(self, kind: type[T], matches: Callable[[T], bool] = lambda _: True, *, start: int = 0) -> T:
        """The first fact of a kind from `start` on that matches."""

        def found() -> T | None:
            return next((fact for fact in self.all[start:] if isinstance(fact, kind) and matches(fact)), None)

        with self._changed:
            fact = self._changed.wait_for(found, LIMIT_S)
        assert fact is not None, f"no such {kind.__name__} in {self.all[-20:]}"
        return fact

    def wait_state(self, state: LinkState, *, start: int = 0) -> LinkChanged:
        return self.wait(LinkChanged, lambda fact: fact.state is state, start=start)

    def states(self, start: int = 0) -> list[LinkState]:
        return [fact.state for fact in self.all[start:] if isinstance(fact, LinkChanged)]

    def bytes_of(self, tail: int) -> bytes:
        return b"".join(fact.data for fact in self.all if isinstance(fact, LogArrived) and fact.tail == tail)


def wait_until(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


Opener = Callable[..., tuple[NodeLink, Facts]]


@pytest.fixture
def open_link() -> Iterator[Opener]:
    """Starts links; closes them in the end, and their threads must be gone then."""
    opened: list[NodeLink] = []

    def open_one(name: str, options: LinkOptions | None = None) -> tuple[NodeLink, Facts]:
        facts = Facts()
        link = NodeLink(parse_target(name), facts, options)
        opened.append(link)
        link.start()
        return link, facts

    yield open_one
    for link in opened:
        link.close(wait=False)
    for link in opened:
        link.close()
        assert not link._thread.is_alive()


@pytest.fixture
def make_sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    made: list[Sshd] = []

    def make(**options: object) -> Sshd:
        made.append(Sshd(tmp_path / f"server{len(made)}", **options))
        return made[-1].start()

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def sshd(make_sshd: Callable[..., Sshd]) -> Sshd:
    return make_sshd()


@pytest.fixture
def options(sshd: Sshd) -> LinkOptions:
    return LinkOptions(ssh_config=sshd.ssh_config)


def executable(path: Path, text: str) -> str:
    """A script at `path`; returns its name."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)
