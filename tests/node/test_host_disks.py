"""File systems: which are shown, and that one which hangs hides no other."""

import threading
import time
from pathlib import Path

import pytest

from dflash_tui.node import disks
from dflash_tui.node.disks import Disks, Mount, choose, mounts

LONG = 60.0
MOUNTINFO = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw - proc proc rw
24 22 0:6 / /dev/shm rw - tmpfs tmpfs rw
25 22 8:2 / /data rw shared:7 master:2 - xfs /dev/sdb1 rw
26 22 8:2 /sub /bind rw - xfs /dev/sdb1 rw
27 22 0:40 / /mnt/with\040space rw - nfs4 server:/export rw
28 22 7:1 / /snap/core/1 ro - squashfs /dev/loop1 ro
29 22 0:41 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw
30 22 0:42 / /scratch rw - fuse.juicefs JuiceFS rw
nonsense
""".lstrip()


def machine(root: Path, text: str = MOUNTINFO) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(text)
    (root / "proc/filesystems").write_text("nodev\tproc\nnodev\ttmpfs\nnodev\tnfs4\n\text4\n\txfs\n\tsquashfs\n")
    return str(root)


def test_every_real_mount_is_shown_once_and_pseudo_ones_are_not(tmp_path):
    root = machine(tmp_path)
    chosen = choose(mounts(root), ["/home/u", "/tmp", "/dev/shm"], disks.real_kinds(root))
    assert chosen == ["/", "/dev/shm", "/data", "/scratch", "/mnt/with space"]


def test_the_mount_that_holds_a_wanted_path_is_shown_whatever_its_kind(tmp_path):
    root = machine(tmp_path, "1 0 0:50 / / rw - overlay overlay rw\n2 1 0:51 / /home rw - tmpfs t rw\n")
    assert choose(mounts(root), ["/home/u", "/homeless"], []) == ["/home", "/"]


def test_the_later_of_two_mounts_on_one_path_counts(tmp_path):
    root = machine(tmp_path, "1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / /d rw - ext4 b rw\n3 1 0:9 / /d rw - tmpfs c rw\n")
    assert Mount("/d", "0:9", "tmpfs") in mounts(root) and len(mounts(root)) == 2


def test_a_file_system_that_hangs_hides_no_other_and_is_not_asked_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "INTERVAL_S", 0.0)
    release, asked = threading.Event(), []

    def ask(path):
        asked.append(path)
        if path == "/data":
            release.wait(LONG)
        return 10, 100

    reader = Disks(machine(tmp_path), ask=ask, wait_s=0.2)
    try:

        def others_answered():
            return all(disk["free_bytes"] == 10 for disk in reader.read() if disk["path"] != "/data")

        end = time.monotonic() + LONG
        while not others_answered():
            assert time.monotonic() < end
        found = {disk["path"]: disk for disk in reader.read()}
        assert found["/data"] == {"path": "/data", "free_bytes": None, "total_bytes": None}
        assert len(found) == 5
        assert asked.count("/data") == 1 and asked.count("/") > 1
    finally:
        release.set()
    end = time.monotonic() + LONG
    while any(disk["free_bytes"] is None for disk in reader.read()):
        assert time.monotonic() < end


def test_an_old_answer_tells_the_size_and_not_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "INTERVAL_S", 0.0)
    broken = []

    def ask(path):
        if broken:
            raise OSError(116, "Stale file handle")
        return 10, 100

    reader = Disks(machine(tmp_path), ask=ask, wait_s=LONG)
    assert {disk["free_bytes"] for disk in reader.read()} == {10}
    broken.append(True)
    assert {disk["free_bytes"] for disk in reader.read()} == {10}
    monkeypatch.setattr(disks, "KEPT_S", 0.0)
    assert {(disk["free_bytes"], disk["total_bytes"]) for disk in reader.read()} == {(None, 100)}


def test_a_single_file_that_a_container_mounts_is_no_disk(tmp_path):
    (tmp_path / "hosts").touch()
    (tmp_path / "data").mkdir()
    text = f"1 0 8:1 / {tmp_path}/hosts rw - ext4 a rw\n2 0 8:2 / {tmp_path}/data rw - ext4 b rw\n"
    reader = Disks(machine(tmp_path, text), wait_s=LONG)
    assert [disk["path"] for disk in reader.read()] == [f"{tmp_path}/data"]


def test_a_path_that_is_gone_raises_and_is_shown_without_figures(tmp_path):
    with pytest.raises(OSError):
        disks.sizes(str(tmp_path / "none"))
    reader = Disks(machine(tmp_path, f"1 0 8:1 / {tmp_path}/none rw - ext4 a rw\n"), wait_s=LONG)
    assert reader.read() == [{"path": f"{tmp_path}/none", "free_bytes": None, "total_bytes": None}]
