"""The link to one node: a thread that connects, keeps the connection and tells what it learns as facts."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dflash_tui.fleet.facts import (
    AgentGreeted,
    BeatArrived,
    Fact,
    JobsArrived,
    LinkChanged,
    LinkState,
    MetricsArrived,
)
from dflash_tui.link import facts
from dflash_tui.link.asking import Asking
from dflash_tui.link.bootstrap import agent_script, remote_command
from dflash_tui.link.bundle import node_bundle
from dflash_tui.link.connection import Cancel, Connection
from dflash_tui.link.errors import REFUSED_CODES, UNREACHABLE_CODES, LinkError
from dflash_tui.link.follow import Tail, Tails, what_file
from dflash_tui.link.local import LocalConnection
from dflash_tui.link.requests import Reply, Requests
from dflash_tui.link.session import LOST_AFTER_S, STALE_AFTER_S, Session
from dflash_tui.link.target import LinkOptions, Target
from dflash_tui.node import protocol

_LOG = logging.getLogger(__name__)
_RETRY_LEAST_S, _RETRY_MOST_S = 0.5, 30.0
_STEADY_S = 30.0  # after so long the next loss is a new story


class NodeLink(Asking):
    """The link to one node. Facts go to `emit` from the link's thread, in order; nothing here blocks its caller.

    Every method but `wait_live` and `close` returns at once; futures end with a LinkError where the node cannot be
    asked ("not-connected"), goes away before it answers ("lost") or does not answer in time ("timed-out"), and with a
    RequestRefused where it says no.
    """

    def __init__(self, target: Target, emit: Callable[[Fact], None], options: LinkOptions | None = None) -> None:
        self.target = target
        self.host = target.name
        self.options = options or LinkOptions()
        self.emit = emit  # read at every fact: the screens put their own queue here
        self._requests = Requests(self.host)
        self._tails = Tails(self.host, self._emit, self._requests.new_id)
        self._lock = threading.Condition()
        self._state = LinkState.CONNECTING
        self._greeted: AgentGreeted | None = None
        self._failure: LinkError | None = None  # of the last attempt, until the next one begins
        self._last_failure: LinkError | None = None
        self._closing = False
        self._retry_now = False
        self._cancel = Cancel()
        self._posted: deque[Callable[[], None]] = deque()
        self._session: Session | None = None
        self._live_since = 0.0  # by the monotonic clock; 0 where this connection never was
        self._tail_count = 0
        self._wake_lock = threading.Lock()
        self._wake_read = self._wake_write = -1
        self._thread = threading.Thread(target=self._run, name=f"link {self.host}", daemon=True)

    # What the console calls.

    @property
    def state(self) -> LinkState:
        return self._state

    def start(self) -> None:
        self._wake_read, self._wake_write = os.pipe()  # pipe2 is not on every laptop
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._thread.start()

    def close(self, wait: bool = True) -> None:
        """Ends the link and its thread; `wait` gives the thread up to 5 s to be gone."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._cancel.set()
        self._wake()
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def retry(self) -> None:
        """Connects now instead of after the wait; also out of REFUSED, once its cause is mended."""
        with self._lock:
            self._retry_now = True
            self._failure = None
            self._lock.notify_all()
        self._wake()

    def wait_live(self, timeout: float) -> AgentGreeted:
        """Waits for the agent. Raises the LinkError that stands in the way, or "timed-out" after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                if self._state in (LinkState.LIVE, LinkState.STALE) and self._greeted is not None:
                    return self._greeted
                failure = self._failure
                if failure is not None and failure.code in REFUSED_CODES | UNREACHABLE_CODES:
                    raise failure
                if self._state is LinkState.CLOSED or self._closing:
                    raise LinkError("closed", f"the link to {self.host} is closed")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._last_failure or LinkError(
                        protocol.TIMED_OUT, f"{self.host} was not reached within {timeout:g} s ({self._state})"
                    )
                self._lock.wait(left)

    def request(self, op: str, *, timeout: float = 30.0, **fields: Any) -> Future[Reply]:
        """Asks the agent; the ops and their fields stand in `node/protocol.py`."""
        with self._lock:
            error = self._closed_error()
            session = self._session
            if error is None:
                try:
                    frame, future = self._requests.open(op, timeout, fields)
                except (LinkError, TypeError, ValueError) as problem:
                    error = problem if isinstance(problem, LinkError) else LinkError("bad-request", str(problem))
        if error is not None:
            failed: Future[Reply] = Future()
            failed.set_exception(error)
            return failed
        # Never to the next connection: there the frame would come too early, and who asked was told "lost".
        self._post(lambda: self._send(frame) if self._session is session else None)
        return future

    def follow(
        self, *, job: str | None = None, file: str = "log", path: str | None = None, offset: int = -65536
    ) -> Tail:
        """Follows a file from `offset` (negative: from the end), through reconnects; see `Tail`."""
        with self._lock:
            self._tail_count += 1
            number = self._tail_count
        tail = Tail(number, what_file(job, file, path), offset, self._post)
        self._post(lambda: self._tails.add(tail))
        return tail

    # What the thread does.

    def _is_closing(self) -> bool:
        return self._closing

    def _run(self) -> None:
        failures = 0
        while not self._is_closing():
            self._live_since = 0.0
            try:
                self._connect_and_serve()
                break  # closing
            except LinkError as error:
                failure = error
            except Exception as error:  # a defect of ours must not end the console
                _LOG.exception("the link to %s failed", self.host)
                failure = LinkError("internal", f"the link failed by itself: {type(error).__name__}: {error}")
            if self._is_closing():
                break
            steady = 0 < self._live_since < time.monotonic() - _STEADY_S
            failures = 0 if steady else failures
            self._pause(failure, failures)
            failures += 1
        self._requests.fail_all(LinkError("closed", f"the link to {self.host} is closed"))
        self._change(LinkState.CLOSED)
        with self._wake_lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def _pause(self, failure: LinkError, failures: int) -> None:
        refused = failure.code in REFUSED_CODES
        most = min(_RETRY_MOST_S, _RETRY_LEAST_S * 2 ** min(failures, 10))
        delay = None if refused else random.uniform(max(_RETRY_LEAST_S, most / 2), most)
        with self._lock:
            self._failure = self._last_failure = failure
        state = LinkState.REFUSED if refused else LinkState.RETRYING
        self._change(state, failure.message, failure.remedy, delay)
        with self._lock:
            self._lock.wait_for(lambda: self._closing or self._retry_now, delay)
            self._retry_now = False
            self._failure = None

    def _connect_and_serve(self) -> None:
        self._change(LinkState.CONNECTING)
        bundle = node_bundle()
        nonce = secrets.token_hex(8)
        here = sys.executable if self.target.is_local else None
        script = agent_script(bundle, nonce, self.options.default_python, first_python=here)
        connection = self._connect(script)
        try:
            self._change(LinkState.BOOTSTRAPPING)
            self._session = Session(
                connection,
                bundle,
                nonce,
                wake_fd=self._wake_read,
                closing=self._is_closing,
                before_wait=self._do_posted,
                on_frame=self._frame,
                on_age=self._aged,
                advice=connection.advice,
            )
            self._session.run()
        finally:
            self._session = None
            self._tails.disconnected()
            with self._lock:
                if self._state in (LinkState.LIVE, LinkState.STALE):
                    self._state = LinkState.LOST
            self._requests.fail_all(LinkError("lost", f"the link to {self.host} was lost before the answer came"))
            connection.close()

    def _connect(self, script: str) -> Connection:
        if self.target.is_local:
            return LocalConnection(script)
        from dflash_tui.link.ssh import SshConnection  # loads paramiko, which the console must not wait for

        try:
            return SshConnection(self.target, self.options, remote_command(script), self._change, self._cancel)
        finally:
            self._cancel.forget()

    def _frame(self, header: Mapping[str, Any], payload: bytes) -> None:
        if "re" in header:
            if not self._tails.answered(header):
                self._requests.answer(header, payload)
            return
        event = header.get("ev")
        if event == "beat":
            self._emit(BeatArrived(self.host, time.time()))
        elif event == "metrics":
            found = facts.metrics(header.get("metrics"), header.get("age"), header.get("stale"))
            if found is not None:
                self._emit(MetricsArrived(self.host, found))
        elif event == "jobs":
            gone = tuple(text for name in header.get("gone") or () if (text := facts.clean(name)))
            self._emit(JobsArrived(self.host, facts.jobs(header.get("jobs")), gone))
        elif event == "tail":
            self._tails.arrived(header, payload)
        elif event == "hello":
            self._hello(header)

    def _hello(self, header: Mapping[str, Any]) -> None:
        if header.get("protocol") != protocol.PROTOCOL:
            raise LinkError(
                "protocol-mismatch",
                f"the agent of {self.host} speaks protocol {header.get('protocol')!r}, the console {protocol.PROTOCOL}",
                "restart the console",
            )
        greeted = facts.greeted(self.host, header, time.time())
        self._live_since = time.monotonic()
        self._emit(greeted)
        with self._lock:
            self._greeted = greeted
        self._change(LinkState.LIVE)
        self._tails.connected(lambda fields: self._send(protocol.encode(fields)))
        self.request("list").add_done_callback(self._listed)

    def _listed(self, answer: Future[Reply]) -> None:
        # An error here is a lost link, which is told in its own way.
        if answer.exception() is None:
            header = answer.result().header
            # Of very many jobs the answer names the newest; the others came, or come, as pushes.
            self._emit(JobsArrived(self.host, facts.jobs(header.get("jobs")), whole=header.get("whole") is True))

    def _aged(self, age: float) -> None:
        if age >= LOST_AFTER_S:
            silence = f"nothing was heard for {age:.0f} s"
            self._change(LinkState.LOST, silence)
            raise LinkError("lost", silence)
        if age >= STALE_AFTER_S and self._state is LinkState.LIVE:
            self._change(LinkState.STALE, f"no beat for {age:.0f} s")
        elif age < STALE_AFTER_S and self._state is LinkState.STALE:
            self._change(LinkState.LIVE)

    def _do_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._posted:
            self._posted.popleft()()
        self._requests.expire(time.monotonic())

    def _send(self, frame: bytes) -> None:
        if self._session is not None:
            self._session.send(frame)

    def _post(self, do: Callable[[], None]) -> None:
        self._posted.append(do)
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            if self._wake_write >= 0:
                os.write(self._wake_write, b"\0")

    def _closed_error(self) -> LinkError | None:
        if self._state in (LinkState.LIVE, LinkState.STALE):
            return None
        return LinkError("not-connected", f"{self.host} is not connected ({self._state})", "wait until it is live")

    def _change(self, state: LinkState, detail: str = "", remedy: str = "", retry_in_s: float | None = None) -> None:
        with self._lock:
            self._state = state
            self._lock.notify_all()
        self._emit(LinkChanged(self.host, state, time.time(), detail, remedy, retry_in_s))

    def _emit(self, fact: Fact) -> None:
        try:
            self.emit(fact)
        except Exception:  # what the console does with a fact must not end the link
            _LOG.exception("a fact of %s was not taken", self.host)
