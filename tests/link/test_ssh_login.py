"""Logging in to a real sshd, and every way in which that can be refused."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_tui.fleet.facts import AgentGreeted, LinkState
from dflash_tui.link import LinkError, LinkOptions
from tests.link.conftest import LIMIT_S, Opener, executable, wait_until
from tests.sshd import Sshd, free_port, keygen


def refusal_of(open_link: Opener, name: str, options: LinkOptions, timeout: float = LIMIT_S) -> LinkError:
    link, _ = open_link(name, options)
    with pytest.raises(LinkError) as caught:
        link.wait_live(timeout)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    return caught.value


def test_an_alias_of_the_ssh_config_is_reached_and_greets(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, facts = open_link("node", options)
    greeted = link.wait_live(LIMIT_S)
    assert greeted.host == link.host == "node"
    assert greeted.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert greeted.state_dir == f"{sshd.state}/dflash-tui"
    assert greeted.agent_pid > 0
    assert facts.states() == [
        LinkState.CONNECTING,
        LinkState.AUTHENTICATING,
        LinkState.BOOTSTRAPPING,
        LinkState.LIVE,
    ]


def test_user_at_host_and_port_is_reached(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, _ = open_link(sshd.target, options)
    assert link.wait_live(LIMIT_S).user == sshd.user


def test_a_closed_link_leaves_no_agent_and_no_connection(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, facts = open_link("node", options)
    link.wait_live(LIMIT_S)
    assert sshd.session_commands()
    link.close()
    assert link.state is LinkState.CLOSED and facts.states()[-1] is LinkState.CLOSED
    wait_until(lambda: not sshd.session_commands() and not sshd.connections(), "the server is alone")


def test_a_jump_host_is_passed_through(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, _ = open_link("jumped", options)
    link.wait_live(LIMIT_S)
    assert sshd.connections() >= 2
    link.close()
    wait_until(lambda: not sshd.connections(), "both connections are gone")


def test_a_proxy_command_is_passed_through(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    sshd.write_ssh_config(
        f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyCommand ssh -F {sshd.ssh_config} -W %h:%p node\n"
    )
    link, _ = open_link("far", options)
    assert link.wait_live(LIMIT_S).host == "far"


def test_a_jump_that_fails_is_told_with_the_words_of_ssh(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    sshd.write_ssh_config(f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump 127.0.0.1:{free_port()}\n")
    error = refusal_of(open_link, "far", options)
    assert error.code == "proxy-failed"
    assert "refused" in error.message


def test_a_host_that_is_not_known_is_named(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    error = refusal_of(open_link, "no-such-host.invalid", options)
    assert error.code == "unknown-host"
    assert "no-such-host.invalid" in error.message


def test_a_port_that_refuses_is_named(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    port = free_port()
    error = refusal_of(open_link, f"127.0.0.1:{port}", options)
    assert error.code == "port-refused"
    assert str(port) in error.message


def test_a_server_that_says_nothing_is_given_up(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link, facts = open_link(f"127.0.0.1:{silent.getsockname()[1]}", replace(options, connect_timeout_s=1.0))
        assert "ended it" in facts.wait_state(LinkState.RETRYING).detail
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < LIMIT_S


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_command_that_accepts_it(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    sshd.know_host_key("")
    shown = subprocess.run(["ssh-keygen", "-lf", f"{sshd.host_key}.pub"], check=True, capture_output=True, text=True)
    link, _ = open_link(sshd.target, options)
    with pytest.raises(LinkError) as caught:
        link.wait_live(LIMIT_S)
    assert caught.value.code == "unknown-host-key"
    assert shown.stdout.split()[1] in caught.value.message
    assert f"-p {sshd.port} {sshd.user}@127.0.0.1" in caught.value.remedy
    assert sshd.known_hosts.read_text() == ""
    command = caught.value.remedy.partition("with: ")[2]
    ask = executable(tmp_path / "yes", "#!/bin/sh\necho yes\n")
    env = {**os.environ, "SSH_ASKPASS": ask, "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    subprocess.run(f"{command} true", shell=True, check=True, env=env, stdin=subprocess.DEVNULL)
    link.retry()
    link.wait_live(LIMIT_S)


def test_an_unknown_host_key_is_remembered_where_that_was_asked_for(
    sshd: Sshd, options: LinkOptions, open_link: Opener
) -> None:
    sshd.know_host_key("# no newline at the end")
    link, _ = open_link("node", replace(options, accept_new_host_key=True))
    link.wait_live(LIMIT_S)
    link.close()
    assert sshd.known_hosts.read_text().startswith("# no newline at the end\n")
    ran = subprocess.run(["ssh", "-F", sshd.ssh_config, "node", "true"], check=False, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, "the system's ssh accepts what was written"


@pytest.mark.parametrize("accept", [False, True])
def test_a_changed_host_key_is_refused_for_good_with_the_command_that_mends_it(
    sshd: Sshd, options: LinkOptions, open_link: Opener, accept: bool
) -> None:
    sshd.change_host_key()
    link, facts = open_link("node", replace(options, accept_new_host_key=accept))
    with pytest.raises(LinkError) as caught:
        link.wait_live(LIMIT_S)
    assert caught.value.code == "changed-host-key"
    command = f"ssh-keygen -R '[127.0.0.1]:{sshd.port}' -f {sshd.known_hosts}"
    assert command in caught.value.remedy
    assert facts.wait_state(LinkState.REFUSED).retry_in_s is None
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert "127.0.0.1" not in sshd.known_hosts.read_text()
    sshd.know_host_key()
    link.retry()
    link.wait_live(LIMIT_S)


def test_a_revoked_host_key_is_refused(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    good = sshd.known_hosts.read_text()
    sshd.know_host_key(f"{good}@revoked * {good.split(' ', 1)[1]}")
    assert refusal_of(open_link, "node", options).code == "revoked-host-key"


def test_lines_that_cannot_be_used_hide_no_other(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    good = sshd.known_hosts.read_text()
    sshd.know_host_key(
        f"@cert-authority * {good.split(' ', 1)[1]}@revoked other ssh-foo AAAA\nbroken\n* ssh-x !!\n{good}"
    )
    link, _ = open_link("node", options)
    link.wait_live(LIMIT_S)


def test_a_hashed_name_is_found_in_known_hosts(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    subprocess.run(["ssh-keygen", "-H", "-f", sshd.known_hosts], check=True, capture_output=True)
    assert "127.0.0.1" not in sshd.known_hosts.read_text()
    link, _ = open_link("node", options)
    link.wait_live(LIMIT_S)


def test_a_key_that_is_not_authorized_is_named_with_user_and_host(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    other = keygen(tmp_path / "other")
    sshd.write_ssh_config(identity=other)
    error = refusal_of(open_link, "node", options)
    assert error.code == "auth-failed"
    assert str(other) in error.message and sshd.user in error.message and str(sshd.port) in error.message


def test_no_key_at_all_is_told(sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path) -> None:
    sshd.write_ssh_config(identity=tmp_path / "nothing")
    assert refusal_of(open_link, "node", options).code == "no-usable-key"


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_other_kinds_of_keys_log_in(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path, kind: str
) -> None:
    key = keygen(tmp_path / "other", kind=kind)
    sshd.authorized_keys.write_text(Path(f"{key}.pub").read_text())
    sshd.write_ssh_config(identity=key)
    link, _ = open_link("node", options)
    link.wait_live(LIMIT_S)


def test_a_key_with_a_passphrase_asks_for_ssh_add_and_then_logs_in_by_the_agent(
    sshd: Sshd, options: LinkOptions, open_link: Opener, tmp_path: Path
) -> None:
    locked = keygen(tmp_path / "locked", passphrase="open sesame")
    sshd.authorized_keys.write_text(Path(f"{locked}.pub").read_text())
    sshd.write_ssh_config(identity=locked)
    error = refusal_of(open_link, "node", options)
    assert error.code == "key-needs-passphrase"
    assert str(locked) in error.message and f"ssh-add {locked}" in error.remedy

    path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, "the agent listens")
        ask = executable(tmp_path / "askpass", "#!/bin/sh\necho open sesame\n")
        env = {"SSH_AUTH_SOCK": str(path), "SSH_ASKPASS": ask, "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
        env["PATH"] = "/usr/bin:/bin"
        subprocess.run(["ssh-add", locked], env=env, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        text = sshd.ssh_config.read_text()
        sshd.ssh_config.write_text(text.replace("IdentityAgent none", f"IdentityAgent {path}"))
        link, _ = open_link("node", options)
        link.wait_live(LIMIT_S)
    finally:
        agent.kill()
        agent.wait()


def test_an_ssh_config_that_is_not_there_is_named(tmp_path: Path, open_link: Opener) -> None:
    error = refusal_of(open_link, "node", LinkOptions(ssh_config=tmp_path / "nowhere"))
    assert error.code == "bad-ssh-config"
    assert str(tmp_path / "nowhere") in error.message


def test_a_broken_ssh_config_is_told_with_its_line(tmp_path: Path, open_link: Opener) -> None:
    config = tmp_path / "config"
    config.write_text("Host node\n  NoSuchOption yes\n")
    error = refusal_of(open_link, "node", LinkOptions(ssh_config=config))
    assert error.code == "bad-ssh-config"


def test_many_links_to_one_server_all_become_live(make_sshd: Callable[..., Sshd], open_link: Opener) -> None:
    server = make_sshd()
    options = LinkOptions(ssh_config=server.ssh_config)
    links = [open_link("node", options) for _ in range(6)]
    pids = {link.wait_live(LIMIT_S).agent_pid for link, _ in links}
    assert len(pids) == 6
    for _, facts in links:
        facts.wait(AgentGreeted)
