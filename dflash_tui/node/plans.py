"""What a plan printed, as the answer to who asked for it."""

import json
from typing import Any, Dict

from dflash_tui.node import launching, protocol
from dflash_tui.node.children import Ended
from dflash_tui.node.protocol import Refused


def plan_of(result: Ended, timeout_s: float) -> Dict[str, Any]:
    """The object that `backends plan` printed last. Raises Refused where it printed none."""
    if result.code is None:
        raise Refused(
            protocol.TIMED_OUT,
            "the plan took longer than %g s" % timeout_s,
            "is the node's disk or Python slow? try again",
        )
    try:
        plan = json.loads(launching.last_line_whole(result.output))
    except ValueError:
        plan = None
    if not isinstance(plan, dict):
        why = launching.last_line(result.errors) or "it ended with status %d and said nothing" % result.code
        raise Refused(
            protocol.PLAN_REFUSED, "the plan failed: %s" % why, "check the worker Python's packages, or name another"
        )
    return plan
