"""Notices that the terminal vanished: Textual would go on without one, at half a core."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

CHECK_INTERVAL_S = 1.0
LEAVE_WITHIN_S = 10.0


def leave_within(seconds: float, status: int) -> None:
    """Ends the process hard where it still runs after `seconds`: Textual's own leaving can wait for ever on a dead terminal."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True  # a process that left by itself is not kept
    timer.start()


class TerminalWatch:
    """Calls `gone` once, from its own thread, when the terminal behind `fd` hangs up.

    Ends the process hard where it still runs `LEAVE_WITHIN_S` later: writing to a dead terminal may block for ever.
    """

    def __init__(self, fd: int, gone: Callable[[], None], *, exit_hard: Callable[[int], None] = os._exit) -> None:
        self._fd = fd
        self._gone = gone
        self._exit_hard = exit_hard
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terminal-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, 0)  # a hang-up and an error are told without being asked for
        while not self._stopped.is_set():
            if poll.poll(0):
                self._gone()
                if not self._stopped.wait(LEAVE_WITHIN_S):
                    self._exit_hard(129)
                return
            self._stopped.wait(CHECK_INTERVAL_S)
