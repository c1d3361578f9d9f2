"""Programs that build an environment, run so that they can be watched and stopped; and what pip means when it fails."""

import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Set

from dflash_tui.node.setup.pins import name_of
from dflash_tui.node.setup.places import size_of
from dflash_tui.node.setup.report import say
from dflash_tui.node.setup.spec import Refusal

_TICK_S = 0.5
_END_S = 10.0
_KEPT_LINES = 400
# What would lead pip out of the environment, and what would lead Python out of it.
_NOT_HANDED_ON = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")


class Interrupted(Exception):
    """Somebody asked the setup to stop."""


class Ended(NamedTuple):
    code: int
    lines: List[str]


class Programs:
    """Runs one program after the other. `stop` may be called from a signal handler."""

    def __init__(self) -> None:
        self.stopping = False
        self._temporary = ""
        self._keep: List[int] = []

    def work_in(self, temporary: str, lock: int) -> None:
        """Programs put what passes through into `temporary`, and hold `lock` for as long as any of them lives."""
        self._temporary = temporary
        self._keep = [lock]

    def stop(self, *_: Any) -> None:
        self.stopping = True

    def run(
        self,
        argv: Sequence[str],
        on_line: Callable[[str], None] = lambda line: None,
        tick: Callable[[], None] = lambda: None,
        limit_s: Optional[float] = None,
        quiet: bool = False,
    ) -> Ended:
        """Runs it to its end, output to the log unless `quiet`. Raises Interrupted, Refusal (it cannot be started)."""
        if self.stopping:
            raise Interrupted
        if not quiet:
            say("$ " + " ".join(argv))
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=self._keep,
                start_new_session=True,
            )
        except OSError as error:
            raise Refusal("%s cannot be started: %s" % (argv[0], error.strerror)) from None
        lines: Deque[str] = deque(maxlen=_KEPT_LINES)

        def take(line: str) -> None:
            lines.append(line)
            if not quiet:
                say(line)
            on_line(line)

        try:
            self._read(argv[0], process, take, tick, limit_s)
        except BaseException:
            _end(process)
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
        return Ended(process.wait(), list(lines))

    def _read(
        self,
        name: str,
        process: "subprocess.Popen[bytes]",
        take: Callable[[str], None],
        tick: Callable[[], None],
        limit_s: Optional[float],
    ) -> None:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        deadline = None if limit_s is None else time.monotonic() + limit_s
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while True:
                if self.stopping:
                    raise Interrupted
                if deadline is not None and time.monotonic() > deadline:
                    raise Refusal("%s did not end within %g s" % (name, limit_s or 0.0))
                tick()
                if not selector.select(_TICK_S):
                    continue
                data = os.read(fd, 65536)
                parts = (rest + data).replace(b"\r", b"\n").split(b"\n")
                rest = parts.pop()
                for part in parts if data else [rest]:
                    if part.strip():
                        take(part.decode("utf-8", "replace").rstrip())
                if not data:
                    return

    def temporary_bytes(self) -> int:
        """Bytes in the folder that wheels are downloaded to."""
        return size_of(self._temporary) if self._temporary else 0

    def _environment(self) -> Dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
        # The setup's own answer to "which GPUs" is none; its check must see them all.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        environment.update(PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        if self._temporary:
            # Wheels of gigabytes pass through it; /tmp of a node is often small, or memory.
            environment["TMPDIR"] = self._temporary
        return environment


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the program and its children, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            process.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue


class PipWatch:
    """What pip's lines say of how far it is."""

    def __init__(self, label: str) -> None:
        self.phase = "%s: choosing packages" % label
        self.collected: Set[str] = set()
        self.installing: List[str] = []
        self._label = label

    def line(self, line: str) -> None:
        words = line.split()
        if line.startswith("Collecting ") and len(words) > 1:
            self.collected.add(name_of(words[1]))
            self.phase = "%s: fetching %s" % (self._label, words[1])
        elif words[:1] == ["Downloading"] and len(words) > 1:
            self.phase = "%s: downloading %s" % (self._label, " ".join(words[1:]).rpartition("/")[2])
        elif line.startswith("Installing collected packages:"):
            self.installing = [name_of(name.strip(",")) for name in words[3:]]
            self.phase = "%s: installing %d packages" % (self._label, len(self.installing))


_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Name or service not known|"
    r"Network is unreachable|ConnectTimeoutError|Connection refused|ReadTimeoutError|Read timed out|ProxyError|"
    r"Connection reset|RemoteDisconnected|No route to host"
)
_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError")
_NO_VERSION = re.compile(
    r"Could not find a version that satisfies the requirement (?P<what>[^(]+?) ?(?:\(from .*?\) ?)?\(from versions: (?P<have>[^)]*)\)"
)
_NO_MATCH = re.compile(r"No matching distribution found for (?P<what>[^(]+)")
_NO_BUILD = re.compile(r"Failed (?:building wheel for|to build) (?P<what>\S+)")
_CLASH = re.compile(r"Cannot install (?P<what>.+?) because these package versions have conflicting dependencies")


def cause_of(lines: Sequence[str], name: str, python: str, wheels: str) -> Refusal:
    """Why pip failed, from the end of what it printed; `name` of the environment, `python` its version."""
    text = "\n".join(lines)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return Refusal(
            "no space is left for the environment %s" % name, "free some, or set XDG_DATA_HOME to a larger disk"
        )
    missing = _NO_VERSION.search(text) or _NO_MATCH.search(text)
    have = (missing.groupdict().get("have") or "none").strip() if missing else "none"
    if _CERTIFICATE.search(text) and have == "none":
        return Refusal(
            "the certificate of the package index is not trusted here",
            "name the authority's file in PIP_CERT or pip.conf on the node, or give a folder with --wheels",
        )
    if _NETWORK.search(text) and have == "none":
        return Refusal(
            "the package index cannot be reached from this node",
            "give a folder of wheels with --wheels (`dflash-tui setup --download DIR` fills one), or set the proxy",
        )
    if missing:
        what = missing.group("what").strip()
        if wheels:
            return Refusal(
                "%s has no wheel of %s for Python %s" % (wheels, what, python),
                "fill it with `dflash-tui setup --download DIR --node-python %s`" % ".".join(python.split(".")[:2]),
            )
        if have == "none":
            return Refusal(
                "the package index has no wheel of %s for Python %s on this machine" % (what, python),
                "name another version or --python; where the index cannot be reached, a folder with --wheels",
            )
        there = ", ".join(have.split(", ")[-3:])
        return Refusal(
            "%s has no wheel for Python %s on this machine (there are %s)" % (what, python, there),
            "name another version (--torch, --vllm, --pins) or another --python",
        )
    clash = _CLASH.search(text)
    if clash:
        return Refusal("%s cannot be had together" % clash.group("what"), "change --torch or --pins")
    unbuilt = _NO_BUILD.search(text)
    if unbuilt or "metadata-generation-failed" in text:
        what = unbuilt.group("what") if unbuilt else "a package"
        return Refusal(
            "%s has no wheel for Python %s, and building it failed" % (what.rstrip(","), python),
            "name another --python, or a version that has one",
        )
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in text:
        return Refusal("a package arrived damaged", "run the setup again; if it happens again: `pip cache purge`")
    errors = [line for line in lines if line.startswith("ERROR:")] or list(lines)
    return Refusal(
        "pip failed: %s" % (errors[-1].replace("ERROR: ", "")[:300] if errors else "it said nothing"),
        "its log says more",
    )
