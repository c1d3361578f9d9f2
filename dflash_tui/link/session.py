"""One connection to one node, from the first byte to its end; run by the link's thread."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from dflash_tui.link.bootstrap import Booted, BundleWanted, Preface
from dflash_tui.link.bundle import Bundle
from dflash_tui.link.connection import Connection
from dflash_tui.link.errors import LinkError
from dflash_tui.node import protocol

STALE_AFTER_S = 3.0
LOST_AFTER_S = 10.0
BOOTSTRAP_LIMIT_S = 60.0
_TICK_S = 0.5
_RETRY_SEND_S = 0.02
_READS_A_ROUND = 64


class Session:
    """Feeds frames to `on_frame` until the connection ends, which is always an error unless `closing` says so.

    on_age: called with the seconds since anything was heard, once the agent speaks, at least twice a second.
    before_wait: called before every wait: the place for what other threads want done.
    advice: the remedy where the session ends before the agent speaks.
    """

    def __init__(
        self,
        connection: Connection,
        bundle: Bundle,
        nonce: str,
        *,
        wake_fd: int,
        closing: Callable[[], bool],
        before_wait: Callable[[], None],
        on_frame: Callable[[Mapping[str, Any], bytes], None],
        on_age: Callable[[float], None],
        advice: str = "",
    ) -> None:
        self._connection = connection
        self._bundle = bundle
        self._preface: Preface | None = Preface(nonce)
        self._frames = protocol.FrameReader()
        self._out = bytearray()
        self._wake_fd = wake_fd
        self._closing = closing
        self._before_wait = before_wait
        self._on_frame = on_frame
        self._on_age = on_age
        self._advice = advice
        self._heard = time.monotonic()
        self.bundle_sent = False

    def send(self, frame: bytes) -> None:
        """Queues a frame; called by the link's thread alone."""
        self._out += frame

    def run(self) -> None:
        """Returns when `closing`; raises LinkError at any other end."""
        began = time.monotonic()
        try:
            while not self._closing():
                self._before_wait()
                self._flush()
                self._wait()
                self._receive()
                now = time.monotonic()
                if self._preface is None:
                    # What already lies here was read first: a console that slept is not a node that did.
                    self._on_age(now - self._heard)
                elif now - began > BOOTSTRAP_LIMIT_S:
                    raise LinkError(
                        "bootstrap-failed",
                        f"the agent did not start within {BOOTSTRAP_LIMIT_S:g} s ({self._preface.noise or 'silence'})",
                        "look at the node's load and its home folder",
                    )
        except protocol.ProtocolError as error:
            raise LinkError("lost", f"the agent sent what is no frame ({error})") from error
        except OSError as error:
            raise self._ended(str(error)) from error

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for fd in self._connection.read_fds():
            poll.register(fd, select.POLLIN)
        wait = _TICK_S
        if self._out:
            write_fd = self._connection.write_fd()
            if write_fd is None:
                wait = _RETRY_SEND_S
            else:
                poll.register(write_fd, select.POLLOUT)
        poll.poll(wait * 1000)

    def _flush(self) -> None:
        while self._out:
            sent = self._connection.send(memoryview(self._out)[:65536].tobytes())
            if not sent:
                return
            del self._out[:sent]

    def _receive(self) -> None:
        for _ in range(_READS_A_ROUND):
            data = self._connection.receive()
            if data is None:
                return
            if not data:
                raise self._ended("the connection ended")
            self._heard = time.monotonic()
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        while self._preface is not None:
            event = self._preface.feed(data)
            if event is None:
                return
            if isinstance(event, BundleWanted):
                self._out += self._bundle.data
                self.bundle_sent = True
                data = b""
            elif isinstance(event, Booted):
                self._preface = None
                data = event.rest
        for frame in self._frames.feed(data):
            self._on_frame(frame.header, frame.payload)

    def _ended(self, how: str) -> LinkError:
        words = self._connection.last_words()
        if self._preface is None:
            return LinkError("lost", f"the agent is gone: {words or how}")
        said = " · ".join(part for part in (words, self._preface.noise) if part)
        return LinkError("bootstrap-failed", f"the session ended before the agent spoke: {said or how}", self._advice)
