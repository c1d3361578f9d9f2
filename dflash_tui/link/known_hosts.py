"""known_hosts files as OpenSSH reads them (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT"), and strict about them.

Read line by line, so that a line we cannot use (`@cert-authority`, a key type of the future) never hides another one.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_tui.link.errors import LinkError


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A line that names the host. marker: "", "@revoked" or "@cert-authority"."""

    marker: str
    key_type: str
    blob: bytes
    path: Path
    line: int


def lookup_name(host: str, port: int) -> str:
    """The name under which a host stands in known_hosts."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def fingerprint(blob: bytes) -> str:
    """As OpenSSH prints it: `SHA256:…`."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def find_keys(name: str, paths: Iterable[Path]) -> list[KnownKey]:
    """The keys known for `name`; files that are not there or cannot be read know none."""
    found = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            key = _parse(line, name, path, number)
            if key is not None:
                found.append(key)
    return found


def _parse(line: str, name: str, path: Path, number: int) -> KnownKey | None:
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3 or not _matches(words[0], name):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(marker, words[1], blob, path, number)


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in patterns[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    matched = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # Only * and ? are wild here; fnmatch would take the brackets of [host]:port for a set.
        wild = re.sub(r"[\[\]]", lambda bracket: f"[{bracket.group()}]", pattern.lstrip("!"))
        if fnmatch.fnmatchcase(name, wild):
            if negated:
                return False
            matched = True
    return matched


def check(name: str, label: str, login: str, key_type: str, blob: bytes, paths: list[Path]) -> bool:
    """True where the key is known, False where the host is unknown. Raises LinkError for a key that must be refused.

    label: the host as people read it. login: the ssh command that reaches it.
    """
    known = find_keys(name, paths)
    print_ = fingerprint(blob)
    for key in known:
        if key.marker == "@revoked" and key.blob == blob:
            raise LinkError(
                "revoked-host-key",
                f"the host key {print_} of {label} is marked as revoked in {key.path} line {key.line}",
                "do not connect; ask who runs the node",
            )
    plain = [key for key in known if not key.marker]
    if any(key.blob == blob for key in plain):
        return True
    if plain:
        # A key of another type counts as changed too: otherwise who sits in between would only offer another type.
        where = plain[0]
        raise LinkError(
            "changed-host-key",
            f"the host key of {label} is not the one in {where.path} line {where.line} (now {key_type} {print_}, "
            f"known {', '.join(sorted({key.key_type + ' ' + fingerprint(key.blob) for key in plain}))})",
            f"if the node was really set up anew: ssh-keygen -R '{name}' -f {where.path}, then {login}",
        )
    return False


def unknown(label: str, login: str, key_type: str, blob: bytes, *, certified: bool) -> LinkError:
    """The error for a host that is in no file."""
    note = "; a @cert-authority line names it, but host certificates are not read here" if certified else ""
    return LinkError(
        "unknown-host-key",
        f"the host key of {label} is not known ({key_type} {fingerprint(blob)}{note})",
        f"look at it and accept it once with: {login}",
    )


def remember(name: str, key_type: str, blob: bytes, path: Path, *, hashed: bool) -> None:
    """Appends a key to a known_hosts file, which is made where it is missing. Raises OSError."""
    if hashed:
        salt = secrets.token_bytes(20)
        parts = (base64.b64encode(part).decode() for part in (salt, hmac.digest(salt, name.encode(), "sha1")))
        name = "|1|" + "|".join(parts)
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
