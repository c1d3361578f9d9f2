"""nvidia-smi as it is run on a node: a real process, answering from the recording of a real card."""

import shutil
import time
from pathlib import Path

import pytest

from dflash_tui.node.metrics import Gpus
from dflash_tui.node.nvml import Nvml, NvmlUnavailable
from dflash_tui.node.smi import (
    GPU_FIELDS,
    GPU_QUERY,
    PROCESS_QUERY,
    Smi,
    SmiUnavailable,
    find,
    parse_cards,
    parse_processes,
)
from tests.fakes.nvml import RECORDING, SMI, recording

FIELDS = ("utilisation_percent", "memory_used_bytes", "memory_total_bytes", "power_watts", "power_limit_watts")
LONG = 60.0  # a limit that a slow machine does not reach
MEBIBYTE = 1 << 20


@pytest.fixture
def smi(monkeypatch):
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI", str(RECORDING))
    monkeypatch.setenv("DFLASH_TUI_FAKE_GPUS", "8")
    readers = []

    def make(mode="ok", limit=LONG, buses=(), phase="busy"):
        monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", mode)
        monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_PHASE", phase)
        readers.append(Smi(str(SMI), time_limit_s=limit, buses=lambda: list(buses)))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def no_nvml() -> Nvml:
    raise NvmlUnavailable("NVML Shared Library Not Found", installed=False)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_recording_answers_the_very_commands_that_the_node_runs():
    for phase in recording()["phases"].values():
        assert phase["smi"]["gpus"]["arguments"] == list(GPU_QUERY)
        assert phase["smi"]["processes"]["arguments"] == list(PROCESS_QUERY)
        assert phase["smi"]["gpus"]["exit"] == 0


@pytest.mark.parametrize("phase", ["idle", "busy"])
def test_every_reading_of_a_real_card_is_understood(phase):
    said = recording()["phases"][phase]["smi"]["gpus"]["stdout"]
    cards, lost = parse_cards(said)
    assert len(cards) == len(said.strip().splitlines()) and lost == []
    row = dict(zip(GPU_FIELDS, said.strip().splitlines()[0].split(", "), strict=True))
    card = cards[0]
    assert card["name"] == row["name"] and card["uuid"] == row["uuid"] and card["error"] is None
    assert card["utilisation_percent"] == float(row["utilization.gpu"])
    assert card["memory_used_bytes"] == int(row["memory.used"]) * MEBIBYTE
    assert card["memory_total_bytes"] == int(row["memory.total"]) * MEBIBYTE
    assert card["power_watts"] == float(row["power.draw"])
    assert card["power_limit_watts"] == float(row["power.limit"])
    assert card["temperature_celsius"] == float(row["temperature.gpu"])
    assert (card["sm_clock_mhz"], card["memory_clock_mhz"]) == (int(row["clocks.sm"]), int(row["clocks.mem"]))


def test_nvidia_smi_and_nvml_tell_the_same_of_the_same_card():
    phase = recording()["phases"]["idle"]
    card = parse_cards(phase["smi"]["gpus"]["stdout"])[0][0]
    answers = phase["nvml"]["devices"][0]
    assert card["name"] == answers["nvmlDeviceGetName()"]["value"]
    assert card["uuid"] == answers["nvmlDeviceGetUUID()"]["value"]
    memory = answers["nvmlDeviceGetMemoryInfo(33554472)"]["value"]
    assert abs(card["memory_used_bytes"] - memory["used"]) <= 16 * MEBIBYTE
    assert abs(card["memory_total_bytes"] - memory["total"]) <= MEBIBYTE


def test_eight_cards_come_in_order_with_the_processes_of_each(smi):
    cards = smi().read()
    assert [card["index"] for card in cards] == list(range(8))
    assert len({card["uuid"] for card in cards}) == 8
    rows = recording()["phases"]["busy"]["smi"]["processes"]["stdout"].strip().splitlines()
    for card in cards:
        assert [process["pid"] for process in card["processes"]] == sorted({int(row.split(", ")[1]) for row in rows})


def test_an_idle_card_has_no_processes_which_is_not_the_same_as_unknown(smi):
    said = recording()["phases"]["idle"]["smi"]["processes"]["stdout"]
    assert said.strip() == ""
    assert all(card["processes"] == [] for card in smi(phase="idle").read())


@pytest.mark.parametrize("index", [0, 3, 7])
def test_a_lost_card_hides_no_other(smi, index):
    good = smi().read()
    cards = smi(f"lost:{index}").read()
    assert [card["index"] for card in cards] == list(range(8))
    assert cards[index]["error"].startswith("GPU is lost")
    assert all(cards[index][field] is None for field in FIELDS) and cards[index]["processes"] is None
    for card, before in zip(cards, good, strict=True):
        if card["index"] != index:
            assert card == before and card["error"] is None


def test_a_card_lost_while_we_watch_keeps_its_name_and_uuid(smi, monkeypatch):
    reader = smi()
    before = reader.read()[3]
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", "lost:3")
    card = reader.read()[3]
    assert card["error"] and (card["uuid"], card["name"]) == (before["uuid"], before["name"])
    assert card["memory_used_bytes"] is None


def test_a_version_that_stops_at_the_lost_card_is_asked_for_the_rest_by_bus_id(smi):
    buses = [f"0000:{0x10 + index:02x}:00.0" for index in range(8)]
    cards = smi("stop:2", buses=buses).read()
    assert [card["index"] for card in cards] == list(range(8))
    assert [bool(card["error"]) for card in cards] == [index == 2 for index in range(8)]
    assert all(card["memory_used_bytes"] is not None for card in cards if card["index"] != 2)


def test_without_the_drivers_list_the_rest_is_asked_for_by_the_uuids_seen_before(smi, monkeypatch):
    reader = smi()
    reader.read()
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", "stop:2")
    cards = reader.read()
    assert [card["index"] for card in cards] == list(range(8))
    assert [bool(card["error"]) for card in cards] == [index == 2 for index in range(8)]


def test_a_lost_last_card_is_placed_by_its_bus_id_even_before_the_others(smi):
    buses = [f"0000:{0x10 + index:02x}:00.0" for index in range(8)]
    text = "Unable to determine the device handle for GPU 0000:17:00.0: Unknown Error\n"
    assert parse_cards(text)[1] == [("0000:17:00.0", "Unknown Error")]
    cards = smi("lost:7", buses=buses).read()
    assert [card["index"] for card in cards if card["error"]] == [7]


def test_each_way_to_say_not_available_is_null_and_not_zero(smi):
    cards = smi("na:1").read()
    readings = [*FIELDS, "temperature_celsius", "sm_clock_mhz", "memory_clock_mhz"]
    assert all(cards[1][field] is None for field in readings)
    assert cards[1]["uuid"] and cards[1]["name"]
    assert all(cards[0][field] is not None for field in readings)
    # "[N/A]" alone is no fault; "[Unknown Error]" is one, and it is said where.
    assert "memory.total" in cards[1]["error"] and cards[0]["error"] is None


def test_utilisation_under_mig_is_not_available_and_no_fault():
    row = recording()["phases"]["idle"]["smi"]["gpus"]["stdout"].strip().splitlines()[0].split(", ")
    row[GPU_FIELDS.index("utilization.gpu")] = "[N/A]"
    card = parse_cards(", ".join(row))[0][0]
    assert card["utilisation_percent"] is None and card["error"] is None
    assert card["memory_used_bytes"] is not None


def test_processes_keep_their_card_and_an_unknown_memory_is_null():
    found = parse_processes(
        "GPU-a, 11, /usr/bin/python3, 1024\n"
        "GPU-b, 12, python -c 'a, b', 2\n"
        "GPU-b, 13, [Not Found], [N/A]\n"
        "GPU-b, 14, vllm, [Insufficient Permissions]\n"
        "GPU-a, 11, /usr/bin/python3, 512\n"
        "No running processes found\n"
    )
    assert found == {
        "GPU-a": [{"pid": 11, "memory_bytes": 1536 * MEBIBYTE}],
        "GPU-b": [
            {"pid": 12, "memory_bytes": 2 * MEBIBYTE},
            {"pid": 13, "memory_bytes": None},
            {"pid": 14, "memory_bytes": None},
        ],
    }


def test_a_hung_nvidia_smi_is_killed_in_its_own_time_and_leaves_nothing(smi, monkeypatch):
    started = []
    reader = smi("hang", limit=0.5)
    real = reader._end_hung
    monkeypatch.setattr(reader, "_end_hung", lambda process: (started.append(process.pid), real(process)))
    with pytest.raises(SmiUnavailable, match=r"nvidia-smi did not answer in 0\.5 s") as caught:
        reader.read()
    assert caught.value.hung and len(started) == 1
    assert not alive(started[0])


def test_no_second_nvidia_smi_is_started_while_a_hung_one_cannot_be_killed(smi, monkeypatch):
    reader = smi("hang", limit=0.5)
    # Nothing here can make a process deaf to SIGKILL as a broken driver does; so the signal is held back.
    monkeypatch.setattr("dflash_tui.node.smi.REAP_LIMIT_S", 0.05)
    with monkeypatch.context() as deaf:
        deaf.setattr(reader, "_kill", lambda process: None)
        with pytest.raises(SmiUnavailable, match="did not answer"):
            reader.read()
        stuck = reader._running.pid
        with pytest.raises(SmiUnavailable, match=f"process {stuck}.* hangs"):
            reader.read()
        assert reader._running.pid == stuck and alive(stuck)
    reader.close()
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", "ok")
    reader._time_limit_s = LONG
    end = time.monotonic() + LONG
    while alive(stuck) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(reader.read()) == 8


def test_what_a_hung_driver_last_said_stays_and_is_called_stale(smi, monkeypatch):
    reader = smi()
    gpus = Gpus(open_nvml=no_nvml, smi=reader)
    good = gpus.read()
    assert good.source == "nvidia-smi" and good.error is None
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", "hang")
    reader._time_limit_s = 0.5
    stale = gpus.read()
    assert stale.gpus == good.gpus and stale.source == "nvidia-smi"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(good.time))
    assert stale.error == f"nvidia-smi did not answer in 0.5 s; stale since {since}"
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", "ok")
    reader._time_limit_s = LONG
    assert gpus.read().error is None


def test_a_driver_that_does_not_work_is_told_in_its_own_words(tmp_path):
    program = tmp_path / "nvidia-smi"
    said = "Failed to initialize NVML: Driver/library version mismatch"
    program.write_text(f"#!/bin/sh\necho '{said}'\nexit 18\n")
    program.chmod(0o755)
    reading = Gpus(open_nvml=no_nvml, smi=Smi(str(program), time_limit_s=LONG)).read()
    assert (reading.gpus, reading.source, reading.error) == ([], "none", f"nvidia-smi: {said}")


def test_what_a_wrapper_script_started_is_killed_with_it(tmp_path):
    program, note = tmp_path / "nvidia-smi", tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {note}.tmp && mv {note}.tmp {note}\nwait\n")
    program.chmod(0o755)
    limit = 0.5
    while not note.exists():  # a slow machine may need more to get as far
        limit *= 2
        with pytest.raises(SmiUnavailable, match="did not answer"):
            Smi(str(program), time_limit_s=limit).read()
        assert limit < LONG
    child = int(note.read_text())
    end = time.monotonic() + LONG
    while alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child)


def test_a_node_without_a_gpu_has_none_and_no_error(monkeypatch, tmp_path):
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        monkeypatch.setattr("dflash_tui.node.metrics.DRIVER", str(tmp_path / "none"))
    monkeypatch.setattr("dflash_tui.node.smi.FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find() is None
    reading = Gpus(open_nvml=no_nvml).read()
    assert (reading.gpus, reading.source, reading.error) == ([], "none", None)


def test_a_loaded_driver_that_nothing_can_ask_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr("dflash_tui.node.metrics.DRIVER", str(tmp_path / "nvidiactl"))
    monkeypatch.setattr("dflash_tui.node.smi.FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither NVML nor nvidia-smi" in Gpus(open_nvml=no_nvml).read().error
