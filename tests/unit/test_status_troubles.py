"""What `status` says of cards in trouble."""

from __future__ import annotations

import io
import json

from rich.console import Console

from dflash_tui.commands import status
from dflash_tui.commands.output import to_json
from dflash_tui.fleet.facts import Gpu, GpuMig, GpuPcie, GpuXid, HostMetrics, Metrics, MigInstance

CARDS = (
    Gpu(0, "GPU-0", clock_reasons=("sw_power_cap",)),
    Gpu(1, "GPU-1", pcie=GpuPcie(5, 5, 4, 16), xid=GpuXid(79, 940.0)),
    Gpu(2, "GPU-2", mig=GpuMig(True, True, (MigInstance("MIG-4711", "1g.18gb", 1, 0, 5 << 30, 16 << 30),))),
)
METRICS = Metrics(1000.0, HostMetrics(), CARDS, "nvml")


def printed() -> str:
    out = io.StringIO()
    screen = Console(file=out, width=200)
    status._show_gpus(screen, METRICS.gpus)
    status._show_instances(screen, METRICS.gpus)
    status._show_troubles(screen, METRICS)
    return out.getvalue()


def test_alarms_and_warnings_are_printed_with_their_remedy_and_notes_are_not() -> None:
    text = printed()
    assert "! GPU 1 alarm: XID 79 1m ago: the card has fallen off the bus: reboot the node" in text
    assert "! GPU 1 warning: PCIe x4 of x16" in text
    assert "power limit" not in text


def test_mig_instances_are_listed_by_themselves() -> None:
    assert "GPU 2 MIG 1g.18gb: memory 5.0 GiB of 16.0 GiB, MIG-4711" in " ".join(printed().split())


def test_json_carries_every_trouble_and_every_reading() -> None:
    found = status._troubles(METRICS)
    assert [(one["gpu"], one["severity"]) for one in found] == [(0, "note"), (1, "alarm"), (1, "warning")]
    cards = json.loads(json.dumps(to_json(METRICS)))["gpus"]
    assert cards[1]["pcie"]["width"] == 4 and cards[1]["xid"]["code"] == 79
    assert cards[2]["mig"]["instances"][0]["uuid"] == "MIG-4711" and cards[0]["ecc"] is None
