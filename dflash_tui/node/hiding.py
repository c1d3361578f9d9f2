"""Secrets in names, values and arguments of a process: what may be shown and kept of them, which is not their value."""

import json
import re
from typing import Any, Dict, List, Optional, Tuple

HIDDEN = "***"
# TOKENIZERS_PARALLELISM, KEYBOARD, GIT_AUTHOR_NAME, PWD and GIT_ASKPASS hold none; SSHPASS and MYSQL_PWD do.
_WORDS = (
    r"KEY(?!BOARD|MAP)|SECRET|PASSW|PASSPHRASE|PASSCODE|CREDENTIAL|COOKIE|AUTH(?!OR(?!I))|(?:^|[_-])PAT$"
    r"|(?<!ASK)(?<!BY)(?<!COM)PASS$|(?<=.)(?<!^OLD)PWD$"
)
_NAME = re.compile(r"TOKEN(?!IZE)|" + _WORDS, re.IGNORECASE)
# Of an option tokens are more often counted than kept secret: --max-num-batched-tokens, --long-prefill-token-threshold.
_OPTION = re.compile(r"TOKEN(?!IZE|S(?![A-Z])|[_-]THRESHOLD)|" + _WORDS, re.IGNORECASE)
# A user and a password before the host of a URL; a password may hold an @.
_URL = re.compile(r"(?<=://)[^/\s'\"]+@")
_QUERY = re.compile(r"([?&;][\w.-]*(?:token|key|secret|passw|sig|credential)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE)
# name=value in a list of such, as a database is named; "name": "value" in what is nearly JSON.
_PAIR = re.compile(r"(?<![^\s,;])([A-Za-z][\w.-]*)(=)('[^']*'|\"[^\"]*\"|[^\s,;'\"]+)")
_QUOTED = re.compile(r"([\"'])([\w.-]+)(\1\s*[:=]\s*)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;}\]\"']+)")
_HEADER = re.compile(r"(\b(?:authorization|cookie|x-[\w-]*(?:token|key))\s*:\s*)[^\r\n'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"(\bBearer\s+)[^\s'\"]+", re.IGNORECASE)
# What is a secret by its looks: tokens of Hugging Face, GitHub, GitLab, Slack, OpenAI, AWS; keys in PEM.
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{12,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)


def is_secret(name: str) -> bool:
    """Whether what is called so is a secret whatever its value."""
    return _NAME.search(name) is not None


def masked(text: str) -> str:
    """The text without what is a secret by its looks, by its place in a URL, or by its name in JSON and in lists of names."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            pass  # it only looks like JSON: its names are looked for below
        else:
            shown = _without(data)
            # As it was written, where it holds none.
            return text if shown == data else json.dumps(shown, ensure_ascii=False)
    return _plain(text)


def environment(given: Dict[str, str]) -> Tuple[Dict[str, Optional[str]], List[str]]:
    """The variables by name, None in place of a secret's value; and the names of those that do not show their whole value."""
    shown: Dict[str, Optional[str]] = {}
    hidden: List[str] = []
    for name in sorted(given):
        shown[name] = None if is_secret(name) else masked(given[name])
        if shown[name] != given[name]:
            hidden.append(name)
    return shown, hidden


def arguments(argv: List[str]) -> List[str]:
    """A command line with `***` for the values, one or more, of options that are named like secrets."""
    shown: List[str] = []
    secret = False
    for word in argv:
        option = word.startswith("-")
        name, equals, value = word.partition("=")
        if secret and not option:
            shown.append(HIDDEN)
            continue
        if option and equals:
            shown.append(name + equals + (HIDDEN if _secret_option(name) else masked(value)))
        else:
            shown.append(masked(word))
        secret = _secret_option(word) and not equals
    return shown


def _secret_option(name: str) -> bool:
    return name.startswith("-") and _OPTION.search(name) is not None


def _without(data: Any) -> Any:
    """JSON's data without the values of names that are secrets."""
    if isinstance(data, dict):
        return {
            name: HIDDEN if _OPTION.search(name) and value not in (None, True, False, "") else _without(value)
            for name, value in data.items()
        }
    if isinstance(data, list):
        return [_without(value) for value in data]
    return masked(data) if isinstance(data, str) else data


def _plain(text: str) -> str:
    text = _QUERY.sub(r"\g<1>" + HIDDEN, _URL.sub(HIDDEN + "@", text))
    text = _BEARER.sub(r"\g<1>" + HIDDEN, _HEADER.sub(r"\g<1>" + HIDDEN, text))
    text = _PAIR.sub(lambda found: found[1] + found[2] + HIDDEN if _OPTION.search(found[1]) else found[0], text)
    text = _QUOTED.sub(_hide_quoted, text)
    return _LOOKS.sub(HIDDEN, text)


def _hide_quoted(found: "re.Match[str]") -> str:
    if _OPTION.search(found[2]) is None:
        return found[0]
    quote = found[4][0] if found[4][0] in "'\"" else ""
    return found[1] + found[2] + found[3] + quote + HIDDEN + quote
