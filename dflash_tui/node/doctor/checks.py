"""One thing that was looked at: what was found, and what mends it."""

import os
from typing import Any, Dict, NamedTuple, Optional

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"
UNKNOWN = "unknown"
STATUSES = (PROBLEM, WARNING, UNKNOWN, OK)

_LONGEST = 500


class Check(NamedTuple):
    name: str
    status: str
    found: str
    remedy: str = ""

    def to_json(self) -> Dict[str, str]:
        return self._replace(found=line(self.found), remedy=line(self.remedy))._asdict()


def of_json(fields: Dict[str, Any]) -> Optional[Check]:
    """The check that `to_json` gave, or None where these are the fields of something else."""
    if fields.get("status") not in STATUSES:
        return None
    return Check(*(str(fields.get(name, "")) for name in Check._fields))


def line(text: str) -> str:
    """One line of it, and no longer than a line should be."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"


def size(number: float) -> str:
    """Bytes with a binary unit."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return "%.0f %s" % (amount, unit) if unit == "B" or amount >= 100 else "%.1f %s" % (amount, unit)
        amount /= 1024
    return "%.1f TiB" % amount


def ends_with(parent: int) -> None:
    """Asks the kernel to kill this process when the one that started it is gone; what it becomes by exec too."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: prctl(2)
    except (ImportError, OSError, AttributeError):
        return  # it ends by its limit, as long as the doctor lives
    if os.getppid() != parent:
        os._exit(1)  # gone before the kernel was asked
