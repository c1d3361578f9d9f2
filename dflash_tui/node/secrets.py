"""Secrets on their way from a console to a runner: through pipes alone, in no file, argument, environment or message.

The console sends them beside the launch (or the plan), the agent puts them into a pipe for the supervisor (for the plan's
program), and the supervisor into one for the runner, which finds the number of its end in `VARIABLE`.
"""

import errno
import json
import os
from typing import Any, Dict, Optional

from dflash_tui.node import protocol, verbs
from dflash_tui.node.protocol import Refused

VARIABLE = "DFLASH_TUI_SECRETS_FD"
NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_MOST = 4096  # so that all of them fit into a pipe that nobody reads yet


def of_request(header: protocol.Header, verb: str) -> Dict[str, str]:
    """The secrets of a request, else those of the agent's own environment; none for a verb of the node, which asks no hub.

    Raises Refused, which shows no value.
    """
    given: Any = header.get("secrets")
    if given is None:
        given = {}
    if not isinstance(given, dict) or any(name != "HF_TOKEN" for name in given):
        raise _bad("secrets must be an object with HF_TOKEN alone")
    for name, value in given.items():
        if not isinstance(value, str) or not usable(value):
            raise _bad("the secret %s is not a text of up to %d visible ASCII characters" % (name, _MOST))
    if verbs.is_of_node(verb):
        return {}
    if given:
        return dict(given)
    # Started by a shell that has a token: its jobs get it as if it had been sent, and not in their environment.
    mine = next((os.environ[name].strip() for name in NAMES if os.environ.get(name, "").strip()), "")
    return {"HF_TOKEN": mine} if mine and usable(mine) else {}


def usable(value: str) -> bool:
    """Whether a text can be a token: blanks and line ends would break the request that carries it, and be shown."""
    return 0 < len(value) <= _MOST and all("!" <= letter <= "~" for letter in value)


def _bad(message: str) -> Refused:
    return Refused(protocol.BAD_REQUEST, message, "give the token as it was made, in one line")


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
