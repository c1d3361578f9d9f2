"""States in words, each with a plain sign before it and a style: never colour alone, and no emoji."""

from __future__ import annotations

from dflash_tui.fleet.facts import JobState, LinkState
from dflash_tui.fleet.format import duration, one_line
from dflash_tui.fleet.state import NodeView

JOB_SIGNS: dict[JobState, tuple[str, str]] = {
    JobState.STARTING: ("+", "accent"),
    JobState.RUNNING: (">", "good"),
    JobState.PAUSED: ("=", "warn"),
    JobState.STOPPING: ("-", "warn"),
    JobState.DONE: ("*", "good"),
    JobState.INTERRUPTED: ("~", "warn"),
    JobState.FAILED: ("!", "bad"),
    JobState.KILLED: ("!", "bad"),
    JobState.LOST: ("?", "bad"),
    JobState.ORPHANED: ("?", "bad"),
}

# A link in one of these does nothing until it is asked to, or not yet.
WAITING = (LinkState.RETRYING, LinkState.REFUSED)

LINK_STYLES: dict[LinkState, str] = {
    LinkState.LIVE: "good",
    LinkState.STALE: "warn",
    LinkState.LOST: "bad",
    LinkState.RETRYING: "bad",
    LinkState.REFUSED: "bad",
}


def job_state(state: JobState) -> tuple[str, str]:
    """The state as text ("> running") and its style."""
    sign, style = JOB_SIGNS[state]
    return f"{sign} {state}", style


def link_state(node: NodeView, now: float) -> tuple[str, str]:
    """The state of a node's link as text ("retrying in 4s") and its style."""
    link = node.link
    text = str(link.state)
    if link.state is LinkState.RETRYING and link.retry_in_s is not None:
        left = link.local_time + link.retry_in_s - now
        text += f" in {duration(left)}" if left > 0 else " now"
    return text, LINK_STYLES.get(link.state, "accent")


def last_seen(node: NodeView, now: float) -> str:
    """How old what is shown of a node is; "" while it is live."""
    if node.live:
        return ""
    return "never seen" if node.last_seen is None else f"last seen {duration(now - node.last_seen)} ago"


def why(node: NodeView) -> str:
    """What the link says of itself, on one line with its remedy."""
    return one_line(": ".join(part for part in (node.link.detail, node.link.remedy) if part))
