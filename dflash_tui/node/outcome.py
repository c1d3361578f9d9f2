"""What became of a job, from the runner's exit, the last event and whether somebody asked it to stop."""

import signal
from typing import Any, Dict, Optional, Tuple

INTERRUPTED_STATUS = 3


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def verdict(
    code: Optional[int],
    number: Optional[int],
    event: Optional[Dict[str, Any]],
    stop: Optional[Dict[str, Any]],
    killed_by_us: bool,
    grace_s: float,
) -> Tuple[str, str]:
    """(state, reason) of a job whose runner exited with `code` or died of signal `number`.

    event: the last of events.jsonl. stop: the request to stop, if there was one.
    """
    kind = event.get("event") if event else None
    message = _line(event.get("message")) if event else ""
    if code == 0 and kind == "finished":
        return "done", ""
    if code is not None:
        if code == INTERRUPTED_STATUS or (code == 0 and kind == "interrupted"):
            return "interrupted", message or ("stopped on request" if stop else "stopped by a signal from outside")
        if kind == "failed" and message:
            remedy = _line(event.get("remedy")) if event else ""
            return "failed", "%s: %s" % (message, remedy) if remedy else message
        if code == 0:
            last = "it wrote no event" if kind is None else "its last event is %r, not 'finished'" % kind
            return "failed", "the program ended with status 0, but %s" % last
        return "failed", "the program ended with status %d; its log says why" % code
    if number is None:
        return "failed", "nobody saw how the program ended"
    if killed_by_us:
        if stop and stop.get("force"):
            return "killed", "killed on request (force)"
        return "killed", "did not end within %g s of the request to stop and was killed" % grace_s
    if stop and number == signal.SIGTERM:
        return "interrupted", "stopped on request; it ended by SIGTERM without a last word"
    if number == signal.SIGKILL:
        return "killed", "killed by SIGKILL from outside: the kernel's out-of-memory killer or somebody on the node"
    return "killed", "ended by %s, which nobody here sent; its log may say why" % signal_name(number)


def _line(value: Any) -> str:
    return " ".join(str(value).split()) if value else ""
