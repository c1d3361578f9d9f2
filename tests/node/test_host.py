"""The machine's own figures, against psutil where the real machine answers and by hand-made /proc files where it cannot."""

import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from dflash_tui.node.disks import Disks
from dflash_tui.node.host import Host

MEBIBYTE = 1 << 20
TRIES = 100
DISKSTATS = """\
   8       0 sda 10 0 {sda_read} 5 20 0 {sda_written} 7 0 3 4
   8       1 sda1 10 0 {sda_read} 5 20 0 {sda_written} 7 0 3 4
 259       0 nvme0n1 1 0 2000 1 1 0 4000 1 0 1 1 0 0 0 0 0 0
 259       1 nvme0n1p1 1 0 2000 1 1 0 4000 1 0 1 1 0 0 0 0 0 0
 253       0 dm-0 1 0 {sda_read} 1 1 0 {sda_written} 1 0 1 1
   9     127 md127 1 0 {sda_read} 1 1 0 {sda_written} 1 0 1 1
   7       0 loop0 1 0 555 1 1 0 555 1 0 1 1
"""
NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 99999999    1    0    0    0     0          0         0 99999999    1    0    0    0     0       0          0
  eth0:{received} 1    0    0    0     0          0         0 {sent}    1    0    0    0     0       0          0
docker0: {received} 1    0    0    0     0          0         0 {sent}    1    0    0    0     0       0          0
"""
FILES = {
    "proc/stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 50 0 50 350 50 0 0 0 0 0\ncpu1 50 0 50 350 50 0 0 0 0 0\nbtime 1\n",
    "proc/loadavg": "0.50 0.25 0.10 1/200 4242\n",
    "proc/uptime": "12345.67 24000.00\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n",
    "proc/diskstats": DISKSTATS.format(sda_read=1000, sda_written=2000),
    "proc/net/dev": NET.format(received=5000, sent=7000),
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n",
    "proc/filesystems": "nodev\ttmpfs\n\text4\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


class Machine:
    """A made /proc, two seconds between the readings."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        write(root, FILES)
        self.host = Host(str(root), Disks(str(root), ask=lambda path: (7, 9)), clock=lambda: self.now)

    def read(self):
        self.now += 2.0
        return self.host.read()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def until(check):
    """The machine is shared and moves while it is measured: one of many looks must agree."""
    for _ in range(TRIES):
        if check():
            return
        time.sleep(0.05)
    pytest.fail("the two never agreed")


def test_memory_and_swap_are_what_psutil_says():
    host = Host()
    _, limit = host._container_memory()

    def agree():
        before = psutil.virtual_memory()
        found = host.read()
        if limit is not None and limit < before.total:
            return found["memory_total_bytes"] == limit
        expected = before.total - before.available
        assert found["memory_total_bytes"] == before.total
        return abs(found["memory_used_bytes"] - expected) < 64 * MEBIBYTE

    until(agree)
    until(lambda: host.read()["swap_used_bytes"] == psutil.swap_memory().used)
    assert host.read()["swap_total_bytes"] == psutil.swap_memory().total


def test_load_uptime_and_processors_are_what_the_system_says():
    host = Host()
    assert host.read()["cpu_count"] == psutil.cpu_count()
    until(lambda: [host.read()[f"load_{n}"] for n in (1, 5, 15)] == pytest.approx(os.getloadavg(), abs=0.011))
    until(lambda: abs(host.read()["uptime_s"] - time.clock_gettime(time.CLOCK_BOOTTIME)) < 2.0)


def test_processor_use_over_an_interval_is_what_psutil_says():
    host = Host()
    host.read()
    psutil.cpu_percent()

    def agree():
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            sum(range(2000))
        ours, theirs = host.read()["cpu_percent"], psutil.cpu_percent()
        assert ours is not None and 0 < ours <= 100
        return abs(ours - theirs) < 10

    until(agree)


def test_network_bytes_are_what_psutil_says():
    def total(index):
        counters = {name: value for name, value in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        real = [name for name in counters if Path("/sys/class/net", name, "device").exists()]
        return sum(counters[name][index] for name in real or counters)

    before = (total(1), total(0))
    found = Host()._net_bytes()
    after = (total(1), total(0))
    if found is None:
        assert before == (0, 0)
    else:
        assert before[0] <= found[0] <= after[0] and before[1] <= found[1] <= after[1]


def test_disk_bytes_are_those_of_the_whole_disks_of_psutil():
    def total():
        counters = psutil.disk_io_counters(perdisk=True) or {}
        whole = [
            name
            for name in counters
            if Path("/sys/block", name).exists()
            and not name.startswith(("dm-", "md", "loop", "ram", "zram", "sr", "fd"))
        ]
        return sum(counters[name].read_bytes for name in whole), sum(counters[name].write_bytes for name in whole)

    before = total()
    found = Host()._disk_bytes() or (0, 0)
    after = total()
    assert before[0] <= found[0] <= after[0] and before[1] <= found[1] <= after[1]


def test_the_file_systems_are_as_full_as_psutil_says():
    paths = [disk["path"] for disk in Host().read()["disks"]]
    assert "/" in paths
    for path in paths:
        until(lambda path=path: _disk(path)["total_bytes"] == psutil.disk_usage(path).total)
        until(lambda path=path: abs((_disk(path)["free_bytes"] or 0) - psutil.disk_usage(path).free) < 64 * MEBIBYTE)


def _disk(path):
    return next(disk for disk in Host().read()["disks"] if disk["path"] == path)


def test_the_first_reading_has_no_rates_and_the_second_has(machine):
    first = machine.read()
    rates = [name for name in first if name.endswith("_per_s")] + ["cpu_percent"]
    assert len(rates) == 5 and all(first[name] is None for name in rates)
    write(
        machine.root,
        {
            "proc/stat": FILES["proc/stat"].replace("cpu  100 0 100 700 100", "cpu  130 0 120 740 110"),
            "proc/diskstats": DISKSTATS.format(sda_read=1010, sda_written=2040),
            "proc/net/dev": NET.format(received=9000, sent=7500),
        },
    )
    second = machine.read()
    assert second["cpu_percent"] == 50.0
    assert (second["disk_read_bytes_per_s"], second["disk_write_bytes_per_s"]) == (10 * 512 / 2, 40 * 512 / 2)
    # No interface here has a device, as in a container: all but lo count.
    assert (second["net_receive_bytes_per_s"], second["net_send_bytes_per_s"]) == (2 * 4000 / 2, 2 * 500 / 2)


def test_a_bridge_does_not_count_once_more_what_the_card_behind_it_counts(machine):
    (machine.root / "sys/class/net/eth0/device").mkdir(parents=True)
    machine.read()
    write(machine.root, {"proc/net/dev": NET.format(received=9000, sent=7500)})
    assert machine.read()["net_receive_bytes_per_s"] == 4000 / 2


def test_a_counter_that_went_backwards_gives_no_rate(machine):
    machine.read()
    write(machine.root, {"proc/net/dev": NET.format(received=1, sent=7500)})
    found = machine.read()
    assert found["net_receive_bytes_per_s"] is None and found["net_send_bytes_per_s"] == 500.0


GONE = {
    "proc/stat": {"cpu_count", "cpu_percent"},
    "proc/loadavg": {"load_1", "load_5", "load_15"},
    "proc/uptime": {"uptime_s"},
    "proc/meminfo": {"memory_used_bytes", "memory_total_bytes", "swap_used_bytes", "swap_total_bytes"},
    "proc/diskstats": {"disk_read_bytes_per_s", "disk_write_bytes_per_s"},
    "proc/net/dev": {"net_receive_bytes_per_s", "net_send_bytes_per_s"},
    "proc/self/cgroup": set(),
}


@pytest.mark.parametrize("broken", [None, b"", b"\xff\xfe not what it was \x00\n", b"cpu  a b c d e f\nsda x y\n"])
@pytest.mark.parametrize("name", GONE)
def test_what_is_missing_or_odd_makes_its_own_fields_null_and_no_other(machine, name, broken):
    path = machine.root / name
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken)
    machine.read()
    if name != "proc/stat":
        write(machine.root, {"proc/stat": FILES["proc/stat"].replace("cpu  100", "cpu  200")})
    found = machine.read()
    assert {field for field, value in found.items() if value is None} == GONE[name]
    assert found["disks"]


def test_no_proc_at_all_is_all_null(machine):
    shutil.rmtree(machine.root / "proc")
    found = machine.read()
    assert found.pop("disks") == []
    assert set(found.values()) == {None}


KIB = 1024


def test_a_containers_limit_counts_where_it_is_lower_and_its_cache_is_not_used_memory(machine):
    group = "sys/fs/cgroup"
    write(
        machine.root,
        {
            f"{group}/memory.max": f"{500 * KIB}\n",
            f"{group}/memory.current": f"{300 * KIB}\n",
            f"{group}/memory.stat": f"anon 5\ninactive_file {100 * KIB}\nactive_file 7\n",
        },
    )
    found = machine.read()
    assert (found["memory_used_bytes"], found["memory_total_bytes"]) == (200 * KIB, 500 * KIB)
    # A limit above what the machine has is none.
    write(machine.root, {f"{group}/memory.max": f"{5000 * KIB}\n"})
    assert machine.read()["memory_total_bytes"] == 1000 * KIB
    write(machine.root, {f"{group}/memory.max": "max\n"})
    assert machine.read()["memory_total_bytes"] == 1000 * KIB


def test_the_lowest_limit_over_us_counts(machine):
    write(
        machine.root,
        {
            "proc/self/cgroup": "0::/slice/inner\n",
            "sys/fs/cgroup/slice/inner/memory.max": "max\n",
            "sys/fs/cgroup/slice/inner/memory.current": "1\n",
            "sys/fs/cgroup/slice/memory.max": f"{400 * KIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{90 * KIB}\n",
        },
    )
    found = machine.read()
    assert (found["memory_used_bytes"], found["memory_total_bytes"]) == (90 * KIB, 400 * KIB)


def test_version_1_groups_are_understood(machine):
    group = "sys/fs/cgroup/memory"
    write(
        machine.root,
        {
            # The host's path: it does not exist inside, the container's own is at the top.
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n",
            f"{group}/memory.limit_in_bytes": f"{600 * KIB}\n",
            f"{group}/memory.usage_in_bytes": f"{300 * KIB}\n",
            f"{group}/memory.stat": f"total_inactive_file {50 * KIB}\n",
        },
    )
    found = machine.read()
    assert (found["memory_used_bytes"], found["memory_total_bytes"]) == (250 * KIB, 600 * KIB)
    write(machine.root, {f"{group}/memory.limit_in_bytes": "9223372036854771712\n"})
    assert machine.read()["memory_total_bytes"] == 1000 * KIB
