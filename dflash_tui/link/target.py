"""What stands after `--host`: `local`, an alias of the SSH configuration, `host`, `user@host:port` or `[v6]:port`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dflash_tui.link.errors import LinkError

_REMEDY = "write local, an alias of your ssh config, host, user@host:port or [IPv6]:port"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a node is. `name` is what the user typed; None leaves the choice to the SSH configuration."""

    name: str
    host: str
    user: str | None = None
    port: int | None = None

    @property
    def is_local(self) -> bool:
        return self.name == "local"


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How nodes are reached.

    ssh_config: read in place of the user's own configuration (`ssh -F`).
    connect_timeout_s: for the TCP connection, and again for the handshake and for each key that is tried.
    default_python: the node's worker Python where a launch names none.
    accept_new_host_key: the key of a host that is in no known_hosts file is written there; a changed one never is.
    """

    ssh_config: Path | None = None
    connect_timeout_s: float = 10.0
    default_python: str | None = None
    accept_new_host_key: bool = False


def parse_target(text: str) -> Target:
    """The target that `text` names. Raises LinkError with code "bad-target"."""
    name = text.strip()
    user, at, rest = name.rpartition("@")
    if at and not user:
        raise _bad(text, "no user stands before the @")
    if rest.startswith("["):
        host, closing, tail = rest[1:].partition("]")
        if not closing or (tail and not tail.startswith(":")):
            raise _bad(text, "the bracket of the address is not closed")
        port_text = tail[1:] if tail else None
    elif rest.count(":") > 1:
        host, port_text = rest, None  # an IPv6 address without a port
    else:
        host, colon, tail = rest.partition(":")
        port_text = tail if colon else None
    if not host:
        raise _bad(text, "it names no host")
    # A leading dash would be read as an option by ssh; blanks and control characters are in no host name.
    if host.startswith("-") or user.startswith("-") or re.search(r"[\s\x00-\x1f\x7f/'\"`$;&|<>()\\]", name):
        raise _bad(text, "it has a character that no host name has")
    return Target(name=name, host=host, user=user or None, port=None if port_text is None else _port(text, port_text))


def _port(text: str, digits: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 1 <= int(digits) <= 65535:
        raise _bad(text, f"the port {digits!r} is no number from 1 to 65535")
    return int(digits)


def _bad(text: str, why: str) -> LinkError:
    return LinkError("bad-target", f"the host {text!r} cannot be used, {why}", _REMEDY)
