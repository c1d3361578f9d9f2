"""NVML, replayed from the recording of a real card through the module that the node uses."""

import pynvml
import pytest

from dflash_tui.node import nvml, nvmlask
from dflash_tui.node.metrics import Gpus
from dflash_tui.node.nvml import Nvml, NvmlUnavailable
from dflash_tui.node.smi import Smi
from tests.fakes.nvml import RECORDING, SMI, ReplayedNvml, recording

READINGS = (
    "utilisation_percent",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "power_limit_watts",
    "temperature_celsius",
    "sm_clock_mhz",
    "memory_clock_mhz",
)
UNKNOWN_MEMORY = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
ALL = 0xFFFFFFFF  # the instance ids of a process on a card without MIG


def process(pid, used, instance=ALL):
    return {"pid": pid, "usedGpuMemory": used, "gpuInstanceId": instance, "computeInstanceId": instance}


@pytest.mark.parametrize("phase", ["idle", "busy"])
def test_every_reading_of_a_real_card_gets_its_unit(phase):
    answers = recording()["phases"][phase]["nvml"]["devices"][0]
    (card,) = Nvml(ReplayedNvml(phase)).read()
    assert card["error"] is None
    assert card["name"] == answers["nvmlDeviceGetName()"]["value"]
    assert card["utilisation_percent"] == answers["nvmlDeviceGetUtilizationRates()"]["value"]["gpu"]
    assert card["power_watts"] == answers["nvmlDeviceGetPowerUsage()"]["value"] / 1000
    assert card["power_limit_watts"] == answers["nvmlDeviceGetEnforcedPowerLimit()"]["value"] / 1000
    assert card["temperature_celsius"] == answers["nvmlDeviceGetTemperature(0)"]["value"]
    assert card["sm_clock_mhz"] == answers["nvmlDeviceGetClockInfo(1)"]["value"]
    assert card["memory_clock_mhz"] == answers["nvmlDeviceGetClockInfo(2)"]["value"]
    memory = answers[f"nvmlDeviceGetMemoryInfo({pynvml.nvmlMemory_v2})"]["value"]
    assert (card["memory_used_bytes"], card["memory_total_bytes"]) == (memory["used"], memory["total"])
    found = answers["nvmlDeviceGetComputeRunningProcesses_v3()"]["value"]
    assert [p["pid"] for p in card["processes"]] == sorted({p["pid"] for p in found})


def test_the_busy_card_is_busy_and_the_idle_one_is_not():
    (idle,), (busy,) = Nvml(ReplayedNvml("idle")).read(), Nvml(ReplayedNvml("busy")).read()
    assert idle["utilisation_percent"] == 0 and busy["utilisation_percent"] > 50
    assert busy["power_watts"] > idle["power_watts"]
    assert busy["memory_used_bytes"] > idle["memory_used_bytes"]


def test_nothing_is_asked_that_was_not_recorded_on_a_real_card():
    module = ReplayedNvml("busy")
    Nvml(module).read()
    assert module.asked and module.unrecorded == []


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "*", "nvmlDeviceGetPowerUsage"])
@pytest.mark.parametrize("code", [nvmlask.GPU_IS_LOST, nvmlask.RESET_REQUIRED])
def test_a_lost_card_hides_no_other(function, code):
    good = Nvml(ReplayedNvml(cards=8)).read()
    cards = Nvml(ReplayedNvml(cards=8, errors={(3, function): code})).read()
    assert [card["index"] for card in cards] == list(range(8))
    assert cards[3]["error"] == str(pynvml.NVMLError(code))
    assert [card for card in cards if card["index"] != 3] == [card for card in good if card["index"] != 3]


def test_a_card_that_is_gone_is_asked_no_further():
    module = ReplayedNvml(errors={(0, "nvmlDeviceGetUUID"): nvmlask.GPU_IS_LOST})
    Nvml(module).read()
    assert len(module.asked) == 1


def test_a_card_lost_while_we_watch_keeps_its_name_and_uuid():
    module = ReplayedNvml(cards=2)
    reader = Nvml(module)
    before = reader.read()[1]
    module.errors[1, "nvmlDeviceGetHandleByIndex"] = nvmlask.GPU_IS_LOST
    card = reader.read()[1]
    assert card["error"] == "GPU is lost"
    assert (card["uuid"], card["name"]) == (before["uuid"], before["name"])
    assert card["utilisation_percent"] is None and card["memory_used_bytes"] is None


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilisation_percent"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetTemperature", "temperature_celsius"),
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetUUID", "uuid"),
    ],
)
@pytest.mark.parametrize("code", [nvmlask.NOT_SUPPORTED, nvmlask.NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN])
def test_each_field_by_itself_may_be_missing(function, field, code):
    (whole,) = Nvml(ReplayedNvml()).read()
    (card,) = Nvml(ReplayedNvml(errors={(0, function): code})).read()
    assert card[field] is None
    assert {k: v for k, v in card.items() if k not in (field, "error")} == {
        k: v for k, v in whole.items() if k not in (field, "error")
    }
    # "Not supported" is an answer; an unknown error is a fault, and it is said of what.
    assert (card["error"] is None) == (code != pynvml.NVML_ERROR_UNKNOWN)


def test_utilisation_under_mig_is_not_available_and_its_processes_are_added_up():
    module = ReplayedNvml(
        errors={(0, "nvmlDeviceGetUtilizationRates"): nvmlask.NOT_SUPPORTED},
        processes={
            (0, "nvmlDeviceGetComputeRunningProcesses_v3"): [process(7, 100, 1), process(7, 50, 2), process(8, 5, 2)]
        },
    )
    (card,) = Nvml(module).read()
    assert card["utilisation_percent"] is None and card["error"] is None
    assert card["processes"] == [{"pid": 7, "memory_bytes": 150}, {"pid": 8, "memory_bytes": 5}]


def test_a_process_that_computes_and_draws_is_counted_once():
    module = ReplayedNvml(
        processes={
            (0, "nvmlDeviceGetComputeRunningProcesses_v3"): [process(7, 100)],
            (0, "nvmlDeviceGetGraphicsRunningProcesses_v3"): [process(7, 100), process(9, 3)],
        }
    )
    (card,) = Nvml(module).read()
    assert card["processes"] == [{"pid": 7, "memory_bytes": 100}, {"pid": 9, "memory_bytes": 3}]


@pytest.mark.parametrize("unknown", [None, UNKNOWN_MEMORY])
def test_a_process_whose_memory_is_not_told_is_listed_with_null(unknown):
    module = ReplayedNvml(processes={(0, "nvmlDeviceGetComputeRunningProcesses_v3"): [process(7, unknown)]})
    (card,) = Nvml(module).read()
    assert card["processes"] == [{"pid": 7, "memory_bytes": None}]


def test_processes_that_may_not_be_seen_are_unknown_and_not_none_at_all():
    errors = {
        (0, f"nvmlDeviceGet{kind}RunningProcesses{version}"): nvmlask.NO_PERMISSION
        for kind in ("Compute", "Graphics")
        for version in ("_v3", "_v2", "")
    }
    (card,) = Nvml(ReplayedNvml(errors=errors)).read()
    assert card["processes"] is None and card["error"] is None


def test_an_older_driver_is_asked_by_its_older_entry_points():
    old = {
        (0, "nvmlDeviceGetComputeRunningProcesses_v3"): nvmlask.FUNCTION_NOT_FOUND,
        (0, "nvmlDeviceGetGraphicsRunningProcesses_v3"): nvmlask.FUNCTION_NOT_FOUND,
        (0, "nvmlDeviceGetEnforcedPowerLimit"): nvmlask.FUNCTION_NOT_FOUND,
        (0, "nvmlDeviceGetTemperature"): nvmlask.FUNCTION_NOT_FOUND,
    }
    module = ReplayedNvml(errors=old)
    (card,), (new,) = Nvml(module).read(), Nvml(ReplayedNvml()).read()
    assert "nvmlDeviceGetComputeRunningProcesses_v2()" in module.asked
    assert card["error"] is None and card["power_limit_watts"] and card["temperature_celsius"]
    assert [p["pid"] for p in card["processes"]] == [p["pid"] for p in new["processes"]]


def test_a_machine_without_the_library_has_no_nvml():
    # The real pynvml on a machine without a driver; with one, it must read.
    try:
        cards = Nvml().read()
    except NvmlUnavailable as error:
        assert "NVML" in str(error)
    else:
        assert all(card["uuid"] for card in cards)


def test_a_mismatched_driver_is_told_and_a_missing_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_tui.node.smi.FOLDERS", ())
    monkeypatch.setattr("dflash_tui.node.metrics.DRIVER", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))

    def reading(code):
        module = ReplayedNvml()
        module.init_error = code
        return Gpus(open_nvml=lambda: Nvml(module)).read()

    assert "version mismatch" in reading(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH).error
    assert reading(nvmlask.LIBRARY_NOT_FOUND).error is None
    assert reading(nvmlask.LIBRARY_NOT_FOUND).source == "none"


def test_when_nvml_breaks_nvidia_smi_takes_over_and_nvml_is_tried_again_later(monkeypatch):
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI", str(RECORDING))
    monkeypatch.setenv("DFLASH_TUI_FAKE_GPUS", "2")
    module = ReplayedNvml(cards=2)
    now = [0.0]
    gpus = Gpus(open_nvml=lambda: Nvml(module), smi=Smi(str(SMI), time_limit_s=60), clock=lambda: now[0])
    assert gpus.read().source == "nvml"
    module.count_error = nvmlask.UNINITIALIZED
    assert (gpus.read().source, module.open) == ("nvidia-smi", 0)
    module.count_error = None
    assert gpus.read().source == "nvidia-smi"
    now[0] += 31
    assert gpus.read().source == "nvml"


def test_readings_of_both_sources_have_the_same_keys():
    assert RECORDING.exists()
    (card,) = Nvml(ReplayedNvml()).read()
    assert set(card) == set(nvml.blank_card(0)) and set(READINGS) < set(card)
