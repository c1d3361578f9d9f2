"""The request `diagnose`, and its answer as facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dflash_tui.fleet.facts import Cause, Diagnosis, Source
from dflash_tui.link import facts
from dflash_tui.link.errors import LinkError
from dflash_tui.link.follow import what_file
from dflash_tui.link.requests import Reply, then
from dflash_tui.link.wire import clean, mapping
from dflash_tui.node import protocol

_LIMIT_S = 200.0  # longer than the agent's own, for its answer knows more


def ask(request: Callable[..., Future[Reply]], job: str | None, path: str | None) -> Future[Diagnosis]:
    """`request` is that of the link; errors of the link and refusals end the future."""
    fields = what_file(job, "log", path)
    return then(request("diagnose", timeout=_LIMIT_S, **fields), lambda reply: diagnosis(reply.header))


def diagnosis(header: Mapping[str, Any]) -> Diagnosis:
    """The node's answer as a fact; text is cleaned of what could steer a terminal. Raises LinkError."""
    failed = header.get("failed")
    if not isinstance(failed, bool):
        raise LinkError(protocol.INTERNAL, f"the agent answered diagnose with no diagnosis: {dict(header)!r:.200}")
    cause, source = mapping(header.get("cause")), mapping(header.get("source"))
    file, line = clean(source.get("file")), facts.whole(source.get("line"))
    return Diagnosis(
        failed,
        Cause(
            clean(cause.get("id")) or "unknown",
            clean(cause.get("text")) or "",
            facts.whole(cause.get("line")),
            clean(cause.get("quote")) or "",
        )
        if cause
        else None,
        clean(header.get("remedy")) or None,
        Source(file, line) if file and line is not None else None,
        facts.whole(header.get("lines")) or 0,
        facts.whole(header.get("skipped_bytes")) or 0,
    )
