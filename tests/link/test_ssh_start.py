"""From a login shell to an agent on nodes that make it hard, over a real sshd."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tui.fleet.facts import LinkChanged, LinkState
from dflash_tui.link import LinkError, LinkOptions
from dflash_tui.link.bootstrap import PYTHONS
from dflash_tui.link.bundle import node_bundle
from tests.link.conftest import LIMIT_S, Opener, executable, wait_until
from tests.sshd import Sshd

# A login shell in a mount namespace of its own: there the node can be made to lack things that this machine has.
NAMESPACE = """#!/bin/sh
exec unshare --map-root-user --mount /bin/sh -c '
{mounts}
exec /bin/sh "$@"' sh "$@"
"""


def without_pythons() -> str:
    found = " ".join(name for name in PYTHONS if "/" in name)
    return f"""
for place in /usr/bin/python3* /usr/local/bin/python3* {found}; do
  if [ -x "$place" ]; then mount --bind /dev/null "$place"; fi
done"""


def test_a_login_shell_that_prints_noise_disturbs_nothing(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    noisy = executable(
        tmp_path / "noisy",
        '#!/bin/sh\necho \'Welcome to {"ev":"hello"}\'\nhead -c 200000 /dev/urandom\n'
        "echo oops >&2\nprintf 'no newline'\nexec /bin/sh \"$@\"\n",
    )
    server = make_sshd(login_shell=noisy)
    link, facts = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    link.wait_live(LIMIT_S)
    assert LinkState.RETRYING not in facts.states()


def test_a_login_shell_that_never_stops_printing_on_stderr_blocks_nothing(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    # 4 MiB is twice what paramiko keeps unread before it stops the connection.
    noisy = executable(tmp_path / "noisy", '#!/bin/sh\nhead -c 4194304 /dev/zero >&2\nexec /bin/sh "$@"\n')
    server = make_sshd(login_shell=noisy)
    link, _ = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    link.wait_live(LIMIT_S)


def test_an_account_that_may_not_log_in_is_told_with_its_own_words(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    server = make_sshd(
        login_shell=executable(tmp_path / "nologin", "#!/bin/sh\necho 'This account is closed.'\nexit 1\n")
    )
    link, _ = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    with pytest.raises(LinkError, match="This account is closed") as caught:
        link.wait_live(LIMIT_S)
    assert caught.value.code == "bootstrap-failed"


def test_no_escape_sequence_of_a_login_shell_stands_in_an_error(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    shell = "#!/bin/sh\nprintf 'hi \\033]0;title\\007 there\\n'\nprintf '\\033[2Jred\\n' >&2\nexit 3\n"
    server = make_sshd(login_shell=executable(tmp_path / "painter", shell))
    link, facts = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    with pytest.raises(LinkError, match="there") as caught:
        link.wait_live(LIMIT_S)
    told = [str(caught.value), *(fact.detail for fact in facts.all if isinstance(fact, LinkChanged))]
    assert not any("\x1b" in line or "\x07" in line for line in told)


def test_a_node_without_python_is_refused_for_good(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    shell = executable(tmp_path / "shell", NAMESPACE.format(mounts=without_pythons()))
    server = make_sshd(login_shell=shell, environment={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"})
    link, facts = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    with pytest.raises(LinkError) as caught:
        link.wait_live(LIMIT_S)
    assert caught.value.code == "no-python"
    assert "install" in caught.value.remedy
    facts.wait_state(LinkState.REFUSED)


def test_a_node_with_no_writable_folder_is_told_with_every_folder_that_was_tried(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    mounts = "mount -t tmpfs -o ro none /dev/shm\nmount -t tmpfs -o ro none /tmp"
    server = make_sshd(
        login_shell=executable(tmp_path / "shell", NAMESPACE.format(mounts=mounts)),
        environment={"XDG_CACHE_HOME": "/proc/nowhere"},
    )
    link, _ = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    with pytest.raises(LinkError) as caught:
        link.wait_live(LIMIT_S)
    assert caught.value.code == "bootstrap-failed"
    uid = os.getuid()
    for folder in ("/proc/nowhere/dflash-tui", f"/tmp/dflash-tui-{uid}", f"/dev/shm/dflash-tui-{uid}"):
        assert folder in caught.value.message


def test_a_home_that_is_full_falls_back_to_tmp(
    tmp_path: Path, make_sshd: Callable[..., Sshd], open_link: Opener
) -> None:
    mounts = "mount -t tmpfs -o size=64k none /mnt\nmount -t tmpfs none /dev/shm\nmount -t tmpfs none /tmp"
    server = make_sshd(
        login_shell=executable(tmp_path / "shell", NAMESPACE.format(mounts=mounts)),
        environment={"XDG_CACHE_HOME": "/mnt/cache", "XDG_STATE_HOME": "/dev/shm/state"},
    )
    link, _ = open_link("node", LinkOptions(ssh_config=server.ssh_config))
    link.wait_live(LIMIT_S)
    commands = [word for command in server.session_commands() for word in command]
    assert f"/tmp/dflash-tui-{os.getuid()}/dflash-tui/{node_bundle().hash}" in commands


def test_the_bundle_travels_once(sshd: Sshd, options: LinkOptions, open_link: Opener) -> None:
    link, _ = open_link("node", options)
    link.wait_live(LIMIT_S)
    link.close()
    bundle = sshd.cache / "dflash-tui" / node_bundle().hash
    before = {path: path.stat().st_ino for path in bundle.rglob("*") if "__pycache__" not in path.parts}
    again, _ = open_link("node", options)
    again.wait_live(LIMIT_S)
    assert again._session is not None and not again._session.bundle_sent
    assert {path: path.stat().st_ino for path in before} == before
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_two_consoles_at_once_share_one_bundle_and_have_an_agent_each(
    sshd: Sshd, options: LinkOptions, open_link: Opener
) -> None:
    links = [open_link("node", options)[0] for _ in range(2)]
    assert len({link.wait_live(LIMIT_S).agent_pid for link in links}) == 2
    assert [path.name for path in (sshd.cache / "dflash-tui").iterdir()] == [node_bundle().hash]
    assert links[0].list_jobs().result(LIMIT_S) == links[1].list_jobs().result(LIMIT_S) == ()


def test_a_file_that_a_cleaner_took_out_of_the_bundle_is_put_back_and_no_other_is_touched(
    sshd: Sshd, options: LinkOptions, open_link: Opener
) -> None:
    link, _ = open_link("node", options)
    link.wait_live(LIMIT_S)
    link.close()
    bundle = sshd.cache / "dflash-tui" / node_bundle().hash
    taken, kept = bundle / "dflash_tui" / "node" / "agent.py", bundle / "backends" / "spec.py"
    inode = kept.stat().st_ino
    taken.unlink()
    again, _ = open_link("node", options)
    again.wait_live(LIMIT_S)
    assert taken.is_file()
    assert kept.stat().st_ino == inode
    wait_until(lambda: [path.name for path in bundle.parent.iterdir()] == [bundle.name], "nothing half-done is left")


def test_a_link_that_is_closed_while_it_connects_ends_at_once(tmp_path: Path, open_link: Opener) -> None:
    config = tmp_path / "config"
    config.write_text("Host slow\n  ProxyCommand sleep 1000\n")
    link, facts = open_link("slow", LinkOptions(ssh_config=config, connect_timeout_s=LIMIT_S))
    facts.wait_state(LinkState.CONNECTING)
    began = time.monotonic()
    link.close()
    facts.wait_state(LinkState.CLOSED)
    assert time.monotonic() - began < LIMIT_S
