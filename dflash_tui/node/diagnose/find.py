"""The one cause among the lines of a log: the first that went wrong in what came last, and nothing of a shutdown's noise."""

import re
from typing import Any, Dict, NamedTuple, Optional

from dflash_tui.node.diagnose.lines import Line, parse, shown
from dflash_tui.node.diagnose.read import Log
from dflash_tui.node.diagnose.rules import STRONG, WEAK, Match, Rules, all_rows
from dflash_tui.node.diagnose.tracebacks import Chain, Frame, Raised, Tracebacks

# The rows' STRONG is 0 and WEAK 2.
_UNKNOWN, _FOLLOWS, _ERROR_LINE = 1, 3, 4

_RUNNER = "backends: "
_EVENT = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (started|phase|progress|worker|warning|finished|interrupted|failed)\b"
)
# What our runner says of a failure of which the log above tells more.
_POINTS = re.compile(
    r"the traceback is in the log|see (?:the|its) log|log says|was lost \(|could not start|(?:server|engine) (?:died|ended|exited|is gone)"
    r"|did not (?:become|get) (?:healthy|ready)"
)
_DONE = re.compile(r" (?:already_)?done=(\d+)")
_STOPPED = re.compile(r"stopped (?:on request|after|before|while)")
_BANNER = re.compile(r"vLLM API server version")
_READY = re.compile(r"Application startup complete|\bstate=ready\b|train/loss=|global_step=|'loss': ")
_STOPPING = re.compile(
    r"\[shutdown\] (?:API server: shutdown triggered|EngineCore: trigger received signal)|^Shutting down$"
    r"|[Rr]eceived (?:signal )?(?:SIGTERM|SIGINT|15\b|2\b)|^KeyboardInterrupt\b|\^C$"
)
# What none of these stands in is no sign of anything, and what INFO begins then needs no second look.
_SIGNS = (
    "startup complete",
    "server version",
    "[shutdown]",
    "Shutting down",
    "eceived",
    "KeyboardInterrupt",
    "^C",
    "state=ready",
    "loss",
    "global_step=",
)
_SIGN_BYTES = tuple(sign.encode() for sign in _SIGNS)
_DULL = re.compile(rb"(?:\([^)]{1,80}\) ?){0,2}(?:INFO|DEBUG|WARNING)[ :]")
_STOP_KINDS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "SignalException")
_AT_STOP = ("nccl",)  # ranks that lose each other when one of them ends
# Raised because something else had gone wrong, as their own words say.
_FOLLOWING = re.compile(
    r"^(?:EngineDeadError|ChildFailedError|ProcessExitedException|BrokenProcessPool|RemoteTraceback|_RemoteTraceback|RayTaskError"
    r"|ActorDiedError|(?:Base)?ExceptionGroup|CalledProcessError)\b|[Ss]ee (?:root cause|(?:the )?stack trace).{0,12}above"
    r"|Worker failed with error|^RuntimeError: (?:Executor failed\b|Error raised in subprocess:)|initialization failed due to an exception in a background process"
)
_NOISE_LINE = re.compile(
    r"resource_tracker|destroy_process_group|leaked |dump_input\.py|\[shutdown\]|BrokenPipe|Broken pipe|nanobind"
)
_LOADED_BY_US = re.compile(r"/backends/\w+(?:/\w+)*\.py$")
_REMEDY = "read the source there, and the lines above that one"
_SEARCH_ON = "the log does not show what came first: look at the logs of its other processes"


class Candidate(NamedTuple):
    id: str
    text: str
    remedy: str
    line: Line
    frame: Optional[Frame]


class Ended(NamedTuple):
    """What is known of the job whose log it is. failed: None where nobody knows. message, remedy: of its `failed` event.

    reason: why it is in its state, for a log that shows nothing.
    """

    failed: Optional[bool] = None
    message: str = ""
    remedy: str = ""
    reason: str = ""
    signal: Optional[int] = None


class _Episode:
    """What went wrong since the last sign that things went well: the first of each rank."""

    def __init__(self) -> None:
        self.first: Dict[int, Candidate] = {}

    def add(self, rank: int, found: Candidate) -> None:
        known = self.first.get(rank)
        if known is None or found.line.number < known.line.number:
            self.first[rank] = found

    def best(self) -> Optional[Candidate]:
        sure = [self.first[rank] for rank in (STRONG, _UNKNOWN) if rank in self.first]
        if sure:
            return min(sure, key=lambda found: found.line.number)
        return next((self.first[rank] for rank in (WEAK, _FOLLOWS, _ERROR_LINE) if rank in self.first), None)


class Finder:
    """Lines in, one diagnosis out."""

    def __init__(self) -> None:
        self._rules = Rules(all_rows())
        self._tracebacks = Tracebacks()
        self._now = _Episode()
        self._past = _Episode()
        self._stopping_from = 0  # a line; 0 where nobody has asked for an end
        self._ready_from = 0
        self._done = 0  # samples, as the runner last told
        self._own: Optional[Line] = None
        self._over = ""  # "finished" or "interrupted", as the runner said

    def feed(self, line: Line) -> None:
        if line.text.startswith(_RUNNER):
            self._own = line
            return
        event = _EVENT.match(line.text)
        if event is not None:
            self._event(event.group(1), line)
            return
        taken, chains = self._tracebacks.feed(line)
        for chain in chains:
            self._chain(chain)
        if taken:
            if not self._stopping_from and line.text.startswith("KeyboardInterrupt"):
                self._stopping_from = line.number
            return
        if any(sign in line.text for sign in _SIGNS):
            self._signs(line)
        if line.text and not line.harmless:
            self._plain(line)

    def gap(self) -> None:
        """Lines are missing here."""
        for chain in self._tracebacks.end():
            self._chain(chain)

    def end(self, ended: Ended) -> Optional[Candidate]:
        """The cause, or None where nothing failed."""
        self.gap()
        if ended.failed is False:
            return None
        own = self._own_words(ended)
        interrupted = self._over == "interrupted" or (own is not None and _STOPPED.match(own.text))
        if (interrupted or self._over == "finished") and not ended.failed:
            return None
        found = self._now.best()
        if found is None and (ended.failed or own is not None):
            found = self._past.best()
        if own is not None and not interrupted:
            if not _POINTS.search(own.text + " " + own.remedy):
                return self._with_id(own, found)
            return found if found is not None and found is not self._now.first.get(_ERROR_LINE) else own
        if found is None and ended.failed:
            return _unseen(ended)
        return found

    def _own_words(self, ended: Ended) -> Optional[Candidate]:
        if self._own is None:
            if not ended.message:
                return None
            return Candidate("job-error", ended.message, ended.remedy, Line(0, "", "", "", "", ""), None)
        said = self._own.text[len(_RUNNER) :]
        if ended.message and said.startswith(ended.message):
            text, remedy = ended.message, ended.remedy
        else:
            text, _, remedy = said.rpartition(": ")
            text, remedy = (text, remedy) if text else (said, "")
        return Candidate("job-error", text, remedy, self._own, None)

    def _with_id(self, own: Candidate, found: Optional[Candidate]) -> Candidate:
        known = self._rules.of_exception(own.text, "", bool(self._ready_from))
        frame = found.frame if found is not None else None
        return own._replace(id=known.rule.id if known is not None else own.id, frame=frame)

    def _event(self, name: str, line: Line) -> None:
        if name in ("finished", "interrupted"):
            self._over = name
        elif name == "started":
            self._over = ""
        if name != "warning":
            self._stopping_from = 0
        advanced = name in ("started", "progress") and self._advanced(line.text) and name == "progress"
        if advanced or name == "finished":
            self._went_well()
        if advanced or _READY.search(line.text):
            self._ready_from = self._ready_from or line.number

    def _advanced(self, text: str) -> bool:
        """Whether more is done than the runner told before: it tells every second, however badly things go."""
        found = _DONE.search(text)
        if found is None:
            return False
        before, self._done = self._done, int(found.group(1))
        return self._done > before

    def _went_well(self) -> None:
        # Open tracebacks belong to what is over; their ends may still come.
        for chain in self._tracebacks.end():
            self._chain(chain)
        if self._now.first:
            self._past, self._now = self._now, _Episode()

    def _signs(self, line: Line) -> None:
        if _BANNER.search(line.text):  # a server starts, maybe again
            self._went_well()
            self._stopping_from = self._ready_from = 0
        elif _READY.search(line.text):
            self._ready_from = self._ready_from or line.number
        elif not self._stopping_from and _STOPPING.search(line.text.strip()):
            self._stopping_from = line.number

    def _plain(self, line: Line) -> None:
        is_error = bool(line.level)
        known = self._rules.of_line(line.text, is_error, bool(self._ready_from))
        if (known is None and not is_error) or _NOISE_LINE.search(line.quote):
            return
        if known is not None:
            self._take(known, line, None)
        elif not self._stopped(line):
            self._now.add(_ERROR_LINE, Candidate("unknown", shown(line.text), _SEARCH_ON, line, None))

    def _chain(self, chain: Chain) -> None:
        if chain.ignored or chain.level in ("DEBUG", "INFO", "WARNING", "WARN"):
            return
        if not chain.raised:
            if chain.cut is not None and not self._stopped(chain.cut.line):
                where = "%s:%d" % chain.cut.frame if chain.cut.frame else "its beginning"
                text = "the log ends in the middle of a traceback, at %s" % where
                self._now.add(_FOLLOWS, Candidate("unknown", text, _SEARCH_ON, chain.cut.line, chain.cut.frame))
            return
        if chain.raised[0].kind in _STOP_KINDS:
            return
        matches = [(raised, self._known(raised)) for raised in chain.raised]
        known = [(raised, match) for raised, match in matches if match is not None]
        strong = [pair for pair in known if pair[1].rule.rank == STRONG]
        for raised, match in (strong or known)[:1]:
            self._take(match, raised.line, raised.frame)
            return
        roots = [raised for raised in chain.raised if not _FOLLOWING.search(_said(raised))]
        root = (roots or chain.raised)[0]
        if self._stopped(root.line) and not (root.frame and _LOADED_BY_US.search(root.frame[0])):
            return
        rank, remedy = (_UNKNOWN, _REMEDY) if roots else (_FOLLOWS, _SEARCH_ON)
        id_ = "unknown" if roots else "engine-died"
        self._now.add(rank, Candidate(id_, shown(_said(root)), remedy, root.line, root.frame))

    def _known(self, raised: Raised) -> Optional[Match]:
        ready = 0 < self._ready_from < raised.line.number
        return self._rules.of_exception(_said(raised), raised.frame[0] if raised.frame else "", ready)

    def _take(self, match: Match, line: Line, frame: Optional[Frame]) -> None:
        row = match.rule
        if self._stopped(line) and (row.rank != STRONG or row.id in _AT_STOP):
            return
        self._now.add(row.rank, Candidate(row.id, match.text, match.remedy, line, frame))

    def _stopped(self, line: Line) -> bool:
        return 0 < self._stopping_from < line.number


def _said(raised: Raised) -> str:
    return "%s: %s" % (raised.kind, raised.message) if raised.message else raised.kind


def _unseen(ended: Ended) -> Candidate:
    nowhere = Line(0, "", "", "", "", "")
    if ended.signal == 9:
        remedy = "see `dmesg -T | grep -i 'killed process'` and the memory limit of the container; then start it again"
        return Candidate("killed-by-sigkill", ended.reason or "killed by SIGKILL", remedy, nowhere, None)
    return Candidate("unknown", ended.reason or "it failed, and its log does not say why", _SEARCH_ON, nowhere, None)


def diagnose(path: str, ended: Ended = Ended(), **limits: int) -> Dict[str, Any]:  # noqa: B008 (it cannot be changed)
    """The diagnosis of a log, as the package's docstring tells. Raises OSError."""
    log = Log(path, **limits)
    finder = Finder()
    try:
        for number, data in log:
            if data is None:
                finder.gap()
            elif data and not (_DULL.match(data) and not any(sign in data for sign in _SIGN_BYTES)):
                finder.feed(parse(number, data))
    finally:
        log.close()
    return to_json(finder.end(ended), log.lines, log.skipped_bytes)


def to_json(found: Optional[Candidate], lines: int, skipped_bytes: int) -> Dict[str, Any]:
    counts = {"lines": lines, "skipped_bytes": skipped_bytes}
    if found is None:
        return dict({"failed": False, "cause": None, "remedy": None, "source": None}, **counts)
    number = found.line.number or None
    cause = {"id": found.id, "text": shown(found.text), "line": number, "quote": shown(found.line.quote)}
    source = {"file": found.frame[0], "line": found.frame[1]} if found.frame else None
    remedy = shown(found.remedy) or None
    return dict({"failed": True, "cause": cause, "remedy": remedy, "source": source}, **counts)
