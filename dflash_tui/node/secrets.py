"""Secrets on their way from a console to a runner: through pipes alone, in no file, argument, environment or message.

The console sends them beside the launch (or the plan), the agent puts them into a pipe for the supervisor (for the plan's
program), and the supervisor into one for the runner, which finds the number of its end in `VARIABLE`.
"""

import errno
import json
import os
from typing import Any, Dict, Optional, Tuple

from dflash_tui.node import protocol, verbs
from dflash_tui.node.protocol import Refused

VARIABLE = "DFLASH_TUI_SECRETS_FD"
HUB_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Of a vLLM server that runs already: it goes with jobs that name one.
SERVER_KEY = "VLLM_API_KEY"
NAMES = (*HUB_NAMES, SERVER_KEY)
_SENT = ("HF_TOKEN", SERVER_KEY)
_MOST = 4096  # so that all of them fit into a pipe that nobody reads yet


def of_request(header: protocol.Header, verb: str) -> Dict[str, str]:
    """The secrets of a request, else those of the agent's own environment; none for a verb of the node, which asks no hub.

    Raises Refused, which shows no value.
    """
    given: Any = header.get("secrets")
    if given is None:
        given = {}
    if not isinstance(given, dict) or any(name not in _SENT for name in given):
        raise _bad("secrets must be an object with %s alone" % " and ".join(_SENT))
    for name, value in given.items():
        if not isinstance(value, str) or not usable(value):
            raise _bad("the secret %s is not a text of up to %d visible ASCII characters" % (name, _MOST))
    if verbs.is_of_node(verb):
        return {}
    # Started by a shell that has a token: its jobs get it as if it had been sent, and not in their environment.
    found = {"HF_TOKEN": _own(HUB_NAMES)}
    if _names_a_server(header):
        found[SERVER_KEY] = _own((SERVER_KEY,))
    found.update(given)
    return {name: value for name, value in found.items() if value}


def _own(names: Tuple[str, ...]) -> str:
    """What the agent's own environment has under the first of these names, "" where it is nothing to use."""
    mine = next((os.environ[name].strip() for name in names if os.environ.get(name, "").strip()), "")
    return mine if usable(mine) else ""


def _names_a_server(header: protocol.Header) -> bool:
    """Whether the spec of a launch, or of a plan, names a vLLM server that runs already."""
    about: Any = header.get("launch") or header.get("spec")
    spec = about.get("spec") if isinstance(about, dict) else None
    return isinstance(spec, dict) and bool(spec.get("server_url"))


def usable(value: str) -> bool:
    """Whether a text can be a token: blanks and line ends would break the request that carries it, and be shown."""
    return 0 < len(value) <= _MOST and all("!" <= letter <= "~" for letter in value)


def _bad(message: str) -> Refused:
    return Refused(protocol.BAD_REQUEST, message, "give it as it was made, in one line")


def pipe_with(values: Optional[Dict[str, str]]) -> int:
    """The end to read of a pipe that holds them, the other end closed; -1 where there are none. Raises OSError."""
    if not values:
        return -1
    data = json.dumps(values).encode("ascii")
    read, write = os.pipe()
    try:
        # A user with very many pipes gets small ones: better no job than an agent that waits for a reader.
        os.set_blocking(write, False)
        if os.write(write, data) < len(data):
            raise OSError(errno.EAGAIN, "the system's pipes are too small for a token")
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    return read


def take(fd: int) -> Dict[str, str]:
    """What an inherited pipe holds; it is closed. {} for -1."""
    if fd < 0:
        return {}
    with os.fdopen(fd, "rb") as pipe:
        values: Dict[str, str] = json.loads(pipe.read().decode("ascii"))
    return values
