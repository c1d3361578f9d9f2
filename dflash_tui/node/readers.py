"""Files read in threads of their own, one a file: a mount that hangs holds up nothing but what was asked of it.

A thread that never comes back cannot be ended; it is a daemon, and the agent ends without it.
"""

import collections
import threading
from typing import Any, Callable, Deque, Dict, Optional, Tuple

from dflash_tui.node import protocol, tails
from dflash_tui.node.loop import Loop
from dflash_tui.node.protocol import Refused

SILENT_S = 20.0  # a file that was not opened or read by then is refused
MOST_SILENT = 32  # threads that do not come back
_LOOK_S = 0.1
_CHUNKS = 2

Chunk = Tuple[Dict[str, Any], bytes]
Fail = Callable[[Refused], None]


class Readers:
    """Starts the threads, and says no where too many of them do not come back."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting = 0

    def read(
        self, path: str, find: Callable[[], Any], done: Callable[[Any], None], fail: Fail, more_s: float = 0.0
    ) -> None:
        """Calls `done` with what `find` gives, which reads the file in the thread, or `fail`. Raises Refused.

        more_s: so much longer than others may this one take.
        """
        answer = self._answer(path, done, fail, more_s)
        _start("read " + path, lambda: answer(find))

    def follow(
        self, path: str, tail: Callable[[], tails.Tail], done: Callable[[Dict[str, Any]], None], fail: Fail
    ) -> "Following":
        """Calls `done` with the position, or `fail`; `tail` opens the file, in the thread. Raises Refused."""
        following = Following(self._loop)

        def opened(position: Dict[str, Any]) -> None:
            done(position)
            following.answered()

        def refused(refusal: Refused) -> None:
            following.close()
            fail(refusal)

        answer = self._answer(path, opened, refused)

        def run() -> None:
            found = answer(tail, tails.Tail.position)
            if found is not None:
                following.run(found)

        _start("follow " + path, run)
        return following

    def _answer(self, path: str, done: Callable[[Any], None], fail: Fail, more_s: float = 0.0) -> Callable[..., Any]:
        """Of a thread: calls what it is given and answers with what that returns, once and in time."""
        if self._waiting >= MOST_SILENT:
            raise _silent("%d files of this node do not answer, so %s is not tried" % (self._waiting, path))
        self._waiting += 1
        late = []

        limit_s = SILENT_S + more_s

        def too_late() -> None:
            late.append(True)
            fail(_silent("%s does not answer within %g s" % (path, limit_s)))

        timer = self._loop.later(limit_s, too_late)

        def back(call: Callable[[], None]) -> None:
            self._waiting -= 1
            timer.cancel()
            if not late:
                call()

        def answer(work: Callable[[], Any], shown: Callable[[Any], Any] = lambda found: found) -> Any:
            try:
                found = work()
                told = shown(found)
            except Refused as error:
                refused = error
            except Exception as error:
                refused = Refused(protocol.IO_ERROR, "%s: %s: %s" % (path, type(error).__name__, error))
            else:
                self._loop.post(lambda: back(lambda: done(told)))
                return found
            self._loop.post(lambda: back(lambda: fail(refused)))
            return None

        return answer


class Following:
    """One followed file: its thread reads ahead as far as there is credit, and the loop takes the chunks in order."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._chunks: Deque[Chunk] = collections.deque()
        self._granted = 0
        self._poked = False
        self._ready = False
        self._closed = False
        self._ended = False
        self.on_chunk: Callable[[], None] = lambda: None

    # Of the loop.

    def answered(self) -> None:
        """The request was: from now on chunks may be taken."""
        self._ready = True
        self.on_chunk()

    def grant(self, count: int) -> None:
        with self._changed:
            self._granted += count
            self._poke()

    def take(self) -> Optional[Chunk]:
        if not self._ready:
            return None
        with self._changed:
            if not self._chunks:
                return None
            self._poke()
            return self._chunks.popleft()

    def over(self) -> bool:
        """Whether nothing comes any more."""
        with self._changed:
            return self._closed or (self._ended and not self._chunks)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._poke()

    def _poke(self) -> None:
        self._poked = True
        self._changed.notify()

    # Of the thread.

    def run(self, tail: tails.Tail) -> None:
        try:
            while not self._closed and not tail.dead:
                tail.pump(self._put, self._room)
                with self._changed:
                    self._changed.wait_for(lambda: self._poked, _LOOK_S)
                    tail.credit += self._granted
                    self._poked, self._granted = False, 0
        finally:
            self._ended = True
            tail.close()
            self._loop.post(self.on_chunk)

    def _put(self, header: Dict[str, Any], payload: bytes) -> None:
        with self._changed:
            if self._closed:
                return
            self._chunks.append((header, payload))
        self._loop.post(self.on_chunk)

    def _room(self) -> bool:
        return len(self._chunks) < _CHUNKS and not self._closed


def _silent(message: str) -> Refused:
    return Refused(protocol.TIMED_OUT, message, "does its mount hang? look at it on the node: findmnt")


def _start(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()
