"""XIDs, from NVML's events and from the kernel's log."""

from pathlib import Path

import pynvml
import pytest

from dflash_tui.node import nvmlask
from dflash_tui.node.metrics import Gpus
from dflash_tui.node.nvml import Nvml
from dflash_tui.node.xids import KernelLog, bus_key
from tests.fakes.nvml import ReplayedNvml, recording

LINE = "3,{number},{us},-;NVRM: Xid (PCI:0000:{bus}:00): {text}\n"


def log(path, *entries):
    """Writes records as /dev/kmsg gives them: (microseconds since boot, bus, text)."""
    with path.open("a", encoding="utf-8") as file:
        for number, (us, bus, text) in enumerate(entries):
            file.write(LINE.format(number=number, us=us, bus=bus, text=text))
    return path


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def cards(*buses):
    return [{"index": index, "pci_bus_id": bus, "xid": None, "xid_source": None} for index, bus in enumerate(buses)]


def described(reader, *buses):
    found = cards(*buses)
    reader.describe(found)
    return found


def test_an_xid_that_comes_while_we_listen_belongs_to_its_card():
    module = ReplayedNvml(cards=3)
    reader = Nvml(module)
    assert [card["xid"] for card in reader.read()] == [None] * 3 and module.listening == {0, 1, 2}
    module.xids += [(1, 31), (1, 79)]
    one, two, three = reader.read()
    assert one["xid"] is None and three["xid"] is None
    assert (two["xid"]["code"], two["xid"]["source"]) == (79, "nvml")
    assert reader.read()[1]["xid"]["code"] == 79
    reader.close()
    assert module.listening == set()


def test_a_card_that_falls_off_the_bus_keeps_the_xid_that_says_so():
    module = ReplayedNvml(cards=2)
    reader = Nvml(module)
    reader.read()
    module.xids.append((1, 79))
    module.errors[1, "nvmlDeviceGetHandleByIndex"] = nvmlask.GPU_IS_LOST
    card = reader.read()[1]
    assert card["error"] == "GPU is lost" and card["xid"]["code"] == 79


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlEventSetWait_v2", "nvmlDeviceRegisterEvents"])
def test_where_events_are_not_to_be_had_the_readings_are_whole(function):
    card = -1 if function != "nvmlDeviceRegisterEvents" else 0
    whole = Nvml(ReplayedNvml()).read()[0]
    reader = Nvml(ReplayedNvml(errors={(card, function): pynvml.NVML_ERROR_NOT_SUPPORTED}))
    for _ in range(2):
        found = reader.read()[0]
        assert found["xid"] is None
        assert {**found, "xid_source": None} == {**whole, "xid_source": None}
    assert found["xid_source"] is None or function == "nvmlEventSetWait_v2"


def test_the_kernels_log_gives_code_time_and_words_of_the_last_xid(tmp_path):
    path = log(
        tmp_path / "kmsg",
        (1_000_000, "3b", "13, pid=7, name=python3, Graphics Exception"),
        (5_500_000, "3b", "31, pid=4242, name=python3, Ch 00000008"),
        (6_000_000, "af", "79, GPU has fallen off the bus."),
    )
    one, two, three = described(
        KernelLog(str(path), lambda: 1000.0), "00000000:3B:00.0", "0000:af:00.0", "0000:17:00.0"
    )
    assert one["xid"] == {
        "code": 31, "time": 1005.5, "source": "kernel log", "detail": "pid=4242, name=python3, Ch 00000008",
    }  # fmt: skip
    assert (two["xid"]["code"], two["xid"]["time"]) == (79, 1006.0)
    assert three["xid"] is None and three["xid_source"] == "kernel log"


def test_the_log_is_read_on_from_where_the_last_look_ended(tmp_path):
    path = log(tmp_path / "kmsg", (1, "3b", "13, a"))
    reader = KernelLog(str(path), lambda: 0.0)
    assert described(reader, "0000:3b:00.0")[0]["xid"]["code"] == 13
    log(path, (2, "3b", "48, b"))
    assert described(reader, "0000:3b:00.0")[0]["xid"]["code"] == 48
    reader.close()


def test_lines_of_the_log_that_are_no_xid_are_passed_over(tmp_path):
    path = tmp_path / "kmsg"
    lines = recording()["system"]["kmsg"]["lines"]
    path.write_text(
        "".join(lines) + "rubbish\n;NVRM: Xid (PCI:0000:3b:00): 79\n6,1,x,-;NVRM: Xid (PCI:0000:3b:00): 79\n"
    )
    (card,) = described(KernelLog(str(path)), "0000:3b:00.0")
    assert lines and card["xid"] is None and card["xid_source"] == "kernel log"


def test_a_log_that_may_not_be_read_is_no_source_and_no_fault(tmp_path):
    reader = KernelLog(str(tmp_path / "none"))
    for _ in range(2):
        (card,) = described(reader, "0000:3b:00.0")
        assert card["xid_source"] is None and card["xid"] is None


def test_the_newer_of_both_sources_is_shown_and_of_the_same_one_the_log_with_its_words(tmp_path):
    path = log(tmp_path / "kmsg", (100_000_000, "10", "79, GPU has fallen off the bus."))
    module = ReplayedNvml()
    gpus = Gpus(open_nvml=lambda: Nvml(module), kernel_log=KernelLog(str(path), lambda: 0.0))
    (card,) = gpus.read().gpus
    assert card["xid_source"] == "nvml and kernel log" and card["xid"]["source"] == "kernel log"
    module.xids.append((0, 31))
    (card,) = gpus.read().gpus
    assert (card["xid"]["code"], card["xid"]["source"]) == (31, "nvml")  # now, where the log's was long ago
    same = KernelLog(str(log(tmp_path / "same", (0, "10", "31, pid=1"))), lambda: card["xid"]["time"] - 1)
    same.describe([card])
    assert card["xid"]["detail"] == "pid=1"
    gpus.close()


def test_what_follows_a_fault_of_the_card_does_not_hide_it(tmp_path):
    path = log(
        tmp_path / "kmsg", (1_000_000, "3b", "48, DBE"), (1_200_000, "3b", "45, pid=7"), (2_000_000, "af", "45, pid=7")
    )
    one, two = described(KernelLog(str(path), lambda: 0.0), "0000:3b:00.0", "0000:af:00.0")
    assert (one["xid"]["code"], two["xid"]["code"]) == (48, 45)
    log(path, (90_000_000_000, "3b", "31, pid=9"))
    assert described(KernelLog(str(path), lambda: 0.0), "0000:3b:00.0")[0]["xid"]["code"] == 31
    module = ReplayedNvml(cards=1)
    reader = Nvml(module)
    reader.read()
    module.xids += [(0, 79), (0, 45)]
    assert reader.read()[0]["xid"]["code"] == 79


def test_what_was_before_a_recovery_or_before_the_driver_was_loaded_is_over(tmp_path):
    path = log(
        tmp_path / "kmsg",
        (1_000_000, "3b", "119, Timeout"),
        (2_000_000, "3b", "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        (3_000_000, "af", "79, GPU has fallen off the bus."),
    )
    reader = KernelLog(str(path), lambda: 0.0)
    one, two = described(reader, "0000:3b:00.0", "0000:af:00.0")
    assert (one["xid"]["code"], two["xid"]["code"]) == (154, 79)
    log(path, (9_000_000, "3b", "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"))
    found = cards("0000:3b:00.0", "0000:af:00.0")
    found[0]["xid"] = {"code": 154, "time": 9.5, "source": "nvml", "detail": None}
    reader.describe(found)
    assert found[0]["xid"] is None and found[1]["xid"]["code"] == 79
    with path.open("a", encoding="utf-8") as file:
        file.write("4,9,12000000,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n")
    assert described(reader, "0000:af:00.0")[0]["xid"] is None
    log(path, (13_000_000, "af", "143, GPU init failed"))
    assert described(reader, "0000:af:00.0")[0]["xid"]["code"] == 143


def test_the_logs_file_is_opened_once_and_closed(tmp_path):
    path = log(tmp_path / "kmsg", (1, "3b", "13, a"))
    reader = KernelLog(str(path))
    before = open_files()
    for _ in range(3):
        described(reader, "0000:3b:00.0")
    assert open_files() == before + 1
    reader.close()
    assert open_files() == before


def test_a_bus_id_is_the_same_in_every_spelling():
    assert bus_key("00000000:3B:00.0") == bus_key("0000:3b:00.0") == "0000:3b:00"
    assert bus_key("00010000:3B:00.0") == "10000:3b:00" and bus_key(None) is None and bus_key("odd") is None
