"""A node over SSH: our own socket, paramiko's transport, one channel. Loads paramiko, so only the link's thread imports it."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko

from dflash_tui.fleet.facts import LinkState
from dflash_tui.link import known_hosts
from dflash_tui.link.connection import Cancel, Slots, Stderr, words
from dflash_tui.link.errors import LinkError
from dflash_tui.link.keys import authenticate
from dflash_tui.link.proxy import Proxy
from dflash_tui.link.sshconfig import jump_command, login_command, resolve
from dflash_tui.link.target import LinkOptions, Target

_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_UNSENT_LIMIT_MS = 20_000
_SEND_AT_ONCE = 8192  # bytes; less than what a socket that calls itself writable takes
# sshd drops connections when many come at once (MaxStartups), and so does a jump host that nodes share.
_CONNECTS = Slots(8)
_RSA = ("rsa-sha2-512", "rsa-sha2-256")


class SshConnection:
    """Connects, checks the host's key, logs in and runs `command`. Raises LinkError.

    state: told of AUTHENTICATING. cancel: ends the connect from another thread.
    """

    def __init__(
        self, target: Target, options: LinkOptions, command: str, state: Callable[[LinkState], None], cancel: Cancel
    ) -> None:
        self._target = target
        self._options = options
        self._cancel = cancel
        self._settings = resolve(target, options)
        self._login = login_command(target, self._settings, options)
        self.advice = f"see what the login shell does: {self._login} true"
        self._proxy: Proxy | None = None
        self._stderr = Stderr()
        self._opened: paramiko.Channel | None = None
        with _CONNECTS.held(self._way, cancel):
            self._carrier = self._open_carrier()
            self._transport = self._start()
            try:
                self._check_host_key()
                state(LinkState.AUTHENTICATING)
                authenticate(self._transport, self._settings, self._label)
                self._opened = self._open(command)
            except BaseException:
                self.close()
                raise

    @property
    def _way(self) -> str:
        """What is met first: the host itself, or the jump; a ProxyCommand does not say, so all of them count as one."""
        settings = self._settings
        if settings.proxy_command is not None:
            return "ProxyCommand"
        return settings.proxy_jump or known_hosts.lookup_name(settings.hostname, settings.port)

    @property
    def _label(self) -> str:
        host = known_hosts.lookup_name(self._settings.hostname, self._settings.port)
        return host if self._target.host == self._settings.hostname else f"{self._target.name} ({host})"

    # Connecting.

    def _open_carrier(self) -> socket.socket:
        settings = self._settings
        if settings.proxy_command is not None:
            self._proxy = Proxy(["/bin/sh", "-c", f"exec {settings.proxy_command}"])
        elif settings.proxy_jump is not None:
            self._proxy = Proxy(jump_command(settings, self._options))
        else:
            return connect_tcp(settings.hostname, settings.port, settings.connect_timeout_s, self._label, self._cancel)
        return self._proxy.socket

    def _start(self) -> paramiko.Transport:
        carrier = self._carrier
        limit = self._settings.connect_timeout_s
        try:
            transport = paramiko.Transport(carrier)
            transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = limit
            transport.channel_timeout = limit
            options = transport.get_security_options()
            options.ciphers = _CIPHERS
            options.digests = _MACS
            options.key_types = self._key_types(tuple(options.key_types))
            self._cancel.on_set(lambda: _shut(carrier))
        except BaseException:
            carrier.close()
            self._close_proxy()
            raise
        try:
            # Through a proxy the far TCP connect happens in this time too.
            transport.start_client(timeout=limit * (2 if self._proxy else 1))
            if not transport.initial_kex_done:  # at its limit start_client returns without a word
                raise paramiko.SSHException(f"no SSH handshake within {limit:g} s")
        except (paramiko.SSHException, EOFError, OSError) as error:
            transport.close()
            failure = self._handshake_failure(error)
            self._close_proxy()
            raise failure from error
        return transport

    def _handshake_failure(self, error: BaseException) -> LinkError:
        why = str(error) or type(error).__name__
        if self._proxy is not None:
            way = self._settings.proxy_jump or "the ProxyCommand"
            said = self._proxy.last_line() or why
            return LinkError(
                "proxy-failed", f"{self._label} was not reached through {way}: {said}", f"try {self._login}"
            )
        if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
            return LinkError(
                "unreachable", f"{self._label} and the console share no algorithm ({why})", "renew that sshd"
            )
        # sshd drops at random when many connect at once, so this is worth another try.
        return LinkError("lost", f"{self._label} took the connection and then ended it ({why})")

    # The host's key.

    def _name(self) -> str:
        settings = self._settings
        return settings.host_key_alias or known_hosts.lookup_name(settings.hostname, settings.port)

    def _known_hosts(self) -> list[Path]:
        return [*self._settings.user_known_hosts, *self._settings.global_known_hosts]

    def _key_types(self, offered: tuple[str, ...]) -> tuple[str, ...]:
        """What we ask the host for: the types that known_hosts has come first."""
        known = {key.key_type for key in known_hosts.find_keys(self._name(), self._known_hosts()) if not key.marker}
        if "ssh-rsa" in known:
            known |= set(_RSA)
        return tuple(sorted(offered, key=lambda name: name not in known))

    def _check_host_key(self) -> None:
        key = self._transport.get_remote_server_key()
        key_type, blob, name = key.get_name(), key.asbytes(), self._name()
        if known_hosts.check(name, self._label, self._login, key_type, blob, self._known_hosts()):
            return
        markers = {known.marker for known in known_hosts.find_keys(name, self._known_hosts())}
        certified = "@cert-authority" in markers
        files = self._settings.user_known_hosts
        if not self._options.accept_new_host_key or not files:
            raise known_hosts.unknown(self._label, self._login, key_type, blob, certified=certified)
        try:
            known_hosts.remember(name, key_type, blob, files[0], hashed=self._settings.hash_known_hosts)
        except OSError as error:
            raise LinkError(
                "unknown-host-key",
                f"the host key of {self._label} cannot be written to {files[0]}: {error}",
                "mend that",
            ) from error

    # The channel.

    def _open(self, command: str) -> paramiko.Channel:
        limit = self._settings.connect_timeout_s
        # exec_command waits without a limit of its own.
        watchdog = threading.Timer(2 * limit, self._transport.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            channel = self._transport.open_session(timeout=limit)
            channel.exec_command(command)
            channel.settimeout(0.0)
            channel.fileno()  # from now on there is something to poll
        except (paramiko.SSHException, EOFError, OSError) as error:
            why = str(error) or type(error).__name__
            raise LinkError("lost", f"{self._label} opened no session ({why})") from error
        finally:
            watchdog.cancel()
        return channel

    @property
    def _channel(self) -> paramiko.Channel:
        assert self._opened is not None
        return self._opened

    def read_fds(self) -> tuple[int, ...]:
        return (self._channel.fileno(),)

    def write_fd(self) -> int | None:
        return None

    def receive(self) -> bytes | None:
        with _as_os_error():
            return self._receive()

    def _receive(self) -> bytes | None:
        while self._channel.recv_stderr_ready():
            self._stderr.add(self._channel.recv_stderr(65536))
        try:
            data = self._channel.recv(65536)
        except TimeoutError:
            return None
        if not data and not self._transport.is_active():
            error = self._transport.get_exception()
            raise ConnectionError(f"the connection was cut ({error})" if error else "the connection was cut")
        return data

    def send(self, data: bytes | bytearray | memoryview) -> int:
        # paramiko writes to the socket without a limit: only as much as surely fits, and only where something does.
        if not _writable(self._carrier, 0.0):
            return 0
        try:
            with _as_os_error():
                return self._channel.send(bytes(data[:_SEND_AT_ONCE]))
        except TimeoutError:
            return 0

    def last_words(self) -> str:
        deadline = time.monotonic() + 0.5
        while self._transport.is_active() and not self._channel.exit_status_ready() and time.monotonic() < deadline:
            self._channel.status_event.wait(0.05)
        while self._channel.recv_stderr_ready():
            self._stderr.add(self._channel.recv_stderr(65536))
        status = self._channel.exit_status if self._channel.exit_status_ready() else -1
        return words(status if status >= 0 else None, self._stderr.last_line())

    def close(self) -> None:
        self._transport.close()
        if self._opened is not None:
            # Gives back its pipe; after the transport, so that no word is sent that a frozen peer would not take.
            self._opened.close()
        self._close_proxy()

    def _close_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.close()


def connect_tcp(host: str, port: int, timeout: float, label: str, cancel: Cancel) -> socket.socket:
    """A TCP connection with small packets sent at once. Raises LinkError.

    Codes: "unknown-host", "port-refused", "connect-timeout", "unreachable".
    """
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise LinkError(
            "unknown-host",
            f"the host {host!r} is not known ({why})",
            "check its spelling, or add it to your ssh config",
        ) from error
    failure: OSError | None = None
    for family, kind, proto, _, address in places:
        try:
            found = socket.socket(family, kind, proto)
        except OSError as error:  # a kernel without IPv6 still resolves names to it
            failure = failure or error
            continue
        try:
            _connect(found, address, timeout, cancel)
        except OSError as error:
            found.close()
            failure = error
            continue
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A peer that takes nothing more must not hold a send for ever.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_LIMIT_MS)
        return found
    if isinstance(failure, ConnectionRefusedError):
        raise LinkError(
            "port-refused", f"{label} refuses connections on port {port}", "is sshd running there, and on that port?"
        ) from failure
    if isinstance(failure, TimeoutError):
        raise LinkError(
            "connect-timeout",
            f"{label} did not answer within {timeout:g} s",
            "is the node up, and does a firewall let you through?",
        ) from failure
    raise LinkError("unreachable", f"{label} cannot be reached ({failure})", "check the network") from failure


def _writable(carrier: socket.socket, wait_s: float) -> bool:
    fd = carrier.fileno()
    if fd < 0:
        raise ConnectionAbortedError("the connection was cut")
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(wait_s * 1000))


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """What paramiko raises where the keys are not renewed in time means that the connection is gone."""
    try:
        yield
    except (paramiko.SSHException, EOFError) as error:
        raise ConnectionAbortedError(str(error) or type(error).__name__) from error


def _shut(carrier: socket.socket) -> None:
    """Whoever waits on the socket sees its end now; blocks nobody."""
    with contextlib.suppress(OSError):
        carrier.shutdown(socket.SHUT_RDWR)


def _connect(found: socket.socket, address: object, timeout: float, cancel: Cancel) -> None:
    found.setblocking(False)
    code = found.connect_ex(address)  # type: ignore[arg-type]  # as getaddrinfo gave it
    deadline = time.monotonic() + timeout
    while code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        if cancel.is_set:
            raise ConnectionAbortedError("closed")
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        with contextlib.suppress(InterruptedError):
            if _writable(found, 0.2):
                code = found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, errno.errorcode.get(code, str(code)))
    found.settimeout(None)
