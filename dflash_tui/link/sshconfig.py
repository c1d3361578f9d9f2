"""What the user's own OpenSSH configuration says about a host, resolved by `ssh -G`."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dflash_tui.link.errors import LinkError
from dflash_tui.link.target import LinkOptions, Target

_RESOLVE_LIMIT_S = 15.0
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True, slots=True)
class SshSettings:
    """hostname, port, user: where to connect. agent: path of the agent's socket, or None."""

    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    agent: str | None
    user_known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    host_key_alias: str | None
    hash_known_hosts: bool
    never_asks: bool  # StrictHostKeyChecking yes: then ssh itself refuses an unknown key without asking
    proxy_command: str | None
    proxy_jump: str | None
    connect_timeout_s: float


def resolve(target: Target, options: LinkOptions) -> SshSettings:
    """The settings of `target`. Raises LinkError ("bad-ssh-config")."""
    ssh = shutil.which("ssh")
    if options.ssh_config is not None and not options.ssh_config.is_file():
        raise LinkError(
            "bad-ssh-config", f"there is no SSH configuration {options.ssh_config}", "name a file that is there"
        )
    if ssh is None:
        if options.ssh_config is not None:
            raise LinkError(
                "bad-ssh-config", "no ssh program reads the SSH configuration", "install the OpenSSH client"
            )
        return _settings(target, options, {})
    command = [ssh, "-G", *(("-F", str(options.ssh_config)) if options.ssh_config else ())]
    if target.port is not None:
        command += ["-p", str(target.port)]
    if target.user is not None:
        command += ["-l", target.user]
    try:
        ran = subprocess.run(
            [*command, "--", target.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_RESOLVE_LIMIT_S,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise LinkError(
            "bad-ssh-config",
            f"ssh -G {target.host} did not end within {_RESOLVE_LIMIT_S:g} s",
            "look at its Match exec lines",
        ) from None
    except OSError as error:
        raise LinkError("bad-ssh-config", f"{ssh} cannot be run: {error}", "install the OpenSSH client") from error
    if ran.returncode != 0:
        said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else f"exit status {ran.returncode}"
        raise LinkError("bad-ssh-config", f"ssh refuses the configuration of {target.name}: {why}", "mend that line")
    found: dict[str, list[str]] = {}
    for line in ran.stdout.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name.lower(), []).append(value.strip())
    return _settings(target, options, found)


def _settings(target: Target, options: LinkOptions, found: dict[str, list[str]]) -> SshSettings:
    def first(name: str) -> str | None:
        value = found.get(name, ["none"])[0]
        return None if value.lower() == "none" or not value else value

    hostname = first("hostname") or target.host
    port = int(first("port") or target.port or 22)
    user = first("user") or target.user or getpass.getuser()
    tokens = {
        "h": hostname,
        "p": str(port),
        "r": user,
        "n": target.host,
        "u": getpass.getuser(),
        "d": str(Path.home()),
        "%": "%",
    }
    tokens |= {
        "i": str(os.getuid()),
        "l": os.uname().nodename,
        "L": os.uname().nodename.partition(".")[0],
        "k": hostname,
    }
    keys = found.get("identityfile") or [f"~/.ssh/{name}" for name in _DEFAULT_KEYS]
    users = first("userknownhostsfile") if "userknownhostsfile" in found else "~/.ssh/known_hosts"
    globals_ = first("globalknownhostsfile") if "globalknownhostsfile" in found else "/etc/ssh/ssh_known_hosts"
    agent = first("identityagent") if "identityagent" in found else "SSH_AUTH_SOCK"
    if agent == "SSH_AUTH_SOCK" or (agent or "").startswith("$"):
        agent = os.environ.get(agent.lstrip("$") if agent else "") or None
    limit = first("connecttimeout")
    command = first("proxycommand")
    return SshSettings(
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(_path(key, tokens) for key in keys if key.lower() != "none"),
        identities_only=first("identitiesonly") == "yes",
        agent=None if agent is None else str(_path(agent, tokens)),
        user_known_hosts=tuple(_path(part, tokens) for part in (users or "").split()),
        global_known_hosts=tuple(_path(part, tokens) for part in (globals_ or "").split()),
        host_key_alias=first("hostkeyalias"),
        hash_known_hosts=first("hashknownhosts") == "yes",
        never_asks=first("stricthostkeychecking") in ("yes", "true"),
        proxy_command=None if command is None else expand(command, tokens),
        proxy_jump=first("proxyjump"),
        connect_timeout_s=float(limit) if limit and limit.isdigit() and int(limit) else options.connect_timeout_s,
    )


def expand(text: str, tokens: dict[str, str]) -> str:
    """`text` with OpenSSH's percent tokens filled in; one that is not known stays as it is."""
    return re.sub(r"%(.)", lambda token: tokens.get(token.group(1), token.group()), text)


def _path(text: str, tokens: dict[str, str]) -> Path:
    filled = re.sub(r"\$\{(\w+)\}", lambda name: os.environ.get(name.group(1), ""), expand(text, tokens))
    return Path(os.path.expanduser(filled.strip('"')))


def jump_command(settings: SshSettings, options: LinkOptions) -> list[str]:
    """The system's own ssh as the way through `proxy_jump`; it never asks anything on the terminal."""
    assert settings.proxy_jump is not None
    before, _, last = settings.proxy_jump.rpartition(",")
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(settings.connect_timeout_s))}"]
    if options.ssh_config:
        command += ["-F", str(options.ssh_config)]
    if before:
        command += ["-J", before]
    host = f"[{settings.hostname}]" if ":" in settings.hostname else settings.hostname
    # A jump with a user or a port is written user@host:port, which ssh itself takes only as a URI.
    jump = last if "://" in last or not re.search(r"[@:]", last) else f"ssh://{last}"
    return [*command, "-W", f"{host}:{settings.port}", "--", jump]


def login_command(target: Target, settings: SshSettings, options: LinkOptions) -> str:
    """The command by which a person reaches the same host."""
    config = f"-F {shlex.quote(str(options.ssh_config))} " if options.ssh_config else ""
    if settings.never_asks:
        config += "-o StrictHostKeyChecking=ask "
    if target.host != settings.hostname:  # an alias knows the rest
        return f"ssh {config}{'-p ' + str(target.port) + ' ' if target.port else ''}{target.name.partition(':')[0]}"
    port = f"-p {settings.port} " if settings.port != 22 else ""
    return f"ssh {config}{port}{settings.user}@{settings.hostname}"
