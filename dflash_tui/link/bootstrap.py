"""From a login shell to a running agent: one command line, and the reader of what comes back before the first frame.

The command is `exec /bin/sh -c '…'`. Between the single quotes stands no quote, backslash, exclamation mark or newline,
so fish and csh pass it on as sh does. It finds a Python of 3.8 or newer and runs `on_node.py` with it.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dflash_tui.link.bundle import Bundle
from dflash_tui.link.errors import LinkError

# In the order in which they are tried; names without a slash are looked up on the node's PATH.
PYTHONS = (
    "python3",
    *(f"python3.{minor}" for minor in range(14, 7, -1)),
    "/usr/bin/python3",
    "/usr/local/bin/python3",
    "/opt/conda/bin/python3",
    "/opt/miniconda3/bin/python3",
    "/opt/venv/bin/python3",
    "/venv/main/bin/python3",
    "$HOME/miniconda3/bin/python3",
    "$HOME/anaconda3/bin/python3",
    "$HOME/.local/bin/python3",
    "/usr/libexec/platform-python",
    "/opt/python/*/bin/python3",
)
_RUN = "import sys,base64,zlib;exec(zlib.decompress(base64.b64decode(sys.argv[1])))"
_CHECK = "import sys,zlib;sys.exit(sys.version_info<(3,8))"
_SAFE_PATH = re.compile(r"[A-Za-z0-9_./+@%=,-]+")
_MAX_NOISE = 1 << 20


@cache
def _program() -> str:
    return base64.b64encode(zlib.compress(Path(__file__).with_name("on_node.py").read_bytes(), 9)).decode()


def agent_script(bundle: Bundle, nonce: str, default_python: str | None, first_python: str | None = None) -> str:
    """The sh script that becomes the agent; `first_python` is tried before all others, and is the last worker Python."""
    config = {
        "nonce": nonce,
        "hash": bundle.hash,
        "size": len(bundle.data),
        "default_python": default_python,
        "fallback_python": first_python,
    }
    text = base64.b64encode(json.dumps(config).encode()).decode()
    pythons = list(PYTHONS)
    for extra, place in ((first_python, 0), (default_python, len(pythons) + 1)):
        if extra and _SAFE_PATH.fullmatch(extra):
            pythons.insert(place, extra)
    return (
        f"for p in {' '.join(pythons)}; do "
        f'if "$p" -I -S -c "{_CHECK}" </dev/null >/dev/null 2>&1; then '
        f'exec "$p" -I -S -c "{_RUN}" {_program()} {text}; fi; done; '
        f"echo; echo dflash-tui-boot {nonce} no-python; exit 69"
    )


def remote_command(script: str) -> str:
    """`script` as a line for whatever login shell the user has."""
    return f"exec /bin/sh -c '{script}'"


@dataclass(frozen=True, slots=True)
class Booted:
    """The agent speaks; `rest` are the first bytes of its frames."""

    rest: bytes


@dataclass(frozen=True, slots=True)
class BundleWanted:
    """The node waits for exactly the bytes of the bundle on its stdin."""


class Preface:
    """Reads what the node prints before the first frame; what a login shell prints is passed over.

    nonce: of this connection; only lines that carry it are ours.
    """

    def __init__(self, nonce: str) -> None:
        self._ours = re.compile(rb"dflash-tui-(?:agent %(n)s\n|boot %(n)s ([^\n]*)\n)" % {b"n": nonce.encode("ascii")})
        self._buffer = b""
        self._dropped = 0

    def feed(self, data: bytes) -> Booted | BundleWanted | None:
        """What `data` brings about. Raises LinkError ("no-python", "bootstrap-failed")."""
        self._buffer += data
        found = self._ours.search(self._buffer)
        if found is None:
            if len(self._buffer) > 65536:
                self._dropped += len(self._buffer) - 4096
                self._buffer = self._buffer[-4096:]
            if self._dropped > _MAX_NOISE:
                raise LinkError("bootstrap-failed", "the login shell prints without end", "make it quiet for ssh")
            return None
        rest = self._buffer[found.end() :]
        if found.group(1) is None:
            return Booted(rest)
        self._buffer = rest
        word, _, text = found.group(1).decode("utf-8", "replace").partition(" ")
        if word == "need":
            return BundleWanted()
        if word == "no-python":
            raise LinkError(
                "no-python",
                "no Python 3.8 or newer was found on the node (looked for python3 on the PATH and in the usual places)",
                "install one there, or name one with python in the configuration",
            )
        raise LinkError(
            "bootstrap-failed", f"the agent could not be started: {text}", "make room or a writable ~/.cache"
        )

    @property
    def noise(self) -> str:
        """The last line that was not ours: a login shell often says there why it ends."""
        lines = [line.strip() for line in self._buffer.decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""
