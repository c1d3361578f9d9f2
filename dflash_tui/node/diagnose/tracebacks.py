"""Tracebacks among the lines of several processes, in chains: the first exception raised, and what was raised on its way."""

import re
from typing import Dict, List, NamedTuple, Optional, Tuple

from dflash_tui.node.diagnose.lines import Line

BEGIN = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+)')
_GROUP = re.compile(r"(?:\s*[|+] ?)+(?:-\+-+ \d+ -+)?")  # the frame that an ExceptionGroup draws around its exceptions
# Class names begin with a capital but for a few of the standard library; "INFO:" and such are levels.
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w*\.)*(?:_*[A-Z]\w*[a-z]\w*|gaierror|herror|timeout|error))(?:: ?(.*)|$)")
_BARE = re.compile(
    r"(?:Error|Exception|Exit|Interrupt|Iteration|Warning|Timeout|Empty|Full|Cancelled|error|timeout|Expired|Dead|Died)$"
)
_IGNORED = ("Exception ignored in", "--- Logging error ---", "Exception in thread QueueFeederThread")
_FOREIGN_LINES = 400  # of other writers, between the lines of one traceback
_OPEN_LINES = 40  # after its last exception a chain may go on
_MOST_OPEN = 256

Frame = Tuple[str, int]


class Raised(NamedTuple):
    """An exception as a traceback ends with it. kind: its class's name without modules. frame: the innermost one."""

    kind: str
    message: str
    line: Line
    frame: Optional[Frame]


class Chain(NamedTuple):
    """raised: in the order in which it was raised. ignored: Python itself says that it changes nothing."""

    raised: List[Raised]
    level: str
    ignored: bool
    cut: Optional[Raised]  # a traceback that ends before its exception


class _Open:
    def __init__(self, line: Line, ignored: bool) -> None:
        self.raised: List[Raised] = []
        self.level = line.level
        self.ignored = ignored
        self.begun = line
        self.frame: Optional[Frame] = None
        self.library: Optional[Frame] = None
        self.inside = True
        self.chained = False
        self.idle = 0
        self.said_at = 0  # the last line of the last exception's words

    def restart(self, line: Line) -> None:
        self.begun, self.inside, self.chained, self.idle = line, True, False, 0
        self.frame = self.library = None


class Tracebacks:
    """Lines in, whole chains out. Memory is bounded however many tracebacks there are."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], _Open] = {}
        self._ignored: Dict[str, int] = {}

    def feed(self, line: Line) -> Tuple[bool, List[Chain]]:
        """Whether the line is a traceback's, and the chains that are whole now."""
        key = (line.stream, line.site)
        text = line.text
        if text.startswith(_IGNORED):
            self._ignored = {line.stream: line.number}
            return True, []
        begin = text.find(BEGIN[:-1])
        found = self._open.get(key)
        if begin >= 0:
            return True, self._begin(key, line, found)
        if found is None:
            return False, []
        if not text.strip():
            return True, []
        if found.inside:
            taken = self._inside(found, line)
            if not taken and found.idle > _FOREIGN_LINES:
                return False, self._close(key)
            return taken, []
        if text.strip(" |") in _CHAINED:
            found.chained = True
            return True, []
        found.idle += 1
        if found.idle > _OPEN_LINES:
            return False, self._close(key)
        return self._continues(found, line), []

    def end(self) -> List[Chain]:
        """What is open at the end of the log, or before a part that is not there."""
        return [chain for key in list(self._open) for chain in self._close(key)]

    def _begin(self, key: Tuple[str, str], line: Line, found: Optional[_Open]) -> List[Chain]:
        if found is not None and not found.inside:
            embedded = found.raised[-1].kind.endswith(("RemoteTraceback", "ExceptionGroup", "RayTaskError"))
            if found.chained or (embedded and found.idle < 5):
                found.restart(line)
                return []
        done = self._close(key)
        near = line.number - self._ignored.pop(line.stream, -100) <= 3
        self._open[key] = _Open(line, near)
        if len(self._open) > _MOST_OPEN:
            done += self._close(next(iter(self._open)))
        return done

    def _inside(self, found: _Open, line: Line) -> bool:
        text = line.text
        drawn = _GROUP.match(text)
        if drawn is not None:
            text = text[drawn.end() :]
        if text[:1] in (" ", "\t"):
            frame = _FRAME.match(text)
            if frame is not None and not frame.group(1).startswith("<"):
                found.frame = frame.group(1), int(frame.group(2))
                if not _is_standard_library(frame.group(1)):
                    found.library = found.frame
            return True
        exception = _EXCEPTION.match(text)
        if exception is None or (exception.group(2) is None and not _BARE.search(exception.group(1))):
            found.idle += 1
            return text.startswith(("^", "~"))
        kind = exception.group(1).rpartition(".")[2]
        found.raised.append(Raised(kind, exception.group(2) or "", line, found.library or found.frame))
        found.inside, found.idle, found.said_at = False, 0, line.number
        return True

    def _continues(self, found: _Open, line: Line) -> bool:
        """Whether this goes on with the last exception's words, as those of pydantic do, indented."""
        if line.text[:1] != " " or line.number - found.said_at > 2:  # vLLM puts an empty line after each
            return False
        found.said_at = line.number
        if not line.text.strip(" |+-"):
            return True
        last = found.raised[-1]
        if len(last.message) < 2000:
            found.raised[-1] = last._replace(message="%s\n%s" % (last.message, line.text.strip()))
        return True

    def _close(self, key: Tuple[str, str]) -> List[Chain]:
        found = self._open.pop(key, None)
        if found is None:
            return []
        cut = None
        if found.inside and found.frame is not None:
            cut = Raised("", "", found.begun, found.library or found.frame)
        if not found.raised and cut is None:
            return []
        return [Chain(found.raised, found.level, found.ignored, cut)]


def _is_standard_library(file: str) -> bool:
    return "/lib/python3" in file and "/site-packages/" not in file and "/dist-packages/" not in file
