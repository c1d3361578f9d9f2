"""The agent: one process a console, which answers on standard output what is asked on standard input, and beats.

One thread answers and nothing in it waits: metrics, plans, launches and stops are processes of their own, and files are
read in threads of theirs. It keeps no truth; when the console goes it goes too, and no job notices.
"""

import json
import os
import pwd
import selectors
import shutil
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from dflash_tui.node import gpus, launching, outgoing, paths, protocol
from dflash_tui.node.children import Ended, MetricsChild, Program
from dflash_tui.node.jobs import JobStore, Record
from dflash_tui.node.loop import Loop
from dflash_tui.node.readers import Following
from dflash_tui.node.requests import Requests
from dflash_tui.node.setup import places as environments

_ALL_JOBS_EVERY = 10  # looks at living jobs for one at all
_JOBS_BYTES = 1 << 18  # and one record more: far below protocol.MAX_HEADER
_GONE_A_FRAME = 1000
_READER_S = 20.0


class Agent:
    """Answers one console. Raises OSError where the node has no place for its state."""

    def __init__(
        self, bundle: str, bundle_hash: str, nonce: str, default_python: str, fallback_python: str = ""
    ) -> None:
        self.bundle = os.path.abspath(bundle)
        self._named_python = default_python
        self._fallback_python = fallback_python or "python3"
        self.loop = Loop()
        self.store = JobStore(paths.state_dir())
        self.out = outgoing.Outgoing(self.loop, 1, self.loop.stop, self._pump)
        self.metrics = MetricsChild(self.loop, launching.node_command("metrics"), self._new_reading)
        self.starter = launching.Starter(self.loop, self.store, self.bundle)
        self._hash = bundle_hash
        self._nonce = nonce
        self._reader = protocol.FrameReader()
        self._requests = Requests(self)
        self._tails: Dict[Any, Following] = {}
        self._reader_of_cards: Optional[Program] = None
        self._looks = 0
        self._complained: Dict[str, bool] = {}
        self._status = 0

    @property
    def default_python(self) -> str:
        """The worker Python where a request names none; a setup may have made one since the last request."""
        return self._named_python or environments.worker_python() or self._fallback_python

    def run(self) -> int:
        """Until standard input ends or standard output breaks. The exit status: 2 where what came is no frame."""
        os.set_blocking(0, False)
        self.out.raw(("dflash-tui-agent %s\n" % self._nonce).encode())
        self.out.send(self._hello())
        self.loop.watch(0, selectors.EVENT_READ, self._read)
        self._every(protocol.BEAT_INTERVAL_S, self._beat)
        self._every(1.0, self._tend_metrics)
        self._every(1.0, self._push_jobs)
        self._every(0.5, self._read_cards_anew)
        try:
            self.loop.run()
        finally:
            self.metrics.close()
            self._requests.close()
            if self._reader_of_cards is not None:
                self._reader_of_cards.kill()
        return self._status

    def add_tail(self, number: Any, tail: Following) -> None:
        self._tails[number] = tail
        tail.on_chunk = self._pump

    def give_credit(self, number: Any, count: int) -> None:
        tail = self._tails.get(number)
        if tail is not None:
            tail.grant(count)

    def drop_tail(self, number: Any) -> None:
        tail = self._tails.pop(number, None)
        if tail is not None:
            tail.close()

    def _hello(self) -> protocol.Header:
        return {
            "ev": "hello",
            "protocol": protocol.PROTOCOL,
            "host": socket.gethostname(),
            "boot_id": self.store.boot_id,
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "bundle": self._hash,
            "user": _user(),
            "state_dir": self.store.root,
            "time": time.time(),
            "default_python": shutil.which(self.default_python) or self.default_python,
        }

    def _every(self, seconds: float, call: Callable[[], None]) -> None:
        def again() -> None:
            self.loop.later(seconds, again)
            try:
                call()
            except Exception as error:
                # The other duties go on; a fault is told once, where the console reads what went wrong.
                line = "%s: %s: %s" % (getattr(call, "__name__", "?"), type(error).__name__, error)
                if not self._complained.setdefault(line, False):
                    self._complained[line] = True
                    _say(line)

        again()

    def _read(self) -> None:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.loop.stop()
            return
        try:
            frames = self._reader.feed(data)
        except protocol.ProtocolError as error:
            _say(str(error))
            self._status = 2
            self.loop.stop()
            return
        for frame in frames:
            self._requests.handle(frame.header)

    def _beat(self) -> None:
        if self.out.idle(outgoing.URGENT):
            self.out.send({"ev": "beat", "time": time.time()})
        self.out.check_stalled()

    def _tend_metrics(self) -> None:
        self.metrics.tick()
        if self.metrics.stale():
            self._push_metrics()

    def _read_cards_anew(self) -> None:
        """A reader of metrics for a job that has just ended: whatever it says was read after that."""
        # One that hangs in the driver outlives its SIGKILL: beside it no other is started.
        if self._reader_of_cards is not None and (self._reader_of_cards.running() or self._reader_of_cards.lives()):
            return
        if not self.store.memory.wants_reading():
            return
        asked = time.time()

        def ended(result: Ended) -> None:
            try:
                reading = json.loads(launching.last_line_whole(result.output))
            except ValueError:
                return  # it is asked again as long as somebody wants to know
            if isinstance(reading, dict):
                self.store.memory.take(reading, asked)

        self._reader_of_cards = Program(self.loop, launching.node_command("metrics", "--count", "1"), ended, _READER_S)

    def _new_reading(self) -> None:
        if self.metrics.reading is not None:
            self.store.memory.take(self.metrics.reading)
        self._push_metrics()

    def _push_metrics(self) -> None:
        if not self.out.idle(outgoing.STATUS):
            return
        reading = self.metrics.reading
        if reading is None:
            if self.metrics.age() < self.metrics.STALE_AFTER_S:
                return
            reading = {
                "time": time.time(),
                "host": {},
                "gpus": [],
                "gpu_source": "none",
                "gpu_error": self.metrics.problem,
            }
        push = {"ev": "metrics", "metrics": reading, "age": round(self.metrics.age(), 3), "stale": self.metrics.stale()}
        self.out.send(push, rank=outgoing.STATUS)

    def _push_jobs(self) -> None:
        if not self.out.idle(outgoing.STATUS):
            return  # a slow connection gets the newest later, not every one in between
        everything = self._looks % _ALL_JOBS_EVERY == 0
        self._looks += 1
        changed, gone = self.store.refresh(everything, gpus.memory_by_pid(self.metrics.reading))
        while changed or gone:
            records: List[Record] = []
            room = _JOBS_BYTES
            while changed and room > 0:
                records.append(self.store.get(changed.pop(0)))
                room -= len(json.dumps(records[-1]))
            named, gone = gone[:_GONE_A_FRAME], gone[_GONE_A_FRAME:]
            self.out.send({"ev": "jobs", "jobs": records, "gone": named}, rank=outgoing.STATUS)

    def _pump(self) -> None:
        for number in list(self._tails):
            tail = self._tails[number]
            while self.out.room_for_bulk():
                chunk = tail.take()
                if chunk is None:
                    break
                self.out.send(chunk[0], chunk[1], outgoing.BULK)
            # The next round begins with another, so that one busy file does not starve the rest.
            del self._tails[number]
            if not tail.over():
                self._tails[number] = tail


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _say(line: str) -> None:
    try:
        os.write(2, ("dflash-tui agent: %s\n" % line).encode("utf-8", "replace"))
    except OSError:
        return
