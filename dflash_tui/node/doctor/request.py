"""The agent's part of the op `doctor`: a request checked and made whole, and the child's line made an answer."""

import json
import os
from typing import Any, Callable, Dict

from dflash_tui.node import launching, protocol
from dflash_tui.node.children import Ended, Program
from dflash_tui.node.protocol import Refused

LIMIT_S = 50.0
_MOST_S = 600.0
_MORE_S = 15.0  # for the child to start, to give up on what hangs, and to answer


def start(agent: Any, header: protocol.Header, done: Callable[[Callable[[], Dict[str, Any]]], None]) -> Program:
    """Starts the child; `done` gets what makes the answer's fields, or raises Refused. Raises Refused itself, too."""
    request = request_of(header, agent.default_python, agent.store.root)
    limit_s = float(request["limit_s"]) + _MORE_S
    data = json.dumps(request).encode()
    command = launching.node_command("doctor")
    return Program(agent.loop, command, lambda ended: done(lambda: answer_of(ended, limit_s)), limit_s, data)


def request_of(header: protocol.Header, default_python: str, state_dir: str) -> Dict[str, Any]:
    """The child's request: python, paths, write, limit_s, host, state_dir. Raises Refused (bad-request)."""
    request = {
        "python": header.get("python") or default_python,
        "paths": header.get("paths") or [],
        "write": header.get("write", True),
        "limit_s": header.get("limit_s", LIMIT_S),
        "host": header.get("host") or "",
        "state_dir": state_dir,
    }
    limit = request["limit_s"]
    good = {
        "python": isinstance(request["python"], str) and "\0" not in request["python"],
        "paths": isinstance(request["paths"], list) and all(map(_is_path, request["paths"])),
        "write": isinstance(request["write"], bool),
        "limit_s": isinstance(limit, (int, float)) and not isinstance(limit, bool) and 1 <= limit <= _MOST_S,
        "host": isinstance(request["host"], str),
    }
    for name, fits in good.items():
        if not fits:
            remedy = "paths begin with /, limit_s is 1 to %g seconds" % _MOST_S
            raise Refused(protocol.BAD_REQUEST, "doctor: %s cannot be %r" % (name, request[name]), remedy)
    request["paths"] = list(dict.fromkeys(map(os.path.normpath, request["paths"])))
    return request


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and os.path.isabs(value) and "\0" not in value


def answer_of(ended: Ended, limit_s: float) -> Dict[str, Any]:
    """The fields of the answer. Raises Refused where the child gave none."""
    try:
        answer = json.loads(launching.last_line_whole(ended.output))
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("checks"), list):
        return answer
    if ended.code is None:
        raise Refused(protocol.TIMED_OUT, "doctor took longer than %g s" % limit_s, "is the node overloaded? try again")
    why = launching.last_line(ended.errors) or "it ended with status %d and said nothing" % ended.code
    raise Refused(protocol.INTERNAL, "doctor failed: %s" % why, "please report this")
