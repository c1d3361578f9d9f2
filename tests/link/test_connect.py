"""Connecting where something is in the way: hosts that are down, kernels without IPv6, proxies that leave things behind."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflash_tui.link import LinkOptions, bundle, parse_target
from dflash_tui.link.asking import AGENT_LAUNCHES_S, AGENT_PREPARES_S
from dflash_tui.link.connection import Cancel
from dflash_tui.link.proxy import Proxy
from dflash_tui.link.ssh import connect_tcp
from dflash_tui.link.sshconfig import resolve
from dflash_tui.node import launching, requests
from tests.link.conftest import LIMIT_S, Opener, wait_until
from tests.sshd import Sshd


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that answers nothing: its queue is full, so the kernel drops what knocks."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_nodes_that_do_not_answer_hold_up_no_other(sshd: Sshd, open_link: Opener, black_hole: int) -> None:
    patient = LinkOptions(ssh_config=sshd.ssh_config, connect_timeout_s=LIMIT_S)
    dead = [open_link(f"127.0.0.1:{black_hole}", patient)[0] for _ in range(20)]
    good, _ = open_link("node", patient)
    good.wait_live(LIMIT_S / 2)  # the first of the dead is given up later than this
    assert all(link.state.value == "connecting" for link in dead)


def test_an_address_that_this_kernel_does_not_speak_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = socket.getaddrinfo(*server.getsockname(), type=socket.SOCK_STREAM)
        unknown = (socket.AF_APPLETALK, socket.SOCK_STREAM, 6, "", server.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [unknown, *known])
        connect_tcp(*server.getsockname(), 30.0, "node", Cancel()).close()


def test_a_connect_timeout_of_0_leaves_the_limit_as_it_is(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host node\n  HostName 127.0.0.1\n  ConnectTimeout 0\n")
    options = LinkOptions(ssh_config=config, connect_timeout_s=7.0)
    assert resolve(parse_target("node"), options).connect_timeout_s == 7.0


def test_links_that_start_together_build_the_bundle_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = bundle.build_bundle

    def counted(files: dict[str, bytes]) -> bundle.Bundle:
        built.append(1)
        return build(files)

    monkeypatch.setattr(bundle, "build_bundle", counted)
    bundle._built.cache_clear()
    threads = [threading.Thread(target=bundle.node_bundle) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_proxy_ends_with_everything_that_it_started() -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    proxy = Proxy(["/bin/sh", "-c", f'"{sys.executable}" -c "{stubborn}" & exec cat'])
    proxy.socket.recv(1)  # the signal is ignored from here on
    group = [process for process in psutil.process_iter() if _group(process) == proxy._process.pid]
    assert len(group) == 2
    proxy.close()
    wait_until(lambda: not any(_lives(process) for process in group), "both are gone")


def test_what_outlives_a_proxy_and_holds_its_stderr_keeps_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    # A session of its own, as the master of a shared ssh connection has.
    later = f"setsid sh -c 'read line <{go}' & exec sleep 600"
    proxy = Proxy(["/bin/sh", "-c", later])
    number = proxy._error.fileno()
    wait_until(lambda: len(_who_holds(go)) == 1, "the one that stays waits for its word")
    left = [psutil.Process(pid) for pid in _who_holds(go)]
    try:
        proxy.close()
        assert not proxy._drain.is_alive()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    finally:
        for process in left:
            process.kill()


def test_the_console_waits_for_longer_than_the_agent_may_take() -> None:
    assert requests._FIRST_READING_S + launching._PROBE_S < AGENT_PREPARES_S
    assert requests._FIRST_READING_S + launching._PROBE_S + launching._READY_S < AGENT_LAUNCHES_S


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _who_holds(path: Path) -> list[int]:
    """Shells that were told of the path and have started."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (line := process.info["cmdline"]) and line[:2] == ["sh", "-c"] and str(path) in line[2]
    ]
