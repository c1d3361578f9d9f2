"""A card's health by NVML, replayed from a recording of two real H200 on NVLink; faults are put into that recording."""

import pynvml
import pytest

from dflash_tui.node import nvmlask
from dflash_tui.node.nvml import Nvml
from dflash_tui.node.nvmlhealth import CLOCK_REASONS, Rates
from tests.fakes.nvml import ReplayedNvml, recording

GROUPS = ("ecc", "remapped_rows", "pcie", "nvlink", "mig")
LOAD = ("utilisation_percent", "memory_used_bytes", "power_watts", "temperature_celsius", "sm_clock_mhz")


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def read(**faults):
    return Nvml(ReplayedNvml(**faults)).read()[0]


def answer(call):
    return recording()["phases"]["busy"]["nvml"]["devices"][0][call]["value"]


def test_every_group_of_a_real_card_is_what_its_driver_said():
    card, field = read(), recording()["phases"]["busy"]["nvml"]["devices"][0]["fields"]
    assert card["error"] is None and card["faults"] == []
    assert card["energy_joules"] == field["83:0"]["value"] / 1000
    assert card["memory_temperature_celsius"] == field["82:0"]["value"]
    assert card["temperature_slowdown_celsius"] == answer("nvmlDeviceGetTemperatureThreshold(1)")
    assert card["temperature_shutdown_celsius"] == answer("nvmlDeviceGetTemperatureThreshold(0)")
    assert card["power_limit_default_watts"] == answer("nvmlDeviceGetPowerManagementDefaultLimit()") / 1000
    assert card["power_limit_max_watts"] == answer("nvmlDeviceGetPowerManagementLimitConstraints()")[1] / 1000
    assert (card["performance_state"], card["persistence"], card["compute_mode"]) == (0, True, "default")
    assert card["ecc"]["enabled"] is True and card["ecc"]["volatile_uncorrected"] == 0
    assert card["remapped_rows"] == {"correctable": 0, "uncorrectable": 0, "pending": False, "failure": False}
    assert (card["pcie"]["generation"], card["pcie"]["width"]) == (5, 16)
    assert card["nvlink"]["links"] == [True] * 18 and card["nvlink"]["replay_errors"] == 0
    assert card["mig"] == {"enabled": False, "pending": False, "instances": []}


def test_what_an_h200_does_not_have_is_null_and_not_zero():
    card = read()
    assert card["fan_percent"] is None and card["retired_pages"] is None


@pytest.mark.parametrize(("phase", "names"), [("idle", ["gpu_idle"]), ("busy", ["sw_power_cap"])])
def test_the_reasons_for_the_clocks_of_a_real_card_have_their_names(phase, names):
    assert read(phase=phase)["clock_reasons"] == names


def test_the_names_of_the_reasons_are_the_bits_of_the_drivers_header():
    for place, name in enumerate(CLOCK_REASONS):
        word = "".join(part.title() for part in name.split("_")).replace("ClocksSetting", "ClocksSetting")
        word = {"DisplayClocksSetting": "DisplayClockSetting"}.get(word, word)
        assert getattr(pynvml, f"nvmlClocksThrottleReason{word}") == 1 << place


def test_bytes_copied_to_a_real_card_are_what_it_received_and_bytes_copied_from_it_what_it_sent():
    copies = recording()["copies"]
    for way, more, less in (("to_card", 1, 0), ("from_card", 0, 1)):
        rates = copies[way]["nvml"]["nvmlDeviceGetPcieThroughput"]
        load = copies[way]["load"]
        told = {f"nvmlDeviceGetPcieThroughput({counter})": rates[str(counter)][-1]["value"] for counter in (more, less)}
        pcie = read(answers={(0, call): value for call, value in told.items()})["pcie"]
        ours = pcie["receive_bytes_per_s"] if way == "to_card" else pcie["send_bytes_per_s"]
        other = pcie["send_bytes_per_s"] if way == "to_card" else pcie["receive_bytes_per_s"]
        # What was moved, and up to 15 % of headers.
        assert 1.0 <= ours / (load["moved_bytes"] / load["seconds"]) < 1.15
        assert other < ours / 5


@pytest.mark.parametrize(
    ("function", "group"),
    [
        ("nvmlDeviceGetRemappedRows", "remapped_rows"),
        ("nvmlDeviceGetMigMode", "mig"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "clock_reasons"),
        ("nvmlDeviceGetPerformanceState", "performance_state"),
        ("nvmlDeviceGetNvLinkState", "nvlink"),
        ("nvmlDeviceGetComputeMode", "compute_mode"),
    ],
)
@pytest.mark.parametrize("code", [nvmlask.NOT_SUPPORTED, nvmlask.NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN])
def test_a_call_that_fails_costs_its_own_group_and_nothing_else(function, group, code):
    whole, card = read(), read(errors={(0, function): code})
    assert card[group] is None and card["error"] is None
    kept = {key: value for key, value in card.items() if key not in (group, "faults")}
    assert kept == {key: value for key, value in whole.items() if key not in (group, "faults")}
    assert bool(card["faults"]) == (code == pynvml.NVML_ERROR_UNKNOWN)


def test_without_field_values_the_card_still_has_its_load_and_the_other_groups():
    card = read(without=("nvmlDeviceGetFieldValues",))
    assert card["energy_joules"] is None and card["memory_temperature_celsius"] is None and card["nvlink"] is None
    assert all(card[key] is not None for key in (*LOAD, "ecc", "remapped_rows", "pcie", "mig"))


def test_a_driver_without_any_of_these_calls_still_tells_the_load():
    names = {call.split("(")[0] for call in ReplayedNvml()._answers if call.startswith("nvml")}
    loads = ("UUID", "Name", "Utilization", "MemoryInfo", "Power", "Temperature", "ClockInfo", "Processes")
    old = tuple(name for name in names if not any(word in name for word in loads))
    card = read(without=(*old, "nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState", "nvmlDeviceRegisterEvents"))
    assert all(card[key] is not None for key in LOAD) and card["error"] is None
    assert all(card[key] is None for key in (*GROUPS, "clock_reasons", "energy_joules", "xid", "xid_source"))


def test_the_older_name_of_the_clock_reasons_is_tried():
    assert read(without=("nvmlDeviceGetCurrentClocksEventReasons",))["clock_reasons"] == ["sw_power_cap"]


def test_a_link_that_is_down_is_told_by_its_number():
    links = read(answers={(0, f"nvmlDeviceGetNvLinkState({link})"): 0 for link in (3, 17)})["nvlink"]["links"]
    assert [number for number, up in enumerate(links) if up is False] == [3, 17]


def test_nvlink_rates_are_what_was_counted_between_two_readings():
    module, time = ReplayedNvml(), Time()
    reader = Nvml(module, time)
    assert reader.read()[0]["nvlink"]["send_bytes_per_s"] is None
    module.fields.update({(0, "138:4294967295"): 5_000_000, (0, "139:4294967295"): 2_000_000})
    time.now += 10
    nvlink = reader.read()[0]["nvlink"]
    assert (nvlink["send_bytes_per_s"], nvlink["receive_bytes_per_s"]) == (512_000_000.0, 204_800_000.0)


def test_a_counter_that_went_back_gives_no_rate():
    rates = Rates()
    assert [rates.of("x", count, now) for count, now in ((9, 1.0), (4, 2.0), (6, 3.0), (None, 4.0), (8, 5.0))] == [
        None, None, 2.0, None, None,
    ]  # fmt: skip


def test_errors_of_the_memory_reach_their_fields():
    card = read(
        answers={
            (0, "nvmlDeviceGetTotalEccErrors(0, 0)"): 1, (0, "nvmlDeviceGetTotalEccErrors(1, 0)"): 2,
            (0, "nvmlDeviceGetTotalEccErrors(0, 1)"): 3, (0, "nvmlDeviceGetTotalEccErrors(1, 1)"): 4,
            (0, "nvmlDeviceGetEccMode()"): [1, 0], (0, "nvmlDeviceGetRemappedRows()"): [5, 6, 1, 0],
        },
        fields={(0, "29:0"): 7, (0, "30:0"): 8, (0, "31:0"): 1},
    )  # fmt: skip
    assert card["ecc"] == {
        "enabled": True, "pending": False, "volatile_corrected": 1, "volatile_uncorrected": 2,
        "aggregate_corrected": 3, "aggregate_uncorrected": 4,
    }  # fmt: skip
    assert card["remapped_rows"] == {"correctable": 5, "uncorrectable": 6, "pending": True, "failure": False}
    assert card["retired_pages"] == {"single_bit": 7, "double_bit": 8, "pending": True}


MIG = {
    0: [
        {"uuid": "MIG-a", "name": "NVIDIA H200 MIG 1g.18gb", "used": 5 << 30, "total": 16 << 30},
        {"uuid": "MIG-b", "name": "NVIDIA H200 MIG 3g.71gb", "used": 1 << 30, "total": 69 << 30},
    ]
}


def test_a_card_under_mig_lists_its_instances_and_has_no_utilisation():
    card = read(mig=MIG)
    assert card["utilisation_percent"] is None and card["error"] is None and card["power_watts"] is not None
    found = card["mig"]["instances"]
    assert [(one["uuid"], one["profile"], one["gpu_instance"]) for one in found] == [
        ("MIG-a", "1g.18gb", 1),
        ("MIG-b", "3g.71gb", 2),
    ]
    assert [(one["memory_used_bytes"] >> 30, one["memory_total_bytes"] >> 30) for one in found] == [(5, 16), (1, 69)]


def test_the_memory_of_an_instance_is_read_each_time_and_a_new_one_is_found_later():
    module, time = ReplayedNvml(mig={0: [dict(MIG[0][0])]}), Time()
    reader = Nvml(module, time)
    reader.read()
    module.mig[0][0]["used"] = 6 << 30
    module.mig[0].append(MIG[0][1])
    time.now += 1
    (one,) = reader.read()[0]["mig"]["instances"]
    assert one["memory_used_bytes"] == 6 << 30
    time.now += 10
    assert len(reader.read()[0]["mig"]["instances"]) == 2


def test_a_second_costs_a_card_few_calls_and_the_rest_comes_every_ten():
    module, time = ReplayedNvml(cards=8), Time()
    reader = Nvml(module, time)
    reader.read()
    time.now += 100
    reader.read()
    counts = []
    for _ in range(60):
        time.now += 1
        before = len(module.asked)
        reader.read()
        counts.append(len(module.asked) - before)
    assert min(counts) <= 8 * 14 and sum(counts) / len(counts) < 8 * 20
    # The cards take turns: no second pays for all of them.
    assert max(counts) < 8 * 40


def test_traffic_on_pcie_is_asked_of_one_card_at_a_time():
    module, time = ReplayedNvml(cards=4), Time()
    reader = Nvml(module, time)
    for _ in range(4):
        before = len(module.asked)
        cards = reader.read()
        assert sum("PcieThroughput" in call for call in module.asked[before:]) == 2
        time.now += 1
    assert all(card["pcie"]["receive_bytes_per_s"] is not None for card in cards)


def test_what_a_card_does_not_have_is_not_asked_again_each_second_but_after_some_minutes():
    module, time = ReplayedNvml(errors={(0, "nvmlDeviceGetUtilizationRates"): nvmlask.NOT_SUPPORTED}), Time()
    reader = Nvml(module, time)
    for _ in range(30):
        reader.read()
        time.now += 1
    asked = [call for call in module.asked if call in ("nvmlDeviceGetUtilizationRates()", "nvmlDeviceGetFanSpeed()")]
    assert sorted(asked) == ["nvmlDeviceGetFanSpeed()", "nvmlDeviceGetUtilizationRates()"]
    del module.errors[0, "nvmlDeviceGetUtilizationRates"]
    time.now += 600
    assert reader.read()[0]["utilisation_percent"] is not None


def test_an_unknown_error_is_no_lasting_answer():
    module = ReplayedNvml(errors={(0, "nvmlDeviceGetPerformanceState"): pynvml.NVML_ERROR_UNKNOWN})
    reader = Nvml(module)
    assert reader.read()[0]["performance_state"] is None
    module.errors.clear()
    assert reader.read()[0]["performance_state"] == 0


def test_a_card_lost_in_the_middle_tells_nothing_of_its_old_health():
    module, time = ReplayedNvml(cards=2), Time()
    reader = Nvml(module, time)
    assert reader.read()[1]["ecc"] is not None
    module.errors[1, "nvmlDeviceGetUtilizationRates"] = nvmlask.GPU_IS_LOST
    time.now += 1
    good, card = reader.read()
    assert card["error"] == "GPU is lost" and card["ecc"] is None and card["nvlink"] is None
    assert good["error"] is None and good["ecc"] is not None
