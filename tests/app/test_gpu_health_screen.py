"""A card's troubles and health on the Fleet screen; the cards are those of a recording, with faults put into it."""

from __future__ import annotations

import json
from typing import Any

from dflash_tui.fleet.facts import Fact, Gpu, MetricsArrived
from dflash_tui.link import facts as wire
from dflash_tui.node.nvml import Nvml
from tests.fakes.nvml import ReplayedNvml

from .scripted import GIB, NOW, ScriptedLink, console, h200, host_metrics, live, shown, until, until_shown

MIG = {3: [{"uuid": "MIG-4711", "name": "NVIDIA H200 MIG 1g.18gb", "used": 5 * GIB, "total": 16 * GIB}]}
FAULTS: dict[tuple[int, str], Any] = {
    (1, "nvmlDeviceGetCurrPcieLinkWidth()"): 4,
    (1, "nvmlDeviceGetNvLinkState(3)"): 0,
    (2, "nvmlDeviceGetTotalEccErrors(1, 0)"): 3,
}


def node() -> list[Fact]:
    """Four cards as the node reads them: a good one, one badly linked, one with memory errors, one under MIG."""
    cards = Nvml(ReplayedNvml(cards=4, answers=FAULTS, mig=MIG)).read()
    found = wire.metrics({"time": NOW, "gpus": json.loads(json.dumps(cards)), "gpu_source": "nvml"})
    assert found is not None
    return [*live("gpu-1"), MetricsArrived("gpu-1", found)]


def line_of(app: Any, start: str) -> str:
    return next(line for line in shown(app).splitlines() if start in line)


async def test_a_card_in_trouble_has_a_mark_and_a_word_in_80_columns_and_a_good_one_has_none() -> None:
    app = console(ScriptedLink("gpu-1", node()))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "0 H200", "3 H200")
        assert line_of(app, " 1 H200 ").rstrip().endswith("!PCIe")
        assert line_of(app, " 2 H200 ").rstrip().endswith("!ECC")
        assert "!" not in line_of(app, " 0 H200 ") and "1425MHz" in line_of(app, " 0 H200 ")
        assert "693/700 W" in line_of(app, " 2 H200 ") and "56°C" in line_of(app, " 2 H200 ")


async def test_the_instances_of_a_card_under_mig_stand_below_it() -> None:
    app = console(ScriptedLink("gpu-1", node()))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "MIG 1g.18gb  use N/A  5.0/16.0 GiB  MIG-4711")
        lines = shown(app).splitlines()
        place = next(number for number, line in enumerate(lines) if "MIG-4711" in line)
        assert " 3 H200 " in lines[place - 1] and "N/A" in lines[place - 1]


async def test_the_detail_names_the_trouble_with_its_remedy_before_the_processes() -> None:
    app = console(ScriptedLink("gpu-1", node()))
    async with app.run_test(size=(120, 24)) as pilot:
        await until_shown(pilot, "2 H200")
        await pilot.press("down", "down", "down")
        await until_shown(pilot, "! ALARM   uncorrected ECC errors: 3 since", "stop using this card")


async def test_enter_gives_the_detail_the_room_for_every_group_and_escape_takes_it_back() -> None:
    app = console(ScriptedLink("gpu-1", node()))
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(pilot, "1 H200")
        await pilot.press("down", "down", "enter")
        await until_shown(
            pilot,
            "! warning PCIe x4 of x16",
            "1 of 18 links down: 3",
            "693/700 W (default 700, most 700)  energy 5,638J",
            "card 56°C (slows 89, stops 95)  memory 42°C (most 95)  fan N/A",
            "state P0  held back by power limit",
            "on  corrected 0, uncorrected 0  in its life 0, 0",
            "rows remapped 0 corrected, 0 uncorrected  pending no  failed no",
            "gen 5 of 5, x4 of x16",
            "17 of 18 links up (down: 3)",
            "none heard of (by nvml)",
            "persistence on  compute mode default",
        )
        await pilot.press("escape")
        await until(pilot, lambda: "persistence on" not in shown(app), "the detail small again")
        await pilot.press("up")
        await until_shown(pilot, "GPU 0 of gpu-1")


async def test_a_card_that_tells_nothing_of_its_health_shows_na_for_each_group() -> None:
    bare: Gpu = h200(0, 0.0)
    found = wire.metrics({"time": NOW, "gpus": [], "gpu_source": "nvml"})
    assert found is not None
    facts = [*live("gpu-1"), MetricsArrived("gpu-1", type(found)(NOW, host_metrics(), (bare,), "nvml"))]
    app = console(ScriptedLink("gpu-1", facts))
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(pilot, "0 H200")
        await pilot.press("down", "enter")
        await until_shown(pilot, "ECC       N/A", "NVLink    N/A", "PCIe      N/A", "MIG       N/A", "XID       N/A")
        assert "!" not in line_of(app, " 0 H200 ")
