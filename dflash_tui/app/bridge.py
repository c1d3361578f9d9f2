"""What the screens need of a link, and the one queue between the links' threads and the screens."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from dflash_tui.fleet.facts import Checkup, Diagnosis, Fact, Job
from dflash_tui.fleet.source import SourceText
from dflash_tui.fleet.started import StartedWith
from dflash_tui.node.protocol import Launch


class NodeLinkLike(Protocol):
    """A link to one node, as `dflash_tui.link.NodeLink` is one. Its calls do not block."""

    emit: Callable[[Fact], None]

    @property
    def host(self) -> str: ...

    def start(self) -> None: ...

    def close(self, wait: bool = True) -> None: ...

    def retry(self) -> None:
        """Connects now, instead of after the wait or never."""

    def launch(self, job_id: str, launch: Launch, *, secrets: Mapping[str, str] = ...) -> Future[Job]: ...

    def stop(self, job_id: str, force: bool = False) -> Future[Mapping[str, Any]]: ...

    def plan(
        self,
        verb: str,
        spec: Mapping[str, Any],
        *,
        python: str = "",
        gpus: tuple[str, ...] = (),
        share: bool = False,
        timeout: float = 120,
        env: Mapping[str, str] = ...,
        secrets: Mapping[str, str] = ...,
    ) -> Future[Mapping[str, Any]]: ...

    def doctor(self, *, write: bool = True) -> Future[Checkup]: ...

    def diagnose(self, *, job: str | None = None, path: str | None = None) -> Future[Diagnosis]: ...

    def source(self, *, path: str | None = None, of_job: str | None = None, line: int = 1) -> Future[SourceText]: ...

    def command(self, job: str) -> Future[StartedWith]: ...

    def read(
        self,
        *,
        job: str | None = None,
        file: str = "log",
        path: str | None = None,
        offset: int = 0,
        length: int = 65536,
    ) -> Future[tuple[Any, bytes]]: ...

    def follow(
        self, *, job: str | None = None, file: str = "log", path: str | None = None, offset: int = -65536
    ) -> Any: ...


class Inbox:
    """Facts from any thread, taken out on the screens' own thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Fact] = queue.SimpleQueue()

    def put(self, fact: Fact) -> None:
        self._queue.put(fact)

    def drain(self, most: int = 5000) -> Iterator[Fact]:
        """What has arrived, at most `most` facts, so that a flood cannot keep the screens from drawing."""
        for _ in range(most):
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return
