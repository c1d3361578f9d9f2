"""The hub's token, and the key of a vLLM server: where they are on this machine, and with which jobs they go to a node.

It is sent where a job names something on the hub, in a field of its own that no node writes to a file. A token that was
asked for or named by an option comes first; else that of HF_TOKEN, else that of `hf auth login`. As everywhere,
HF_HUB_DISABLE_IMPLICIT_TOKEN=1 keeps the last two here; then the node's own login is used, where it has one.
VLLM_API_KEY of this environment goes with a job that names a server that runs already (`server_url`).
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.hubname import model_name, uses_hub
from backends.questions import QUESTIONS, CapabilitiesSpec
from backends.spec import SPECS, ExtractSpec, Spec, SpecError, VerifySpec
from dflash_tui.config import ConfigError, Settings
from dflash_tui.node.secrets import HUB_NAMES, SERVER_KEY, usable

_TRUE = ("1", "on", "yes", "true")


def given(file: Path | None, ask: bool) -> str:
    """The token of `--hf-token-file` or `--ask-hf-token`; "" where neither is given. Raises ConfigError, which shows no token."""
    if file is not None and ask:
        raise ConfigError("a token is named twice, by --hf-token-file and --ask-hf-token; leave one out")
    if file is not None:
        return _of_file(file)
    return _asked() if ask else ""


def secrets_for(verb: str, spec: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """What is sent beside a plan or a launch: HF_TOKEN where the job names something on the hub, VLLM_API_KEY where it names a
    server, each where there is one.

    Raises ConfigError where there is one that cannot be used.
    """
    try:
        read = {**SPECS, **QUESTIONS}[verb].from_json(spec)
        of_a_question = isinstance(read, CapabilitiesSpec) and model_name(read.model) is not None
        of_the_hub = uses_hub(read) or of_a_question
    except (KeyError, SpecError):
        return {}  # what is wrong with it the node says
    found = _token_for(read, settings) if of_the_hub else {}
    if isinstance(read, ExtractSpec) and read.server_url and (key := os.environ.get(SERVER_KEY, "").strip()):
        found[SERVER_KEY] = _checked(key, SERVER_KEY)
    return found


def _token_for(read: Spec, settings: Settings) -> dict[str, str]:
    if settings.hf_token:
        return {"HF_TOKEN": settings.hf_token}
    # A manifest may name a model on the hub; whether it does is not known here.
    if isinstance(read, VerifySpec) and read.model is None:
        return {}
    token = _own()
    return {"HF_TOKEN": token} if token else {}


def _own() -> str:
    """The token that the hub's own programs would take on this machine, "" where there is none."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in _TRUE:
        return ""
    for name in HUB_NAMES:
        if text := os.environ.get(name, "").strip():
            return _checked(text, name)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(os.path.expanduser(os.environ.get("HF_HOME") or Path(cache) / "huggingface"))
    file = Path(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or home / "token"))
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""  # nobody has logged in
    return _checked(text, str(file)) if text else ""


def _of_file(file: Path) -> str:
    try:
        text = Path(os.path.expanduser(file)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"the token file {file} cannot be read: {why}; name another with --hf-token-file") from None
    return _checked(text, str(file))


def _asked() -> str:
    if not sys.stdin.isatty():
        raise ConfigError("--ask-hf-token needs a terminal to ask on; use --hf-token-file")
    try:
        return _checked(getpass.getpass("Hugging Face token (it is not shown): ").strip(), "the terminal")
    except EOFError:
        raise ConfigError("no token was typed; type one, or leave --ask-hf-token out") from None


def _checked(text: str, where: str) -> str:
    if not usable(text):
        raise ConfigError(f"what {where} holds is no token: it must be one word of visible ASCII; mend it")
    return text
