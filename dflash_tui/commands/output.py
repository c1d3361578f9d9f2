"""What a command prints: tables for people, one JSON document for scripts. What a node wrote is cleaned before a terminal sees it."""

from __future__ import annotations

import codecs
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from dflash_tui.commands.outcome import CommandError

_MAX_SEQUENCE = 4096  # an escape sequence longer than this is none
_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, clipboard, links
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    r"|[ -/]*[0-OQ-WYZ\\`-~])"  # the short ones
)
# With what steers besides: the direction of text; and halves of surrogate pairs, which no stream takes.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """Text of a node as one line that cannot steer the terminal."""
    return " ".join(_CONTROL.sub("", _SEQUENCE.sub("", text)).split())


class TerminalCleaner:
    """Bytes of a log in, text without escape sequences and control characters out; sequences may be cut between two feeds."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes, final: bool = False) -> str:
        text = _SEQUENCE.sub("", self._held + self._decoder.decode(data, final))
        start = text.find("\x1b")
        self._held = ""
        if start >= 0 and not final and len(text) - start < _MAX_SEQUENCE:
            text, self._held = text[:start], text[start:]
        return _CONTROL.sub("", text)


def console(stream: IO[str] | None = None) -> Console:
    """A rich console that takes text as it is; where nobody looks at it, no line is wrapped."""
    made = Console(file=stream or sys.stdout, markup=False, emoji=False, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 10_000
    return made


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without lines; columns named in `right` are aligned there."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    numbers = set(right)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def to_json(value: Any) -> Any:
    """Facts as JSON: dataclasses become objects."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value


def print_json(document: Any) -> None:
    """The one JSON document of a command; control characters stand in it as JSON's escapes, and so does what stdout cannot say."""
    text = json.dumps(to_json(document), indent=2, ensure_ascii=not _takes_all(sys.stdout))
    # Outside of strings JSON has no character of these but the newline.
    sys.stdout.write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    sys.stdout.flush()


def _takes_all(stream: IO[str]) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def complain(line: str) -> None:
    """One line on stderr."""
    print(f"dflash-tui: {clean(line)}", file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Something worth knowing, for people only: on stderr, so that stdout stays a result."""
    print(clean(line), file=sys.stderr, flush=True)


def report(error: CommandError, as_json: bool) -> None:
    """An error that ends a command: a line on stderr, and the JSON document where one was asked for."""
    complain(str(error))
    if as_json:
        print_json(error.to_json())


def amount(value: float | None) -> str:
    """Bytes with a binary unit; "n/a" where the node cannot tell."""
    if value is None:
        return "n/a"
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def number(value: float | None, unit: str = "", digits: int = 0) -> str:
    """A number with thousands separators and its unit; "n/a" where the node cannot tell."""
    if value is None:
        return "n/a"
    text = f"{value:,.{digits}f}"
    return f"{text} {unit}" if unit else text


def duration(seconds: float | None) -> str:
    """Seconds as 8 s, 2:05 or 3:07:09."""
    if seconds is None:
        return "n/a"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock(moment: float | None) -> str:
    """A time in the user's zone."""
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
