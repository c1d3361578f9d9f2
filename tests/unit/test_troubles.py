"""What is said of a card, from its readings."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_tui.fleet.gpu import (
    Gpu,
    GpuEcc,
    GpuMig,
    GpuNvLink,
    GpuPcie,
    GpuRemappedRows,
    GpuRetiredPages,
    GpuXid,
)
from dflash_tui.fleet.troubles import CARD_XID_S, HELD_BACK, PROGRAM_XID_S, Severity, troubles, worst
from dflash_tui.fleet.xids import XIDS, meaning
from dflash_tui.node.xids import OF_PROGRAMS

NOW = 10_000.0
ALARM, WARNING, NOTE = Severity.ALARM, Severity.WARNING, Severity.NOTE
HEALTHY = Gpu(
    0, "GPU-0", "NVIDIA H200", utilisation_percent=100.0, temperature_celsius=56.0, temperature_slowdown_celsius=89.0,
    memory_temperature_celsius=42.0, temperature_memory_max_celsius=95.0, power_watts=600.0, power_limit_watts=700.0,
    power_limit_default_watts=700.0, sm_clock_mhz=1980, clock_reasons=(), ecc=GpuEcc(True, True, 3, 0, 9, 0),
    remapped_rows=GpuRemappedRows(0, 0, False, False), retired_pages=GpuRetiredPages(0, 0, False),
    pcie=GpuPcie(5, 5, 16, 16, 0, 1.0, 1.0), nvlink=GpuNvLink((True,) * 18, 1.0, 1.0, 0, 0, 0), mig=GpuMig(False, False, ()),
    xid_source="nvml",
)  # fmt: skip


def said(**readings: object) -> list[tuple[Severity, str, str]]:
    gpu = dataclasses.replace(HEALTHY, **readings)
    return [(trouble.severity, trouble.word, trouble.line) for trouble in troubles(gpu, NOW)]


def test_a_healthy_card_under_load_and_a_card_that_says_nothing_have_no_trouble() -> None:
    assert said() == []
    assert troubles(Gpu(0), NOW) == ()


@pytest.mark.parametrize("reason", ["gpu_idle", "applications_clocks_setting", "sync_boost", "display_clocks_setting"])
def test_rest_and_chosen_clocks_are_no_trouble(reason: str) -> None:
    assert said(clock_reasons=(reason,)) == []


@pytest.mark.parametrize(
    ("readings", "severity", "word", "line"),
    [
        ({"error": "GPU is lost"}, ALARM, "lost", "GPU is lost"),
        ({"ecc": GpuEcc(volatile_uncorrected=3)}, ALARM, "ECC", "uncorrected ECC errors: 3 since"),
        ({"ecc": GpuEcc(aggregate_uncorrected=3, volatile_uncorrected=0)}, NOTE, "ECC", "3 in the card's life"),
        ({"ecc": GpuEcc(volatile_corrected=1000)}, WARNING, "ECC", "corrected ECC errors: 1,000"),
        ({"ecc": GpuEcc(enabled=True, pending=False)}, NOTE, "ECC", "ECC is on and will be off after a reset"),
        ({"remapped_rows": GpuRemappedRows(pending=True)}, WARNING, "remap", "row remapping pending"),
        ({"remapped_rows": GpuRemappedRows(failure=True)}, ALARM, "remap", "row remapping failed"),
        ({"remapped_rows": GpuRemappedRows(uncorrectable=2)}, NOTE, "remap", "uncorrectable errors: 2"),
        ({"retired_pages": GpuRetiredPages(pending=True)}, WARNING, "retire", "page retirement pending"),
        ({"clock_reasons": ("hw_thermal_slowdown", "hw_slowdown")}, ALARM, "hot", "thermal slowdown now"),
        ({"clock_reasons": ("hw_power_brake_slowdown",)}, ALARM, "power", "power brake now"),
        ({"clock_reasons": ("hw_slowdown",)}, ALARM, "slow", "hardware slowdown now"),
        ({"clock_reasons": ("sw_thermal_slowdown",)}, WARNING, "hot", "(SM 1980 MHz)"),
        ({"clock_reasons": ("sw_power_cap",)}, NOTE, "power", "the power limit of 700 W holds the clocks down"),
        ({"temperature_celsius": 89.0}, WARNING, "hot", "the card is at 89 °C, its limit is 89 °C"),
        ({"memory_temperature_celsius": 96.0}, WARNING, "hot", "its memory is at 96 °C"),
        ({"power_limit_watts": 400.0}, NOTE, "power", "400 W, the card's default is 700 W"),
        ({"pcie": GpuPcie(5, 5, 4, 16)}, WARNING, "PCIe", "PCIe x4 of x16"),
        ({"pcie": GpuPcie(1, 5, 16, 16)}, WARNING, "PCIe", "PCIe generation 1 of 5 under load"),
        ({"nvlink": GpuNvLink((True, False, True, False, False, None))}, WARNING, "NVLink", "3 of 5 links down: 1, 3, 4"),
        ({"nvlink": GpuNvLink((True,), recovery_errors=2)}, WARNING, "NVLink", "recovered 2 times"),
        ({"nvlink": GpuNvLink((True,), crc_errors=7)}, NOTE, "NVLink", "CRC errors: 7"),
        ({"mig": GpuMig(False, True, ())}, NOTE, "MIG", "MIG is off and will be on"),
        ({"xid": GpuXid(79, NOW - 90)}, ALARM, "XID79", "XID 79 1m 30s ago: the card has fallen off the bus"),
        ({"xid": GpuXid(31, NOW - 90, "kernel log", "pid=7")}, NOTE, "XID31", "(pid=7)"),
        ({"xid": GpuXid(9999, NOW)}, WARNING, "XID9999", "XID 9999"),
        ({"faults": ("NVLink: Unknown Error",)}, NOTE, "reading", "not read: NVLink: Unknown Error"),
    ],
)  # fmt: skip
def test_each_trouble_has_its_weight_its_word_and_its_figures(
    readings: dict[str, object], severity: Severity, word: str, line: str
) -> None:
    (found,) = said(**readings)
    assert found[:2] == (severity, word) and line in found[2]


def test_the_worst_comes_first_and_only_alarms_and_warnings_are_marked() -> None:
    many = said(pcie=GpuPcie(5, 5, 4, 16), clock_reasons=("sw_power_cap",), ecc=GpuEcc(volatile_uncorrected=1))
    assert [severity for severity, _, _ in many] == [ALARM, WARNING, NOTE]
    noted = dataclasses.replace(HEALTHY, clock_reasons=("sw_power_cap",))
    assert troubles(noted, NOW) and worst(noted, NOW) is None
    marked = worst(dataclasses.replace(HEALTHY, pcie=GpuPcie(5, 5, 4, 16)), NOW)
    assert marked is not None and marked.word == "PCIe"


def test_a_low_generation_or_width_at_rest_saves_power_and_all_links_down_are_no_links() -> None:
    assert said(utilisation_percent=0.0, pcie=GpuPcie(1, 5, 16, 16)) == []
    assert said(utilisation_percent=None, pcie=GpuPcie(1, 5, 16, 16)) == []
    narrow = GpuPcie(1, 4, 8, 16)
    assert said(utilisation_percent=0.0, performance_state=8, pcie=narrow) == []
    assert [word for _, word, _ in said(utilisation_percent=0.0, performance_state=0, pcie=narrow)] == ["PCIe"]
    assert [word for _, word, _ in said(utilisation_percent=90.0, performance_state=3, pcie=narrow)] == ["PCIe", "PCIe"]
    assert said(nvlink=GpuNvLink((False,) * 18)) == []


def test_a_programs_xid_is_soon_forgotten_and_a_cards_is_a_note_after_a_day() -> None:
    old, very_old = NOW - PROGRAM_XID_S - 1, NOW - CARD_XID_S - 1
    assert said(xid=GpuXid(31, old)) == []
    assert said(xid=GpuXid(79, old))[0][0] is ALARM
    assert said(xid=GpuXid(79, very_old))[0][0] is NOTE


def test_the_node_knows_the_same_codes_as_faults_of_programs() -> None:
    assert {code for code, means in XIDS.items() if means.about_program} == OF_PROGRAMS


def test_every_word_fits_beside_a_card_and_every_line_has_a_remedy() -> None:
    words = [word for _, word, _, _ in HELD_BACK.values()] + [f"XID{code}" for code in XIDS]
    assert max(map(len, words)) <= 7
    for code in (13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120):
        found = meaning(code)
        assert found.text and found.remedy and found is XIDS[code]
    (reset,) = troubles(dataclasses.replace(HEALTHY, index=5, xid=GpuXid(48, NOW)), NOW)
    assert "-i 5" in reset.remedy and "INDEX" not in reset.remedy


def test_what_the_kernel_wrote_stays_on_one_line() -> None:
    ((_, _, line),) = said(xid=GpuXid(79, NOW, "kernel log", "a\nb\x1b[31m"))
    assert line.isprintable()
