"""The child of the agent: a request on standard input, the diagnosis as one line on standard output."""

import json
import sys
from typing import Any, Dict

from dflash_tui.node.diagnose.find import Ended, Finder, diagnose, to_json


def main() -> int:
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    # In one write: whoever reads it takes the whole line or none.
    sys.stdout.write(json.dumps(answer(request)) + "\n")
    sys.stdout.flush()
    return 0


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """`request`: `path` and, for the log of a job, `ended` as the fields of `find.Ended`. `error` says why it cannot be read."""
    ended = Ended(**(request.get("ended") or {}))
    try:
        return diagnose(request["path"], ended)
    except FileNotFoundError as error:
        if request.get("ended") is not None:  # a job that ended before it wrote anything
            return to_json(Finder().end(ended), 0, 0)
        return {"error": _line(error)}
    except OSError as error:
        return {"error": _line(error)}


def _line(error: OSError) -> str:
    return error.strerror or str(error)
