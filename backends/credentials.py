"""Secrets of a job: read once from a pipe that the supervisor or the agent left open, and kept in memory alone.

They stand in no argument, no environment and no file. Workers get none, but for a server's key in their first order.
"""

from __future__ import annotations

import contextlib
import json
import os

VARIABLE = "DFLASH_TUI_SECRETS_FD"
_secrets: dict[str, str] = {}


def take() -> None:
    """Reads the pipe that `DFLASH_TUI_SECRETS_FD` names, where there is one, and forgets its number."""
    number = os.environ.pop(VARIABLE, "")
    if not number.isdecimal():
        return
    # What is no pipe of ours (the variable came from elsewhere) is no secret either.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with os.fdopen(int(number), "rb") as pipe:
            _secrets.update({str(name): str(value) for name, value in json.loads(pipe.read()).items()})


def hf_token() -> str | None:
    """The hub's token that was sent with the job; None: the node's own login, where it has one, is used."""
    return _secrets.get("HF_TOKEN")


def vllm_api_key() -> str:
    """The key of a vLLM server that runs already; else that of an environment that somebody starts this in by hand; else ""."""
    return _secrets.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY", "")
