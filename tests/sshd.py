"""A real OpenSSH server on 127.0.0.1 for tests: own keys, own configuration, own cache and state folders."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_START_LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keygen(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new key pair; returns `path`, the private one."""
    path.unlink(missing_ok=True)
    Path(f"{path}.pub").unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


class Sshd:
    """An sshd that the current user logs in to by key, and the files that a client needs for it.

    `ssh_config` has the alias `node`, and `jumped`, which reaches the same server through `node`; the key and the
    known_hosts file in it count for every host. On the node side HOME, XDG_CACHE_HOME and XDG_STATE_HOME lie under
    `folder`.

    login_shell: stands in for the user's own. environment: more of it on the node side. prefix: a command that starts
    sshd (`unshare -m …`).
    """

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        login_shell: str | None = None,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder / "sshd"
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o700)
        self.port = port or free_port()
        self.user = getpass.getuser()
        self.home = self.folder / "home"
        self.cache = self.folder / "cache"
        self.state = self.folder / "state"
        for made in (self.home, self.cache, self.state):
            made.mkdir()
        self.key = keygen(self.folder / "key")
        self.authorized_keys = self.folder / "authorized_keys"
        self.authorized_keys.write_bytes(Path(f"{self.key}.pub").read_bytes())
        self.host_key = keygen(self.folder / "host_key")
        self.known_hosts = self.folder / "known_hosts"
        self.know_host_key()
        self.ssh_config = self.folder / "ssh_config"
        self.write_ssh_config()
        self.log = self.folder / "sshd.log"
        self._login_shell = login_shell
        self._environment = {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.cache),
            "XDG_STATE_HOME": str(self.state),
            **(environment or {}),
        }
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen: list[psutil.Process] = []  # these outlive their connection, and are nobody's children then

    # Files of the client.

    @property
    def target(self) -> str:
        return f"{self.user}@127.0.0.1:{self.port}"

    def write_ssh_config(self, extra: str = "", *, identity: Path | None = None) -> None:
        self.ssh_config.write_text(
            f"""{extra}
Host node
  HostName 127.0.0.1
  Port {self.port}
Host jumped
  HostName 127.0.0.1
  Port {self.port}
  ProxyJump node
Host *
  User {self.user}
  IdentityFile {identity or self.key}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {self.known_hosts}
  GlobalKnownHostsFile {self.folder}/no_known_hosts
  StrictHostKeyChecking yes
  HashKnownHosts no
"""
        )

    def know_host_key(self, line: str | None = None) -> None:
        """Writes the known_hosts file: `line`, or the present host key."""
        kind, blob = Path(f"{self.host_key}.pub").read_text().split()[:2]
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {blob}\n" if line is None else line)

    # The server.

    def start(self) -> Sshd:
        sshd = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
        assert sshd, "the tests of the link need OpenSSH's sshd"
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / "sshd_config"
        values = " ".join(f'"{name}={value}"' for name, value in self._environment.items())
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.authorized_keys}",
            f"PidFile {self.folder}/sshd.pid",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxStartups 100",
            "MaxAuthTries 20",
            "LogLevel INFO",
            f"SetEnv {values}",
        ]
        if self._login_shell:
            # A jump has no command; it is no session and comes past this.
            lines.append(f'ForceCommand exec {shlex.quote(self._login_shell)} -c "$SSH_ORIGINAL_COMMAND"')
        config.write_text("\n".join(lines) + "\n")
        # Newer servers punish an address for failed logins, and here all come from one.
        lenient = ["-o", "PerSourcePenalties=no"]
        if subprocess.run([sshd, "-t", "-f", config, *lenient], capture_output=True, check=False).returncode != 0:
            lenient = []
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, sshd, "-D", "-e", "-f", str(config), *lenient],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log.read_text(errors="replace")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                if probe.recv(4) == b"SSH-":
                    return self
            time.sleep(0.02)
        raise AssertionError(f"sshd did not start: {self.log.read_text(errors='replace')}")

    def stop(self) -> None:
        """Ends the server and every session; jobs that left their session go on."""
        if self._process is None:
            return
        family = [*self._family(), *self._frozen]
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        self._frozen.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process = None

    def change_host_key(self) -> None:
        """The server is set up anew: another host key, while known_hosts keeps the old one."""
        self.stop()
        self.host_key = keygen(self.folder / "host_key")
        self.start()

    def drop_connections(self) -> int:
        """Kills the server's end of every connection, without a word to the client; returns how many processes."""
        dropped = [process for process in self._family() if _is_sshd(process)]
        for process in dropped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(dropped)

    def freeze(self, *, server: bool = False) -> list[int]:
        """Stops (SIGSTOP) what runs in the sessions, or the server's end of them; the connections stay."""
        frozen = [process for process in self._family() if _is_sshd(process) is server]
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        self._frozen += frozen
        return [process.pid for process in frozen]

    def thaw(self) -> None:
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._frozen.clear()

    def session_commands(self) -> list[list[str]]:
        """The command lines of what runs in the sessions."""
        found = []
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                if not _is_sshd(process):
                    found.append(process.cmdline())
        return found

    def connections(self) -> int:
        return sum(_is_sshd(process) for process in self._family())

    def _family(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []


def _is_sshd(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd")
    except psutil.Error:
        return False


@contextlib.contextmanager
def running_sshd(folder: Path, port: int | None = None, **options: object) -> Iterator[Sshd]:
    """A started `Sshd` that is stopped in the end."""
    server = Sshd(folder, port, **options)
    try:
        yield server.start()
    finally:
        server.stop()
