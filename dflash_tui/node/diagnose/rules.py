"""What a known cause is: a row of the tables in engine.py, machine.py and models.py."""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from dflash_tui.node.diagnose.lines import shown

# A plain line that has none of these is nobody's: so many searches for each line of a large log would take minutes.
WORDS = (
    "error",
    "memory",
    "torchvision",
    "custom c++",
    "no module",
    "zero",
    "not found",
    "insufficient",
    "too old",
    "unsupported",
    "compatib",
    "mismatch",
    "initialized",
    "notready",
    "ecc",
    "lost",
    "fallen",
    "failure",
    "xid",
    "illegal",
    "assert",
    "misaligned",
    "timeout",
    "barrier",
    "no space",
    "quota",
    "storagefull",
    "errno",
    "in use",
    "inuse",
    "taken",
    "denied",
    "oom",
    "alloc",
    "fatal",
    "fault",
    "dumped",
    "sig",
    "killed",
)

STRONG, WEAK = 0, 2  # a weak one is the cause where nothing else is; between them stands an exception that no row knows


class Rule(NamedTuple):
    """id: what scripts go by. pattern: searched in the exception as "Kind: message", or in a line.

    text: the cause in words; {name} is a group of the pattern, {said} the exception or the line itself.
    known_from: where these words were seen: a recording, or whose source prints them.
    plain: whether a line that is neither in a traceback nor an ERROR counts too. frame: searched in the file of the
    innermost frame. when: "loading" or "running": only before, or after, the engine was ready.
    """

    id: str
    pattern: str
    text: str
    remedy: str
    known_from: str
    plain: bool = False
    rank: int = STRONG
    frame: str = ""
    when: str = ""


class Match(NamedTuple):
    rule: Rule
    text: str
    remedy: str


class Rules:
    """The rows, the first that fits wins."""

    def __init__(self, rows: Tuple[Rule, ...]) -> None:
        self._rows = [(row, re.compile(row.pattern)) for row in rows]

    def of_line(self, text: str, is_error: bool, ready: bool) -> Optional[Match]:
        """Of a line outside of tracebacks."""
        if not is_error:
            lowered = text.lower()
            if not any(word in lowered for word in WORDS):
                return None
        return self._find(text, "", ready, lambda row: is_error or row.plain)

    def of_exception(self, said: str, file: str, ready: bool) -> Optional[Match]:
        return self._find(said, file, ready, lambda row: True)

    def _find(self, said: str, file: str, ready: bool, fits: Any) -> Optional[Match]:
        for row, pattern in self._rows:
            if not fits(row) or (row.when and (row.when == "running") != ready):
                continue
            if row.frame and not re.search(row.frame, file):
                continue
            found = pattern.search(said)
            if found is not None:
                words: Dict[str, Any] = {name: shown(value or "") for name, value in found.groupdict().items()}
                words["said"] = shown(said)
                return Match(row, " ".join(row.text.format(**words).split()), row.remedy.format(**words))
        return None


def all_rows() -> Tuple[Rule, ...]:
    from dflash_tui.node.diagnose import engine, machine, models

    rows: List[Rule] = [*engine.ROWS, *models.ROWS, *machine.ROWS]
    return tuple(rows)
