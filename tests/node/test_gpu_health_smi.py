"""A card's health by nvidia-smi, run as a process that answers from the recording of real cards."""

import pytest

from dflash_tui.node import smihealth
from dflash_tui.node.nvml import Nvml
from dflash_tui.node.smi import Smi
from tests.fakes.nvml import RECORDING, SMI, ReplayedNvml, recording

BOTH = ("ecc", "remapped_rows", "retired_pages", "clock_reasons", "performance_state", "persistence", "compute_mode")


@pytest.fixture
def smi(monkeypatch):
    monkeypatch.setenv("DFLASH_TUI_FAKE_SMI", str(RECORDING))
    monkeypatch.setenv("DFLASH_TUI_FAKE_GPUS", "2")
    readers = []

    def make(without="", mode="ok", clock=lambda: 0.0):
        monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_WITHOUT", without)
        monkeypatch.setenv("DFLASH_TUI_FAKE_SMI_MODE", mode)
        readers.append(Smi(str(SMI), time_limit_s=60, clock=clock))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def test_nvidia_smi_and_nvml_tell_the_same_of_the_same_card(smi):
    (card, _), (same,) = smi().read(), Nvml(ReplayedNvml()).read()
    assert {key: card[key] for key in BOTH} == {key: same[key] for key in BOTH}
    for key in ("generation", "generation_max", "width", "width_max"):
        assert card["pcie"][key] == same["pcie"][key]
    assert (card["power_limit_default_watts"], card["power_limit_max_watts"]) == (700.0, 700.0)
    assert card["memory_temperature_celsius"] == pytest.approx(same["memory_temperature_celsius"], abs=5)
    assert card["mig"] == {"enabled": False, "pending": False, "instances": None}
    assert card["pci_bus_id"] == same["pci_bus_id"]


def test_what_only_nvml_knows_is_null(smi):
    card = smi().read()[0]
    assert card["nvlink"] is None and card["energy_joules"] is None and card["pcie"]["send_bytes_per_s"] is None


def test_the_refusal_of_a_field_is_worded_as_the_real_one():
    refused = recording()["phases"]["idle"]["smi"]["unknown_field"]
    assert refused["exit"] != 0 and smihealth.REFUSED.search(refused["stdout"]).group(1) == "no.such.field"


def test_a_version_that_knows_fewer_fields_gives_the_others(smi):
    reader = smi(without="clocks_event_reasons,mig.mode")
    cards = [reader.read()[0] for _ in range(3)]  # each of the first two meets a refusal
    assert all(card["utilisation_percent"] is not None for card in cards)
    assert cards[-1]["clock_reasons"] == ["sw_power_cap"]  # by its older name
    assert cards[-1]["mig"] is None and cards[-1]["remapped_rows"] is not None
    assert cards[-1]["ecc"]["enabled"] is True and cards[-1]["pcie"]["width"] == 16


def test_a_refused_field_is_asked_for_by_its_other_name_or_left_out_with_its_family():
    query = smihealth.Query()
    for refused, gone in (
        ("retired_pages.single_bit_ecc.count", 0),
        ("retired_pages.sbe", 1),
        ("remapped_rows.correctable", 4),
        ("fan.speed", 1),
    ):
        before = len(query.fields)
        query = query.without(f'Field "{refused}" is not a valid field to query.\n')
        assert len(query.fields) == before - gone and refused not in query.argument.split("=")[1].split(",")
    assert query.without('Field "no.such.field" is not a valid field to query.') is None
    assert query.without("Driver/library version mismatch") is None


def test_health_is_asked_for_every_ten_seconds_and_kept_between(smi):
    now = [0.0]
    reader = smi(clock=lambda: now[0])
    asked = []
    ask = reader._ask
    reader._ask = lambda arguments: asked.append(arguments[0]) or ask(arguments)
    for second in (0.0, 9.0, 10.0):
        now[0] = second
        assert reader.read()[0]["ecc"] is not None
    assert sum("ecc.mode.current" in argument for argument in asked) == 2


def test_a_lost_card_has_no_health_and_takes_none_from_the_other(smi):
    good, lost = smi(mode="lost:1").read()
    assert lost["error"] and lost["ecc"] is None and good["ecc"] is not None


def row(**values):
    fields = {name: "[N/A]" for name, *_ in smihealth.FIELDS}
    return smihealth.health(
        {**fields, "index": "0", **{key.replace("__", "."): value for key, value in values.items()}}
    )


def test_a_row_of_nothing_but_na_has_no_group():
    assert all(value is None for value in row().values())


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "", "N/A"])
def test_no_way_to_say_not_available_becomes_a_zero(word):
    fields = {names[0]: word for names in smihealth.FIELDS}
    assert all(value is None for value in smihealth.health(fields).values())


def test_errors_and_pending_repairs_reach_their_fields():
    found = row(
        ecc__errors__uncorrected__volatile__total="3",
        remapped_rows__pending="Yes",
        remapped_rows__failure="No",
        retired_pages__pending="2",
        pcie__link__width__current="4",
        pcie__link__width__max="16",
        clocks_event_reasons__active="0x0000000000000048",
        mig__mode__current="Enabled",
        mig__mode__pending="Disabled",
    )
    assert found["ecc"]["volatile_uncorrected"] == 3 and found["ecc"]["volatile_corrected"] is None
    assert (found["remapped_rows"]["pending"], found["remapped_rows"]["failure"]) == (True, False)
    assert found["retired_pages"]["pending"] is True
    assert (found["pcie"]["width"], found["pcie"]["width_max"]) == (4, 16)
    assert found["clock_reasons"] == ["hw_slowdown", "hw_thermal_slowdown"]
    assert found["mig"] == {"enabled": True, "pending": False, "instances": None}
