"""The agent's part of the op `diagnose`: what is known of the job goes to a child, whose line becomes the answer."""

import json
from typing import Any, Callable, Dict, Optional

from dflash_tui.node import launching, protocol
from dflash_tui.node.children import Ended, Program
from dflash_tui.node.protocol import Refused

LIMIT_S = 180.0  # the largest log takes 20 s of an idle core
_BADLY = ("failed", "killed", "lost", "orphaned")
_WELL = ("done", "interrupted")


def start(
    loop: Any, path: str, record: Optional[Dict[str, Any]], done: Callable[[Callable[[], Dict[str, Any]]], None]
) -> Program:
    """Starts the child; `done` gets what makes the answer's fields, or raises Refused.

    record: of the job whose log `path` is, None for any other file.
    """
    request = {"path": path, "ended": None if record is None else ended_of(record)}
    data = json.dumps(request).encode()
    return Program(
        loop, launching.node_command("diagnose"), lambda ended: done(lambda: answer_of(ended, path)), LIMIT_S, data
    )


def ended_of(record: Dict[str, Any]) -> Dict[str, Any]:
    """What the record of a job says of its end, as the fields of `find.Ended`."""
    state, last = record.get("state"), record.get("last_event") or {}
    by_request = state == "killed" and record.get("stop")
    failed = True if state in _BADLY and not by_request else False if state in _WELL or by_request else None
    told = last if last.get("event") == "failed" else {}
    return {
        "failed": failed,
        "message": " ".join(str(told.get("message") or "").split()),
        "remedy": " ".join(str(told.get("remedy") or "").split()),
        "reason": str(record.get("reason") or ""),
        "signal": (record.get("exit") or {}).get("signal"),
    }


def answer_of(ended: Ended, path: str) -> Dict[str, Any]:
    """The fields of the answer. Raises Refused where the child gave none."""
    try:
        answer = json.loads(launching.last_line_whole(ended.output))
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("failed"), bool):
        return answer
    if isinstance(answer, dict) and answer.get("error"):
        raise Refused(protocol.BAD_REQUEST, "%s cannot be read: %s" % (path, answer["error"]), "give the path of a log")
    if ended.code is None:
        raise Refused(protocol.TIMED_OUT, "%s was not read within %g s" % (path, LIMIT_S), "does its disk answer?")
    why = launching.last_line(ended.errors) or "it ended with status %d and said nothing" % ended.code
    raise Refused(protocol.INTERNAL, "diagnose failed: %s" % why, "please report this")
