"""Ending a job's processes so that it is proved: the runner with its grace, then SIGTERM to all, then SIGKILL until none is left."""

import signal
import time
from typing import Callable, List, Optional, Set

from dflash_tui.node import processes
from dflash_tui.node.processes import Identity, Stat

# How long what is left may take to end by itself after SIGTERM, when nobody waits for its work any more.
TERM_WAIT_S = 5.0
# SIGKILL acts at once except on a process that the kernel itself holds; longer than this is worth a word.
STUCK_AFTER_S = 10.0
# Python's resource trackers clean up what killed processes left in shared memory; killed too, hundreds of megabytes would stay.
TRACKER_WAIT_S = 8.0
_ROUNDS = 20

IDLE, ASKED, ENDING, KILLING, OVER = "idle", "asked", "ending", "killing", "over"


class Ladder:
    """The stopping of one job, advanced by `step` and never waiting itself.

    members: gives the living processes of the job, the runner included.
    runner: who is asked first and has `grace_s` to answer; None where it is gone.
    """

    def __init__(
        self,
        members: Callable[[], List[Stat]],
        runner: Optional[Identity],
        grace_s: float,
        term_wait_s: float = TERM_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = IDLE
        self.killed: Set[Identity] = set()
        self.left: List[Stat] = []
        self.grace_over = False
        self._members = members
        self._runner = runner
        self._grace_s = grace_s
        self._term_wait_s = term_wait_s
        self._clock = clock
        self._deadline = 0.0
        self._stuck_from = 0.0
        self._trackers_from = 0.0

    def ask(self, force: bool) -> None:
        """SIGTERM to the runner, once; with `force` its grace is over now."""
        if self.phase == IDLE:
            self.phase = ASKED
            self._deadline = self._clock() + self._grace_s
            if self._runner is not None and not force:
                _ask(self._runner)
        if force and self.phase == ASKED:
            self._deadline = self._clock()

    def end_all(self) -> None:
        """SIGTERM to whatever lives; nobody has a grace any more."""
        if self.phase not in (IDLE, ASKED):
            return
        self.phase = ENDING
        self._deadline = self._clock() + self._term_wait_s
        for member in self._members():
            _ask(member.identity)

    def step(self) -> bool:
        """Goes on where it is time to; True once none is left."""
        if self.phase == ASKED:
            if not processes.alive(self._runner):
                self.end_all()
            elif self._clock() >= self._deadline:
                self.grace_over = True
                self.end_all()
        if self.phase == ENDING:
            self.left = self._members()
            if not self.left:
                self.phase = OVER
            elif self._clock() >= self._deadline:
                self.phase = KILLING
                self._stuck_from = self._clock() + STUCK_AFTER_S
                self._trackers_from = self._clock() + TRACKER_WAIT_S
        if self.phase == KILLING:
            self._kill()
        return self.phase == OVER

    def stuck(self) -> str:
        """One line on processes that SIGKILL does not end, or ""."""
        if self.phase != KILLING or self._clock() < self._stuck_from or not self.left:
            return ""
        first = self.left[0]
        return "waiting for %d process%s that SIGKILL does not end (pid %d %s, state %s): the kernel holds it" % (
            len(self.left),
            "" if len(self.left) == 1 else "es",
            first.pid,
            first.name,
            first.state,
        )

    def _kill(self) -> None:
        spare_trackers = self._clock() < self._trackers_from
        # What is killed may have just forked: look again until a look finds none.
        for _ in range(_ROUNDS):
            self.left = self._members()
            if not self.left:
                self.phase = OVER
                return
            victims = [one for one in self.left if not (spare_trackers and processes.is_resource_tracker(one.pid))]
            if not victims:
                return  # the next step looks whether they ended
            for member in victims:
                if _signal(member.identity, signal.SIGKILL):
                    self.killed.add(member.identity)


def _ask(identity: Identity) -> None:
    if _signal(identity, signal.SIGTERM):
        # One that is stopped (ctrl+z, a debugger) would hear of it only when it goes on.
        _signal(identity, signal.SIGCONT)


def _signal(identity: Identity, number: int) -> bool:
    try:
        return processes.send(identity, number)
    except PermissionError:
        # A setuid program below the job: it stays in the list of what is left, and is named there.
        return False
