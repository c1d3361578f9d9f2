"""What a vLLM server says in the job's log while it starts and runs: phases, the size of its KV cache, failures.

The server writes there itself; this reads what it adds. Words as in the logs of 0.20.1 to 0.32.0.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import deque

_BLOCK = 1 << 20
_LONGEST_LINE = 1 << 16
_MOST_FAILURES = 64
# Of the server's own words: its remedies stand at the end of what can be long sentences.
_LONGEST_WORDS = 700
# Samples that were under way still come for a while after an error that ends the server.
_SURVIVED_S = 60.0
# A server whose worker failed ends within seconds, or never: two H200s held each other at full load until they were killed.
_ENDS_WITHIN_S = 60.0

# In this order; a start goes through most of them once, and never back.
PHASES = (
    ("importing vLLM", ""),
    ("reading the model's configuration", r"non-default args|Resolved architecture|Using max model len"),
    ("starting the engine", r"Initializing a V1 LLM engine"),
    ("loading the weights", r"Starting to load model|checkpoint shards:"),
    ("compiling", r"Dynamo bytecode transform|Compiling a graph|torch_compile_cache"),
    ("profiling, making the KV cache", r"[Pp]rofiling|Available KV cache memory|KV cache size:"),
    (
        "warming up, capturing graphs",
        r"Capturing CUDA graph|kernel_warmup|init engine \(profile|Autotuning process starts",
    ),
    ("starting the HTTP server", r"Starting vLLM (?:API )?server|Started server process|Application startup complete"),
)
_SIGNS = [(name, re.compile(pattern)) for name, pattern in PHASES if pattern]
_KV_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")
_WHO = re.compile(r"\(\w[\w-]* pid=(\d+)\)")
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) *)?(?:(?:ERROR|CRITICAL) [\d-]+ [\d:.,]+ *(?:\[[^\]]*\] *)?)?")
# Lines of the runner itself, and of its workers: they stand in the same log.
_OURS = re.compile(r"^(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ |backends: )")
_WRITE_FAILED = re.compile(r"Hidden-states write failed for [^:]*: (?P<why>.+)")
_ARGUMENTS = re.compile(
    r"^(?:[\w./ -]{1,80}: )?error: (?P<what>(?:unrecognized arguments|argument |the following arguments|ambiguous option).*)"
)
_RAISED = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): *(?P<what>.*)")
_VALUE = re.compile(r"^ {2}(?:Value|Assertion) error, (?P<what>.+?)(?: \[type=.*)?$")
# Raised because something else had gone wrong.
_FOLLOWS = re.compile(
    r"[Ss]ee root cause above|EngineDeadError|initialization failed|CalledProcessError|failed to be inspected"
    r"|^RuntimeError: (?:Executor failed|Worker failed|Error raised in subprocess)"
)
# No start comes to its end after a worker's exception.
_FATAL = re.compile(r"WorkerProc hit an exception")
_DIED = re.compile(r"(?P<what>(?:Worker|Engine core) proc \S+ died unexpectedly(?: \(exit code: -?\d+\))?)")
_FULL = re.compile(
    r"No space left on device|[Qq]uota exceeded|StorageFull|\berrno 28\b|os error 28|Errno 28", re.IGNORECASE
)


def tells_a_full_disk(text: str) -> bool:
    return _FULL.search(text) is not None


class ServerLog:
    """Reads the lines that come into a log from now on. fd: the log; one that is no regular file (a terminal) tells nothing.

    phase: the furthest that was seen. kv_tokens: of its KV cache, None where not told yet. arguments: why it does not take its
    arguments. Any thread may call any of it.
    """

    def __init__(self, fd: int = 2) -> None:
        self.phase = PHASES[0][0]
        self.kv_tokens: int | None = None
        self._lock = threading.Lock()
        # Of states that could not be written; each belongs to one file that is missing.
        self._failures: deque[str] = deque(maxlen=_MOST_FAILURES)
        self._session = 0
        self._rest = b""
        self._said = ""
        self._said_at = 0.0
        self._fatal_at: float | None = None
        self.arguments = ""
        self._fd: int | None = None
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode):
            try:
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # unreadable, as a log may be that another user made
                return
            self._offset = info.st_size

    def of(self, session: int) -> None:
        """A start begins: whose lines count from now on."""
        with self._lock:
            self._session = session
            self.phase, self.kv_tokens, self.arguments = PHASES[0][0], None, ""
            self._said, self._fatal_at = "", None
            self._failures.clear()

    def read(self) -> None:
        """Takes in what came since the last call."""
        if self._fd is None:
            return
        with self._lock:
            while data := os.pread(self._fd, _BLOCK, self._offset):
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
                self._rest = self._rest[-_LONGEST_LINE:]
                for line in lines:
                    self._take(line.decode("utf-8", "replace"))

    def said(self) -> str:
        """The server's own words for why it ended, "" where it said none: the first error that is no consequence."""
        with self._lock:
            return self.arguments or self._said

    def hangs(self) -> bool:
        """Whether a worker of the server failed so long ago that the server would have ended by now."""
        with self._lock:
            return self._fatal_at is not None and time.monotonic() - self._fatal_at > _ENDS_WITHIN_S

    def survived(self, last_good: float) -> None:
        """A sample came at this moment (monotonic clock): what was said well before it was no end."""
        with self._lock:
            if last_good - self._said_at > _SURVIVED_S:
                self._said = ""

    def failed_write(self) -> tuple[str, bool]:
        """What vLLM said of the first write of states that failed and was not asked for yet, and whether of a full disk."""
        with self._lock:
            why = self._failures.popleft() if self._failures else ""
        return why, tells_a_full_disk(why)

    def _take(self, line: str) -> None:
        if not line or _OURS.match(line) or self._of_another(line):
            return
        names = [name for name, _ in PHASES]
        for name, sign in _SIGNS[max(names.index(self.phase) - 1, 0) :]:
            if sign.search(line):
                self.phase = max(self.phase, name, key=names.index)
        size = _KV_SIZE.search(line)
        if size:
            self.kv_tokens = int(size.group(1).replace(",", ""))
        failed = _WRITE_FAILED.search(line)
        if failed:
            self._failures.append(_short(failed["why"]))
        text = line[len(_PREFIX.match(line).group()) :]  # type: ignore[union-attr]  # it may be empty: it always matches
        if self._fatal_at is None and _FATAL.search(text):
            self._fatal_at = time.monotonic()
        arguments = _ARGUMENTS.match(text)
        if arguments:
            self.arguments = _short(arguments["what"])
        raised = _RAISED.match(text)
        if raised and not _FOLLOWS.search(text):
            self._keep(text)
        died = _DIED.search(text)
        if died:
            self._keep(died["what"])
        # pydantic's reason stands under its headline.
        value = _VALUE.match(text)
        if value and not _FOLLOWS.search(value["what"]):
            self._said = ""
            self._keep(value["what"])

    def _keep(self, text: str) -> None:
        if not self._said:
            self._said, self._said_at = _short(text), time.monotonic()

    def _of_another(self, line: str) -> bool:
        """Whether a line names a process of another server: several write into one log."""
        who = _WHO.match(line)
        if who is None or not self._session:
            return False
        try:
            return os.getsid(int(who.group(1))) != self._session
        except OSError:  # gone: its last words may be what is looked for
            return False


def _short(text: str) -> str:
    """In one line; what is cut says so."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST_WORDS else f"{words[: _LONGEST_WORDS - 1]}…"
