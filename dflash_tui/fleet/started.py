"""What a job was started with, and as text that a shell runs. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\\']")
_HAS_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INDENT = "    "
_NEXT = " \\\n"
_WIDTH = 72


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A vLLM server that the job started; of its starts the last one.

    environment: what was set beside the runner's own; None in place of a secret's value.
    """

    worker: int | None
    pid: int | None
    argv: tuple[str, ...]
    cwd: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartedWith:
    """The command line of a job's runner. time: seconds since 1970 by the node's clock.

    environment: None in place of a secret's value. hidden: the variables whose value is not shown whole. added: those that the
    launch and the supervisor set. secrets: names of what it got through a pipe. versions: None for what is not installed.
    """

    argv: tuple[str, ...] = ()
    cwd: str = ""
    time: float | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    host: str = ""
    system: str = ""
    driver: str | None = None
    servers: tuple[StartedServer, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)


def quoted(word: str) -> str:
    """A word as a shell reads it; control characters are written as bash's escapes and reach no terminal."""
    if not _HAS_CONTROL.search(word):
        return shlex.quote(word)
    return "$'" + _CONTROL.sub(lambda found: _escape(found[0]), word) + "'"


def _escape(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return known.get(character) or f"\\u{ord(character):04x}"


def command_text(argv: Sequence[str], cwd: str, variables: Mapping[str, str | None]) -> str:
    """What runs it, for a shell: in its folder, with these variables. One without a value takes the shell's own."""
    lines = [f"cd {quoted(cwd)} &&"] if cwd else []
    shown = [_assignment(name, value) for name, value in variables.items()]
    if shown:
        lines.append(_NEXT.join(["env " + shown[0], *(_INDENT + text for text in shown[1:])]))
    lines.append(_words(argv))
    return _NEXT.join(lines)


def _assignment(name: str, value: str | None) -> str:
    if value is None and _NAME.fullmatch(name):
        return f'{name}="${name}"'
    return quoted(f"{name}={value or ''}") if not _NAME.fullmatch(name) else f"{name}={quoted(value or '')}"


def _words(argv: Sequence[str]) -> str:
    """The program and what it does first, then an option with its values on each line; long lines are continued."""
    lines = [""]
    for word in argv:
        shown = quoted(word)
        option_alone = lines[-1].startswith(_INDENT + "--") and " " not in lines[-1].strip()
        long = len(lines[-1]) + 1 + len(shown) > _WIDTH and not option_alone
        if lines[-1] and (word.startswith("--") or long):
            lines.append(_INDENT + shown)
        else:
            lines[-1] += f" {shown}" if lines[-1] else shown
    return _NEXT.join(lines)


def runner_text(started: StartedWith) -> str:
    """The command of the runner with the variables that were set for it."""
    return command_text(started.argv, started.cwd, _of_launch(started))


def _of_launch(started: StartedWith) -> dict[str, str | None]:
    return {name: None if name in started.hidden else started.environment.get(name) for name in started.added}


def started_text(job: str, host: str, started: StartedWith, when: str) -> str:
    """All of it as text for a shell: commands, and the rest as comments. when: its time, as it is shown."""
    return "\n".join(_text(job, host, started, when)) + "\n"


def _text(job: str, host: str, started: StartedWith, when: str) -> Iterator[str]:
    if not started.argv:
        yield f"# {job} on {host}: how it was started was not written down; it is of an older dflash-tui"
    else:
        yield f"# {job} on {host}: the runner, started {when}"
        if started.secrets:
            yield f"# It also got {', '.join(map(quoted, started.secrets))} through a pipe; that stands nowhere."
        yield runner_text(started)
    for server in started.servers:
        yield ""
        process = "" if server.pid is None else f", process {server.pid}"
        yield f"# vLLM server {'' if server.worker is None else server.worker}{process}"
        if server.cwd:
            # An empty folder, which the job removes when it ends.
            yield f"mkdir -p {quoted(server.cwd)} &&{_NEXT.rstrip()}"
        yield command_text(server.argv, server.cwd, {**_of_launch(started), **server.environment})
    if started.versions or started.system:
        yield ""
        yield "# versions"
        for name, version in started.versions.items():
            yield f"#   {_comment(name)} {'not installed' if version is None else quoted(version)}"
        if started.driver is not None:
            yield f"#   NVIDIA driver {quoted(started.driver)}"
        if started.system:
            yield f"#   {_comment(started.system)} ({_comment(started.host)})"
    if started.environment:
        yield ""
        yield "# environment" + (", secrets hidden (***)" if started.hidden else "")
        for name, value in started.environment.items():
            yield f"#   {_comment(name)}={'***' if value is None else quoted(value)}"


def _comment(text: str) -> str:
    return text if text.isprintable() else quoted(text)
