"""Logging in: the keys of the agent and of the identity files, tried in order. Loads paramiko."""

from __future__ import annotations

import base64
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from dflash_tui.link.errors import LinkError
from dflash_tui.link.sshconfig import SshSettings


class _Agent(AgentSSH):
    """The keys of the agent behind a socket; paramiko's own class knows only the one of the environment."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]  # paramiko's stubs leave it out
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]  # paramiko's stubs leave it out


@dataclass(slots=True)
class _Tried:
    names: list[str] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)


def authenticate(transport: paramiko.Transport, settings: SshSettings, label: str) -> None:
    """Logs in. Raises LinkError ("auth-failed", "key-needs-passphrase", "no-usable-key", "lost").

    label: the host as people read it.
    """
    tried = _Tried()
    try:
        allowed = _none(transport, settings.user)
        if allowed is None:
            return
        if "publickey" not in allowed:
            raise LinkError(
                "auth-failed",
                f"{label} lets {settings.user} in only by {', '.join(allowed)}, and this console logs in by key",
                "allow publickey there, or put your key into its authorized_keys",
            )
        with contextlib.ExitStack() as stack:
            for name, key in _keys(settings, transport.auth_timeout, tried, stack):
                tried.names.append(name)
                try:
                    further = transport.auth_publickey(settings.user, key)
                except paramiko.BadAuthenticationType as error:
                    raise LinkError(
                        "auth-failed", f"{label} takes no keys any more, only {', '.join(error.allowed_types)}"
                    ) from error
                except paramiko.AuthenticationException as error:
                    if not transport.is_active() or "timeout" in str(error).lower():
                        raise _cut_short(label, settings, tried, error) from error
                    continue
                if not further:
                    return
                raise LinkError(
                    "auth-failed",
                    f"{label} took the key {name} and wants {', '.join(further)} besides",
                    "use an account that needs a key alone",
                )
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise _cut_short(label, settings, tried, error) from error
    raise _refused(label, settings, tried)


def _none(transport: paramiko.Transport, user: str) -> list[str] | None:
    """None where nothing more is asked; else what is allowed. The first question of every client."""
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return list(error.allowed_types)
    return None


def _keys(
    settings: SshSettings, timeout: float, tried: _Tried, stack: contextlib.ExitStack
) -> Iterator[tuple[str, paramiko.PKey]]:
    wanted = {blob: path for path in settings.identity_files if (blob := _public_blob(path)) is not None}
    others = []
    held = set()
    for key in _agent_keys(settings, timeout, tried, stack):
        if key.blob in wanted:
            held.add(wanted[key.blob])
            yield f"{wanted[key.blob]} (agent)", key
        elif not settings.identities_only:
            others.append(key)
    for path in settings.identity_files:
        if path in held or not path.is_file():
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):  # cryptography says TypeError for a missing passphrase
            tried.locked.append(path)
        except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
            tried.unusable.append(f"{path} ({type(error).__name__}: {error})".splitlines()[0])
    for key in others:
        yield f"{key.comment or key.get_name()} (agent)", key


def _agent_keys(
    settings: SshSettings, timeout: float, tried: _Tried, stack: contextlib.ExitStack
) -> tuple[paramiko.AgentKey, ...]:
    if settings.agent is None:
        return ()
    try:
        agent = _Agent(settings.agent, timeout)
    except (OSError, paramiko.SSHException) as error:
        tried.unusable.append(f"the agent {settings.agent} ({error})")
        return ()
    stack.callback(agent.close)
    return agent.get_keys()


def _public_blob(path: Path) -> bytes | None:
    try:
        words = Path(f"{path}.pub").read_text(encoding="utf-8", errors="replace").split()
        return base64.b64decode(words[1])
    except (OSError, IndexError, ValueError):
        return None


def _cut_short(label: str, settings: SshSettings, tried: _Tried, error: BaseException) -> LinkError:
    if "Too many authentication failures" in str(error) or (len(tried.names) >= 5 and not isinstance(error, OSError)):
        return _refused(label, settings, tried)
    why = str(error) or type(error).__name__
    return LinkError("lost", f"the connection to {label} ended while {settings.user} logged in ({why})")


def _refused(label: str, settings: SshSettings, tried: _Tried) -> LinkError:
    if tried.locked and not tried.names:
        return LinkError(
            "key-needs-passphrase",
            f"the key {tried.locked[0]} for {settings.user} at {label} has a passphrase and no agent holds it",
            f"ssh-add {tried.locked[0]}",
        )
    hints = [f"{path} has a passphrase: ssh-add {path}" for path in tried.locked] + tried.unusable
    hint = f" ({'; '.join(hints)})" if hints else ""
    if not tried.names:
        return LinkError(
            "no-usable-key",
            f"there is no key to log in with as {settings.user} at {label}{hint}",
            "make one with ssh-keygen, or name one with IdentityFile in your ssh config",
        )
    return LinkError(
        "auth-failed",
        f"{label} refused {settings.user} with every key that was tried: {', '.join(tried.names)}{hint}",
        "put one of these keys into the authorized_keys of that user, or name another with IdentityFile",
    )
