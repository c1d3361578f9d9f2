"""A node's checkup in order and in words. Every status has a sign, for colour alone says nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dflash_tui.fleet.facts import Check, CheckStatus

ORDER = (CheckStatus.PROBLEM, CheckStatus.WARNING, CheckStatus.UNKNOWN, CheckStatus.OK)
SIGNS = {CheckStatus.PROBLEM: "!", CheckStatus.WARNING: "~", CheckStatus.UNKNOWN: "?", CheckStatus.OK: "*"}
_TOLERATED_S = 2.0  # files and logs of two machines are compared by eye
_FAR_S = 300.0  # past it logins by certificate and downloads over TLS begin to fail


def in_order(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The worst first; of one status as they came."""
    return tuple(sorted(checks, key=lambda check: ORDER.index(check.status)))


def has_problem(checks: Iterable[Check]) -> bool:
    return any(check.status is CheckStatus.PROBLEM for check in checks)


def summary(checks: Iterable[Check]) -> str:
    """The statuses counted: "1 problem, 2 warnings, 17 ok"."""
    counts = Counter(check.status for check in checks)
    words = {CheckStatus.PROBLEM: ("problem", "problems"), CheckStatus.WARNING: ("warning", "warnings")}
    told = []
    for status in ORDER:
        one, many = words.get(status, (str(status), str(status)))
        if counts[status] or status in (CheckStatus.PROBLEM, CheckStatus.OK):
            told.append(f"{counts[status] or 'no'} {one if counts[status] in (0, 1) else many}")
    return ", ".join(told)


def clock_check(offset_s: float, round_trip_s: float, ntp: bool | None) -> Check:
    """The node's clock against the console's; what the link's delay could have caused is no fault."""
    kept = {True: "kept by NTP", False: "not kept by NTP", None: "NTP unknown"}[ntp]
    doubt = round_trip_s / 2
    side = "ahead of" if offset_s >= 0 else "behind"
    off = f"{abs(offset_s):.3f}" if abs(offset_s) < 10 else f"{abs(offset_s):.0f}"
    found = f"{off} s {side} the console's (to within {doubt:.3f} s), {kept}"
    if abs(offset_s) <= _TOLERATED_S + doubt:
        return Check("clock", CheckStatus.OK, found)
    status = CheckStatus.PROBLEM if abs(offset_s) > _FAR_S + doubt else CheckStatus.WARNING
    return Check("clock", status, found, "set the clock there (`timedatectl set-ntp true` as root), or here")
