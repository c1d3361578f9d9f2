"""known_hosts files, read as OpenSSH reads them."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from dflash_tui.link import LinkError
from dflash_tui.link.known_hosts import check, find_keys, lookup_name, remember
from tests.sshd import keygen

BLOB = b"\0\0\0\x0bssh-ed25519" + b"k" * 36
KEY = "ssh-ed25519 " + base64.b64encode(BLOB).decode()


def known(tmp_path: Path, text: str, name: str) -> int:
    path = tmp_path / "known_hosts"
    path.write_text(text)
    return len(find_keys(name, [path, tmp_path / "missing"]))


@pytest.mark.parametrize(
    ("names", "name", "count"),
    [
        ("gpu", "gpu", 1),
        ("GPU", "gpu", 1),
        ("a,gpu,b", "gpu", 1),
        ("gpu?", "gpu1", 1),
        ("*.org", "gpu.org", 1),
        ("*.org,!bad.org", "bad.org", 0),
        ("!bad.org,*.org", "good.org", 1),
        ("[gpu]:2222", "[gpu]:2222", 1),
        ("[gpu]:2222", "g]:2222", 0),
        ("[*]:2222", "[gpu]:2222", 1),
        ("gpu", "[gpu]:2222", 0),
        ("gpu", "gpu2", 0),
        ("|1|not base64|x", "gpu", 0),
        ("|1|", "gpu", 0),
    ],
)
def test_names_match_as_in_openssh(tmp_path: Path, names: str, name: str, count: int) -> None:
    assert known(tmp_path, f"{names} {KEY}\n", name) == count


def test_comments_blank_lines_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    text = f"\n# gpu {KEY}\ngpu\ngpu ssh-ed25519\ngpu ssh-ed25519 !!!\n@odd\n\xff\xfe\ngpu {KEY} and a comment\n"
    assert known(tmp_path, text, "gpu") == 1


def test_a_port_other_than_22_is_part_of_the_name() -> None:
    assert lookup_name("GPU", 22) == "gpu"
    assert lookup_name("gpu", 2222) == "[gpu]:2222"


@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_remembered_is_found_by_us_and_by_ssh_keygen(tmp_path: Path, hashed: bool) -> None:
    kind, blob = Path(f"{keygen(tmp_path / 'key')}.pub").read_text().split()[:2]
    path = tmp_path / "new" / "known_hosts"
    for name in ("gpu", "[gpu]:2222"):
        remember(name, kind, base64.b64decode(blob), path, hashed=hashed)
        assert [key.blob for key in find_keys(name, [path])] == [base64.b64decode(blob)]
        found = subprocess.run(["ssh-keygen", "-F", name, "-f", path], check=True, capture_output=True, text=True)
        assert blob in found.stdout
    assert ("gpu" in path.read_text()) is not hashed
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_of_another_type_counts_as_changed(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"gpu {KEY}\n")
    assert check("gpu", "gpu", "ssh gpu", "ssh-ed25519", BLOB, [path])
    assert not check("other", "other", "ssh other", "ssh-rsa", b"another", [path])
    with pytest.raises(LinkError) as caught:
        check("gpu", "gpu", "ssh gpu", "ssh-rsa", b"another", [path])
    assert caught.value.code == "changed-host-key"
    assert f"{path} line 1" in caught.value.message
