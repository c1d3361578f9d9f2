"""Jobs with what became of their GPUs' memory: an agent that has just been started must read the cards first."""

from __future__ import annotations

import time

from dflash_tui.commands.nodes import Node
from dflash_tui.fleet.facts import Job
from dflash_tui.fleet.gpumemory import undecided

_POLL_S = 0.2


def jobs_once_read(node: Node, limit_s: float, only: str = "") -> tuple[Job, ...]:
    """The node's jobs as soon as it has read the GPUs of those that ended, or of the job `only`; after `limit_s` as they are.

    Raises CommandError.
    """
    deadline = time.monotonic() + limit_s
    while True:
        jobs = node.answer(node.link.list_jobs())
        if time.monotonic() >= deadline or not any(undecided(job) for job in jobs if only in ("", job.id)):
            return jobs
        time.sleep(_POLL_S)
