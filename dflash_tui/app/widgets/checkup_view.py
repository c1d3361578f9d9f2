"""A checkup as lines of a width: sign and status, the check's name, what was found, and under it what mends it."""

from __future__ import annotations

import textwrap

from textual.content import Content

from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.checkup import SIGNS, summary
from dflash_tui.fleet.facts import Check, CheckStatus, Checkup

STYLES = {
    CheckStatus.PROBLEM: "bold $text-error",
    CheckStatus.WARNING: "$text-warning",
    CheckStatus.UNKNOWN: "$text-muted",
    CheckStatus.OK: "$text-success",
}
_STATUS_WIDTH = 11
_LEAST = 24  # columns for what was found; a narrower screen gets longer lines than it has room for
_LONGEST_NAME = 24


def checkup_content(checkup: Checkup, width: int) -> Content:
    """The whole checkup for `width` columns."""
    names = [fmt.one_line(check.name) for check in checkup.checks]
    column = min(max((len(name) for name in names), default=0), _LONGEST_NAME) + 2
    lines = [Content.styled(summary(checkup.checks), "bold"), Content("")]
    for check, name in zip(checkup.checks, names, strict=True):
        lines += _lines(check, name, column, max(width - _STATUS_WIDTH - column, _LEAST))
    return Content("\n").join(lines)


def _lines(check: Check, name: str, column: int, width: int) -> list[Content]:
    indent = " " * (_STATUS_WIDTH + column)
    status = f"{SIGNS[check.status]} {check.status}"
    found = textwrap.wrap(fmt.one_line(check.found), width) or [""]
    remedy = textwrap.wrap(f"-> {fmt.one_line(check.remedy)}", width, subsequent_indent="   ") if check.remedy else []
    head = Content.assemble((f"{status:<{_STATUS_WIDTH}}", STYLES[check.status]), f"{name:<{column}}", found[0])
    return [
        head,
        *(Content(indent + line) for line in found[1:]),
        *(Content.assemble(indent, (line, "$text-accent")) for line in remedy),
    ]
