"""The agent's one thread: descriptors that became readable or writable, and timers. Nothing in it may wait."""

import collections
import heapq
import itertools
import os
import selectors
import time
from typing import Any, Callable, Deque, List, Tuple

Callback = Callable[[], Any]


class Timer:
    """A call that is to come; `cancel` makes it not come."""

    def __init__(self, call: Callback) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    def __init__(self) -> None:
        # poll rather than epoll: standard input may be a file or /dev/null, which epoll refuses.
        self._selector = selectors.PollSelector()
        self._timers: List[Tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._running = True
        self._posted: Deque[Callback] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_read, selectors.EVENT_READ, self._do_posted)

    def watch(self, fd: int, events: int, call: Callback) -> None:
        """Calls `call` whenever `fd` is ready for `events`; replaces an earlier watch of it."""
        try:
            self._selector.modify(fd, events, call)
        except KeyError:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        try:
            self._selector.unregister(fd)
        except KeyError:
            return

    def later(self, seconds: float, call: Callback) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), timer))
        return timer

    def post(self, call: Callback) -> None:
        """Calls `call` soon in the loop's thread, in the order of the posts; the one method for other threads."""
        self._posted.append(call)
        try:
            os.write(self._wake_write, b"0")
        except BlockingIOError:
            return  # full: it wakes anyway

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Until `stop` is called, before this or within. Exceptions of callbacks come out."""
        while self._running:
            for key, _ in self._selector.select(self._due_in()):
                # A callback before this one may have ended the watch.
                if self._running and self._watched(key):
                    key.data()
            now = time.monotonic()
            while self._running and self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if not timer.cancelled:
                    timer.call()

    def _do_posted(self) -> None:
        os.read(self._wake_read, 65536)
        # As many as there are now: who posts without end must not keep the timers waiting.
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def _due_in(self) -> float:
        return max(self._timers[0][0] - time.monotonic(), 0.0) if self._timers else 60.0

    def _watched(self, key: Any) -> bool:
        return self._selector.get_map().get(key.fd) is key
