"""The Fleet screen, driven by keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_tui.app.widgets.fleet_view import FleetView
from dflash_tui.fleet.facts import BeatArrived, Fact, Gpu, GpuProcess, LinkChanged, LinkState, Metrics, MetricsArrived

from .scripted import (
    NOW,
    Clock,
    ScriptedLink,
    console,
    cpu_node,
    gpu_node,
    h200,
    host_metrics,
    live,
    lost_node,
    refused_node,
    shown,
    type_text,
    until,
    until_shown,
    until_told,
)


async def test_every_card_has_its_line_and_a_lost_one_hides_no_other() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "0 H200", "1 H200", "GPU is lost", "3 H200 MIG")
        lines = shown(app).splitlines()
        busy = next(line for line in lines if " 0 H200 " in line)
        assert "71.0/141 GiB" in busy and "612/700 W" in busy and "87°C" in busy and "1980MHz" in busy and "%" in busy


async def test_what_is_not_available_is_never_shown_as_zero() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "3 H200 MIG")
        mig = next(line for line in shown(app).splitlines() if "3 H200 MIG" in line)
        assert mig.count("N/A") == 4 and "0%" not in mig and "0C" not in mig  # utilisation, power, heat, clock


async def test_a_node_without_gpus_says_so() -> None:
    app = console(ScriptedLink("laptop", cpu_node("laptop")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "no GPU on this node")


async def test_a_lost_link_keeps_the_readings_and_says_how_old_they_are() -> None:
    clock = Clock()
    app = console(ScriptedLink("gpu-7", lost_node("gpu-7")), ScriptedLink("gpu-9", refused_node("gpu-9")), clock=clock)
    async with app.run_test(size=(120, 24)) as pilot:
        await until_shown(pilot, "retrying in 4s", "last seen 1m 35s ago", "connection refused", "71.0/141 GiB")
        await until_shown(pilot, "gpu-9  refused", "the host key changed", "never seen")
        clock.time += 60
        await until_shown(pilot, "last seen 2m 35s ago", "retrying now")


async def test_a_hanging_driver_is_told_with_its_age() -> None:
    facts = live("gpu-1")
    facts.append(MetricsArrived("gpu-1", Metrics(NOW, host_metrics(), (h200(0, 5.0),), "nvml", age_s=42, stale=True)))
    app = console(ScriptedLink("gpu-1", facts))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "has not answered for 42s", "0 H200")


async def test_the_processes_of_the_card_under_the_cursor_stand_below() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1", job="20261130-025500-extract-3f9a")))
    async with app.run_test(size=(100, 24)) as pilot:
        await until_shown(pilot, "0 H200", "agent 4242")
        await pilot.press("down")
        await until_shown(pilot, "31000", "70.0 GiB", "20261130-025500-extract-3f9a  python -u")
        await pilot.press("down")
        await until_shown(pilot, "no process on this GPU")


async def test_the_cursor_stays_on_its_card_when_lines_come_above_it() -> None:
    link = ScriptedLink("gpu-1", live("gpu-1"))
    below = ScriptedLink("gpu-2", gpu_node("gpu-2"))
    app = console(link, below)
    async with app.run_test(size=(80, 40)) as pilot:
        await until_shown(pilot, "0 H200")
        await pilot.press("down", "down")
        view = app.screen.query_one(FleetView)
        before = view.cursor
        link.emit(MetricsArrived("gpu-1", Metrics(NOW, host_metrics(), tuple(h200(k, 1.0) for k in range(8)), "nvml")))
        await until(pilot, lambda: len(view.rows) > 15)
        assert view.cursor == before and view.gpu_of(before) is not None


async def test_the_filter_narrows_the_list_and_escape_gives_it_back() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")), ScriptedLink("laptop", cpu_node("laptop")))
    async with app.run_test(size=(80, 40)) as pilot:
        await until_shown(pilot, "gpu-1.cluster", "laptop.cluster")
        await pilot.press("slash")
        await type_text(pilot, "MIG")
        await until(pilot, lambda: "laptop" not in shown(app) and "1 H200 " not in shown(app))
        assert "3 H200 MIG" in shown(app)
        await pilot.press("escape")
        await until_shown(pilot, "laptop.cluster", "1 H200")


async def test_escape_gives_the_list_back_also_after_the_filter_was_kept() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")), ScriptedLink("laptop", cpu_node("laptop")))
    async with app.run_test(size=(80, 40)) as pilot:
        await until_shown(pilot, "gpu-1.cluster", "laptop.cluster")
        await pilot.press("slash")
        await type_text(pilot, "MIG")
        await pilot.press("enter")
        await until(pilot, lambda: "laptop" not in shown(app) and "MIG" in shown(app).splitlines()[-2])
        await pilot.press("escape")
        await until_shown(pilot, "laptop.cluster", "1 H200")


async def test_r_connects_again_to_the_node_under_the_cursor_where_its_link_waits() -> None:
    refused, alive = ScriptedLink("gpu-9", refused_node("gpu-9")), ScriptedLink("gpu-1", gpu_node("gpu-1"))
    app = console(refused, alive)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "gpu-9  refused", "r connects again now", "r Connect now")
        await pilot.press("r")
        await until_told(pilot, "gpu-9: connecting again")
        assert refused.asked == [("retry", {})]
        refused.emit(LinkChanged("gpu-9", LinkState.LIVE, NOW))
        await until(pilot, lambda: "Connect now" not in shown(app))
        await pilot.press("r", "end", "r")
        assert (len(refused.asked), alive.asked) == (1, [])


async def test_a_node_that_has_not_told_its_readings_yet_says_so() -> None:
    app = console(ScriptedLink("gpu-1", live("gpu-1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "waiting for its first readings")


async def test_a_read_only_console_says_so_where_80_columns_cut_nothing() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")), read_only=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "read-only [1 Fleet]", "1/1 nodes live, 4 GPUs, 0 jobs")


async def test_what_a_node_writes_is_never_markup_and_carries_no_escape_sequence() -> None:
    evil = "[bold red]x[/] \x1b]52;c;aGk=\x07 [/nothing"
    gpu = replace(h200(0, 50.0), name=evil, processes=(GpuProcess(7, 1, evil, evil, evil),))
    facts: list[Fact] = live("gpu-1", hostname=evil)
    facts += [
        LinkChanged("gpu-1", LinkState.STALE, NOW, detail=evil),
        MetricsArrived("gpu-1", Metrics(NOW, host_metrics(), (gpu,))),
    ]
    app = console(ScriptedLink("gpu-1", facts))
    async with app.run_test(size=(160, 40)) as pilot:
        await until_shown(pilot, "[bold red]x[/]", "[/nothing")
        await pilot.press("down")
        await until_shown(pilot, "       7  ")
        assert not any(ord(char) < 32 and char != "\n" for char in shown(app))


async def test_a_flood_of_facts_reaches_the_screen_as_few_changes() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"))
    app = console(link)
    seen: list[Any] = []
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "0 H200")
        screen = app.screen
        show = screen.show_fleet
        screen.show_fleet = lambda fleet: (seen.append(fleet), show(fleet))
        for number in range(20_000):
            link.emit(BeatArrived("gpu-1", NOW + number))
        await until(pilot, lambda: app.fleet.nodes[0].last_seen == NOW + 19_999)
        assert len(seen) <= 8  # 5,000 facts at a time at the most


async def test_of_a_big_fleet_only_the_visible_lines_are_drawn() -> None:
    links = []
    for number in range(64):
        host = f"gpu-{number:02}"
        reading = Metrics(NOW, host_metrics(), tuple(h200(k, float(k * 10)) for k in range(8)), "nvml")
        links.append(ScriptedLink(host, [*live(host), MetricsArrived(host, reading)]))
    app = console(*links)
    drawn: list[Any] = []
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "64/64 nodes live, 512 GPUs")
        view = app.screen.query_one(FleetView)
        await until(pilot, lambda: len(view.rows) == 64 * 11 - 1)
        draw = view.draw_row
        view.draw_row = lambda row, width: (drawn.append(row), draw(row, width))[1]
        for link in links:
            reading = Metrics(NOW + 1, host_metrics(), tuple(h200(k, 99.0) for k in range(8)), "nvml")
            link.emit(MetricsArrived(link.host, reading))
        await until_shown(pilot, "99%")
        height = view.scrollable_content_region.height
        # Twice at most: 64 nodes may arrive on both sides of one drawing.
        assert 0 < len(drawn) <= 2 * height
        await pilot.press("end")
        await until_shown(pilot, "gpu-63")


async def test_a_tiny_terminal_still_shows_the_fleet() -> None:
    app = console(ScriptedLink("gpu-1", gpu_node("gpu-1")))
    async with app.run_test(size=(24, 6)) as pilot:
        await until(pilot, lambda: app.fleet.nodes[0].metrics is not None)
        await pilot.press("down", "down", "up", "end")
        await pilot.resize_terminal(1, 1)
        await pilot.pause()
        await pilot.resize_terminal(80, 24)
        await until_shown(pilot, "0 H200")


async def test_a_card_without_uuid_and_without_a_reading_is_shown_by_its_index() -> None:
    facts = [*live("gpu-1"), MetricsArrived("gpu-1", Metrics(NOW, host_metrics(), (Gpu(5),), "nvidia-smi"))]
    app = console(ScriptedLink("gpu-1", facts))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "5 N/A")
        await pilot.press("down")
        await until_shown(pilot, "no UUID", "processes: N/A")
