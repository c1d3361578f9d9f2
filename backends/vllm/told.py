"""A server's command line as events and the log may keep it: whole, but for values that are secrets. Loads no torch.

The node side has rules of its own (`dflash_tui.node.hiding`), for it is shipped without this package; both are held to the same cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
# A count of tokens is none: --max-num-batched-tokens, --long-prefill-token-threshold, --tokenizer.
_SECRET = re.compile(
    r"TOKEN(?!IZE|S(?![A-Z])|[_-]THRESHOLD)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH|[_-]PWD$|PASS$",
    re.IGNORECASE,
)
_URL = re.compile(r"(?<=://)[^/\s'\"]+@")
_QUERY = re.compile(r"([?&;][\w.-]*(?:token|key|secret|passw|sig|credential)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE)
_HEADER = re.compile(r"(\b(?:authorization|cookie|x-[\w-]*(?:token|key))\s*:\s*)[^\r\n'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"(\bBearer\s+)[^\s'\"]+", re.IGNORECASE)
# Tokens of Hugging Face, GitHub, OpenAI, AWS.
_LOOKS = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{12,})")


def without_secrets(command: Sequence[str]) -> list[str]:
    """The command with `***` for every value of an option, or in an option's JSON, that is named like a secret."""
    shown: list[str] = []
    secret = False
    for word in command:
        option = word.startswith("-")
        name, equals, value = word.partition("=")
        if secret and not option:
            shown.append(HIDDEN)
            continue
        secret = option and _SECRET.search(name) is not None
        if secret and equals:
            shown.append(name + equals + HIDDEN)
            secret = False
        elif option and equals:
            shown.append(name + equals + _value(value))
        else:
            shown.append(_value(word))
    return shown


def _value(text: str) -> str:
    """A value as it was written, where there is nothing to hide in it."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            # vLLM takes no such value either; what it would hold is not known.
            return HIDDEN if _SECRET.search(text) else text
        shown = _without(data)
        return text if shown == data else json.dumps(shown)
    return _plain(text)


def _plain(text: str) -> str:
    """A text without what is a secret by its place in an address or a header, or by its looks."""
    text = _QUERY.sub(r"\g<1>" + HIDDEN, _URL.sub(HIDDEN + "@", text))
    text = _BEARER.sub(r"\g<1>" + HIDDEN, _HEADER.sub(r"\g<1>" + HIDDEN, text))
    return _LOOKS.sub(HIDDEN, text)


def _without(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: HIDDEN if _SECRET.search(name) else _without(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_without(value) for value in data]
    return _plain(data) if isinstance(data, str) else data
