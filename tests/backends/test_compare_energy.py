"""Energy by the counters of a recorded card, and why there is none where it cannot be had; processes that are left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from extraction_jobs import alive, until

from backends.compare.energy import Meter
from tests.fakes.nvml import ReplayedNvml

CARDS = [f"GPU-00000000-0000-4000-8000-{card:012d}" for card in range(2)]
WATTS = 250.0
ROOT = Path(__file__).parent.parent.parent


class Counting(ReplayedNvml):
    """The recorded driver, whose counters go up by 250 W since its making; card 1 uses twice as much."""

    def __init__(self, **more: Any) -> None:
        super().__init__(cards=2, **more)
        self.began = time.monotonic()
        self.readings = threading.Event()
        self._read = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in CARDS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        self._raise(CARDS.index(uuid), "nvmlDeviceGetHandleByUUID")
        return CARDS.index(uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> int:
        self._raise(card, "nvmlDeviceGetTotalEnergyConsumption")
        self._read += 1
        if self._read >= 10:
            self.readings.set()
        return round((time.monotonic() - self.began) * WATTS * (card + 1) * 1000) + 10**12


def measured(driver: Counting, gpus: list[str]) -> tuple[Meter, float, float]:
    with Meter(gpus, driver) as meter:
        meter.gpus()
        until(lambda: driver.asked is not None and driver._read >= 2, "the first readings")
        begin = time.monotonic()
        driver.readings.wait(60)
        end = time.monotonic()
        count = driver._read
        until(lambda: driver._read >= count + 2 * len(gpus), "a reading after the end")
    return meter, begin, end


def test_joules_are_what_the_cards_counters_went_up_by_between_two_moments() -> None:
    meter, begin, end = measured(Counting(), CARDS)
    assert meter.used(CARDS[:1], begin, end).joules == pytest.approx(WATTS * (end - begin), rel=0.05)
    assert meter.used(CARDS, begin, end).joules == pytest.approx(3 * WATTS * (end - begin), rel=0.05)
    cards = meter.gpus()
    assert [(card["index"], card["uuid"]) for card in cards] == [(0, CARDS[0]), (1, CARDS[1])]
    assert all("H200" in card["name"] for card in cards)


def test_before_the_first_reading_and_after_the_last_nothing_is_made_up() -> None:
    meter, begin, end = measured(Counting(), CARDS[:1])
    assert meter.used(CARDS[:1], begin - 3600, end).joules is None
    assert meter.used(CARDS[:1], begin, end + 3600).joules is None


def test_where_a_card_has_no_counter_the_reason_is_told() -> None:
    driver = Counting(errors={(0, "nvmlDeviceGetTotalEnergyConsumption"): pynvml.NVML_ERROR_NOT_SUPPORTED})
    with Meter(CARDS, driver) as meter:
        meter.gpus()
        until(lambda: driver._read >= 2, "the other card's readings")
        told = meter.used(CARDS, time.monotonic(), time.monotonic())
    assert told.joules is None
    assert told.note == f"GPU {CARDS[0]} tells no energy: Not Supported"


def test_without_a_driver_and_without_gpus_the_reason_is_told() -> None:
    driver = Counting()
    driver.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with Meter(CARDS, driver) as meter:
        assert meter.gpus() == [{"index": None, "uuid": uuid, "name": None} for uuid in CARDS]
        assert meter.used(CARDS, 0.0, 1.0).note == "NVML: Driver Not Loaded"
    with Meter([]) as meter:
        assert meter.gpus() == []
        assert "a CPU has no counter" in meter.used([], 0.0, 1.0).note


LEAVING = """
import subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(3600)"
kinds = [code, "print(1, flush=True); import time; time.sleep(3600)"]
found = [subprocess.Popen([sys.executable, "-c", kind], stdout=subprocess.PIPE, start_new_session=True) for kind in kinds]
for process in found:
    process.stdout.readline()
print(*(process.pid for process in found), flush=True)
"""
HEIR = f"""
import os, subprocess, sys
from backends.compare.processes import descendants, end_all_below, heir
with heir():
    side = subprocess.Popen([sys.executable, "-c", {LEAVING!r}], stdout=subprocess.PIPE, text=True)
    left = side.stdout.readline().split()
    while side.poll() is None or not set(map(int, left)) <= descendants(os.getpid()):
        pass
    ended = end_all_below([side], patience_s=0.3)
    print(*left, ended.signalled, len(ended.alive), len(descendants(os.getpid())), side.returncode)
"""


def test_what_a_side_left_behind_is_ended_also_where_it_ignores_sigterm() -> None:
    done = subprocess.run([sys.executable, "-c", HEIR], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *left, ended, alive_still, below, status = map(int, done.stdout.split())
    assert len(left) == ended == 2
    assert (alive_still, below, status) == (0, 0, 0)
    assert not any(map(alive, left))
