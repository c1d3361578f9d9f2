"""Secrets in names, values and arguments of a process: what may be shown and kept of them, which is not their value."""

import re
from typing import Dict, List, Optional, Tuple

HIDDEN = "***"
# TOKENIZERS_PARALLELISM, KEYBOARD and GIT_AUTHOR_NAME hold none.
_WORDS = r"KEY(?!BOARD|MAP)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH(?!OR)|(?:^|[_-])PAT$|(?:^|[_-])PASS$"
_NAME = re.compile(r"TOKEN(?!IZE)|" + _WORDS, re.IGNORECASE)
# Of an option tokens are more often counted than kept secret: --max-num-batched-tokens.
_OPTION = re.compile(r"TOKEN(?!IZE|S\b)|" + _WORDS, re.IGNORECASE)
# A user and a password before the host of a URL.
_URL = re.compile(r"(?<=://)[^/\s@'\"]+@")
_QUERY = re.compile(r"([?&;][\w.-]*(?:token|key|secret|passw|sig|credential)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE)
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
    """The text without what is a secret by its looks or its place in a URL."""
    return _LOOKS.sub(HIDDEN, _QUERY.sub(r"\g<1>" + HIDDEN, _URL.sub(HIDDEN + "@", text)))


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
    """A command line with `***` for the values of options that are named like secrets."""
    shown: List[str] = []
    secret = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if secret and not word.startswith("-"):
            shown.append(HIDDEN)
        elif equals and _secret_option(name):
            shown.append(name + equals + HIDDEN)
        else:
            shown.append(masked(word))
        secret = not equals and _secret_option(word)
    return shown


def _secret_option(name: str) -> bool:
    return name.startswith("-") and _OPTION.search(name) is not None
