"""The options that a `vllm serve` accepts, from its own help. Starts that Python, imports nothing of it here."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backends.errors import JobError, one_line
from backends.vllm.found import Found

# Wide enough that argparse wraps no line.
_COLUMNS = "4000"
# A section of the help, as "CacheConfig:"; the first is argparse's own.
_SECTION = re.compile(r"(\S[^:]*):$")
# Its long and short names with their values, then the help: on the same line where the names are short.
_OPTION = re.compile(r"  (-\S.*?)(?:\s{2,}(\S.*))?$")
_HELP = re.compile(r"\s{8,}(\S.*)$")
_DEFAULT = re.compile(r"\s*\(default: (?P<value>.*)\)\s*$", re.DOTALL)
_FIRST_SENTENCE = re.compile(r".*?[.!?](?=\s+[A-Z\"'`(-]|$)")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Option:
    """names: the long ones first, as "--max-model-len". value: what stands for its value, "" for a switch. default: None where
    the help names none. help: its first sentence. section: the heading that it stands under.
    """

    names: tuple[str, ...]
    value: str
    default: str | None
    help: str
    section: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "names": list(self.names)}

    def has(self, words: Sequence[str]) -> bool:
        """Whether each word is in its names or its help."""
        text = " ".join((*self.names, self.help)).casefold().replace("_", "-")
        return all(word.casefold().replace("_", "-") in text for word in words)


def serve_options(found: Found, limit_s: float) -> list[Option]:
    """Asks this vLLM. Raises JobError where it does not answer, with its own last line."""
    env = {**os.environ, "COLUMNS": _COLUMNS, "TERM": "dumb", "PAGER": "cat", "VLLM_LOGGING_LEVEL": "ERROR"}
    # A plan sees no cards, and vLLM's options are those of the device that it finds.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [found.python, "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    remedy = f"run it on the node: {' '.join(command)}"
    # A module run with -m searches the folder that it is started in first.
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                cwd=empty,
                env=env,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JobError(
                f"vLLM {found.version} did not say its options within {limit_s:g} s", "is its disk slow? try again"
            ) from None
        except OSError as error:
            raise JobError(f"the Python {found.python} does not run: {one_line(error)}", remedy) from None
    options = parse(done.stdout)
    if done.returncode or not options:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
        raise JobError(
            f"vLLM {found.version} does not say its options, it ended with status {done.returncode}: {said[-1][:300]}",
            remedy,
        )
    return options


def parse(text: str) -> list[Option]:
    """The options of argparse's help, printed wide; what else stands in it is passed over."""
    return [_option(head, lines, section) for head, lines, section in _entries(text)]


def _entries(text: str) -> Iterator[tuple[str, list[str], str]]:
    section, head, lines = "", "", [""]
    for line in text.splitlines():
        option, heading = _OPTION.match(line), _SECTION.match(line)
        if option or heading or (line and not line.startswith(" ")):
            if head:
                yield head, lines, section
            head = ""
        if heading:
            section = heading.group(1)
        elif option:
            head, lines = option.group(1), [option.group(2) or ""]
        elif head and (more := _HELP.match(line)):
            lines.append(more.group(1))
    if head:
        yield head, lines, section


def _option(head: str, lines: list[str], section: str) -> Option:
    names, value = [], ""
    # Commas also stand between the choices of a value, which are in braces.
    for part in re.split(r", (?=-)", head):
        name, _, rest = part.partition(" ")
        names.append(name)
        value = rest or value
    told = " ".join(line for line in lines if line)
    default = _DEFAULT.search(told)
    about = next((number for number, line in enumerate(lines) if line.startswith("- ")), len(lines))
    told = " ".join(lines[:about]) if about < len(lines) else told[: default.start()] if default else told
    sentence = _FIRST_SENTENCE.match(told)
    first = " ".join((sentence.group() if sentence else told).split())
    return Option(
        tuple(sorted(names, key=lambda name: not name.startswith("--"))),
        value,
        default.group("value") if default else None,
        first if len(first) <= _LONGEST else first[: _LONGEST - 1] + "…",
        section,
    )
