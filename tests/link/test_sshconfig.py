"""The user's own OpenSSH configuration, resolved by the real `ssh -G`."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from dflash_tui.link import LinkOptions, parse_target
from dflash_tui.link.sshconfig import jump_command, login_command, resolve

CONFIG = """
Include {folder}/more
Match host gpu-9 exec "true"
  User matched
Host gpu-*
  HostName %h.example.org
  Port 2200
  User me
  IdentityFile {folder}/key_%r_%h
  UserKnownHostsFile {folder}/known1 {folder}/known2
  IdentityAgent none
  HostKeyAlias the-alias
  ConnectTimeout 7
  HashKnownHosts yes
Host far
  ProxyJump first,me@second:2222
Host near
  ProxyCommand connect --to %h:%p --as %r
"""


@pytest.fixture
def options(tmp_path: Path) -> LinkOptions:
    (tmp_path / "more").write_text("Host included\n  HostName 10.1.2.3\n")
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    return LinkOptions(ssh_config=tmp_path / "config")


def test_what_the_configuration_says_of_an_alias_is_taken(tmp_path: Path, options: LinkOptions) -> None:
    found = resolve(parse_target("gpu-1"), options)
    assert (found.hostname, found.port, found.user) == ("gpu-1.example.org", 2200, "me")
    assert found.identity_files == (tmp_path / "key_me_gpu-1.example.org",)
    assert found.user_known_hosts == (tmp_path / "known1", tmp_path / "known2")
    assert (found.agent, found.host_key_alias, found.hash_known_hosts) == (None, "the-alias", True)
    assert found.connect_timeout_s == 7
    assert resolve(parse_target("included"), options).hostname == "10.1.2.3"
    assert resolve(parse_target("gpu-9"), options).user == "matched"


def test_what_the_user_typed_comes_before_the_configuration(options: LinkOptions) -> None:
    found = resolve(parse_target("you@gpu-1:99"), options)
    assert (found.user, found.port) == ("you", 99)


def test_jumps_become_the_systems_own_ssh_and_never_ask(tmp_path: Path, options: LinkOptions) -> None:
    command = jump_command(resolve(parse_target("far"), options), options)
    assert command[0] == "ssh" and "BatchMode=yes" in command
    assert command[command.index("-J") + 1] == "first"
    assert command[-4:] == ["-W", "far:22", "--", "ssh://me@second:2222"]
    assert command[command.index("-F") + 1] == str(tmp_path / "config")


def test_a_proxy_command_has_its_tokens_filled_in(options: LinkOptions) -> None:
    found = resolve(parse_target("you@near:77"), options)
    assert found.proxy_command == "connect --to near:77 --as you"


def test_without_an_ssh_program_the_usual_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    found = resolve(parse_target("host:2222"), LinkOptions())
    assert (found.hostname, found.port, found.user) == ("host", 2222, getpass.getuser())
    assert found.user_known_hosts == (tmp_path / ".ssh" / "known_hosts",)
    assert tmp_path / ".ssh" / "id_ed25519" in found.identity_files
    assert found.agent == "/run/agent"


def test_the_command_that_reaches_a_host_by_hand_is_as_short_as_it_can_be(options: LinkOptions) -> None:
    alias, typed = parse_target("gpu-1"), parse_target("you@10.1.1.1:99")
    assert login_command(alias, resolve(alias, options), options) == f"ssh -F {options.ssh_config} gpu-1"
    assert login_command(typed, resolve(typed, options), options) == f"ssh -F {options.ssh_config} -p 99 you@10.1.1.1"
