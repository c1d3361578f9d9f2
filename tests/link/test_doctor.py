"""The request `doctor`: through a real local agent, and what is made of any answer."""

from __future__ import annotations

import time
import venv
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.fleet.checkup import clock_check, has_problem, in_order, summary
from dflash_tui.fleet.facts import Check, CheckStatus
from dflash_tui.link import LinkError, RequestRefused, doctor
from dflash_tui.link.requests import Reply
from tests.link.conftest import LIMIT_S, Opener

OK, WARNING, PROBLEM, UNKNOWN = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.PROBLEM, CheckStatus.UNKNOWN


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


def test_a_local_node_tells_the_worst_first_and_its_clock_is_ours(open_link: Opener, tmp_path: Path) -> None:
    link, _ = open_link("local")
    link.wait_live(LIMIT_S)
    venv.create(tmp_path / "python", with_pip=False, symlinks=True)
    checkup = link.doctor(python=str(tmp_path / "python" / "bin" / "python"), write=False).result(LIMIT_S)
    statuses = [check.status for check in checkup.checks]
    assert checkup.host == "local" and statuses == sorted(statuses, key=[PROBLEM, WARNING, UNKNOWN, OK].index)
    names = {check.name: check for check in checkup.checks}
    assert names["packages"].status is PROBLEM
    assert names["clock"].status is OK
    assert checkup.round_trip_s is not None and checkup.clock_offset_s is not None
    assert abs(checkup.clock_offset_s) <= checkup.round_trip_s + 0.1


def test_what_the_agent_refuses_and_a_link_that_is_gone_end_the_future(open_link: Opener) -> None:
    link, _ = open_link("local")
    link.wait_live(LIMIT_S)
    with pytest.raises(RequestRefused, match="paths cannot be"):
        link.doctor(paths=("relative",)).result(LIMIT_S)
    link.close()
    with pytest.raises(LinkError, match="not connected"):
        link.doctor().result(LIMIT_S)


class SlowNode:
    """Answers pings after so many seconds, with a clock that is off; then with no checks but its own."""

    def __init__(self, off_s: float, delays: list[float], answer: dict[str, Any]) -> None:
        self.off_s = off_s
        self.delays = delays
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def __call__(self, op: str, **fields: Any) -> Future[Reply]:
        done: Future[Reply] = Future()
        if op == "ping":
            delay = self.delays.pop(0)
            time.sleep(delay / 2)
            there = time.time() + self.off_s
            time.sleep(delay / 2)
            done.set_result(Reply({"time": there}))
        else:
            self.asked.append(fields)
            done.set_result(Reply(self.answer))
        return done


def test_the_clock_is_compared_with_the_round_trip_taken_out() -> None:
    node = SlowNode(-90.0, [0.4, 0.2, 0.02, 0.3, 0.2], {"checks": [], "ntp": False})
    asked = doctor.ask(node, "gpu-1", python="/p", paths=("/data",), write=False, limit_s=20.0)
    checkup = asked.result(LIMIT_S)
    assert node.asked == [
        {"python": "/p", "paths": ["/data"], "write": False, "limit_s": 20.0, "host": "gpu-1", "timeout": 80.0}
    ]
    assert checkup.clock_offset_s is not None and checkup.round_trip_s is not None
    assert abs(checkup.clock_offset_s + 90.0) <= checkup.round_trip_s / 2
    (clock,) = checkup.checks
    assert clock.status is WARNING and clock.found.startswith("90 s behind the console's")
    assert "not kept by NTP" in clock.found and "timedatectl" in clock.remedy


@pytest.mark.parametrize(
    ("offset", "round_trip", "status"),
    [(0.01, 0.1, OK), (-2.5, 1.2, OK), (-2.5, 0.1, WARNING), (299.0, 0.1, WARNING), (3600.0, 0.1, PROBLEM)],
)
def test_only_an_offset_that_the_delay_does_not_explain_is_a_fault(
    offset: float, round_trip: float, status: CheckStatus
) -> None:
    assert clock_check(offset, round_trip, None).status is status


def test_odd_answers_become_unknown_and_cards_that_ail_become_problems() -> None:
    rows = [
        {"name": "disk \x1b[31m/data", "status": "ok", "found": "a\nb\x07", "remedy": None},
        {"name": "new", "status": "splendid", "found": "x"},
        {"status": "ok"},
        "nothing",
    ]
    ecc = {"enabled": True, "pending": True, "volatile_uncorrected": 3}
    gpus = [{"index": 0, "error": None}, {"index": 1, "error": "GPU is lost"}, {"index": 2, "ecc": ecc}, "nothing"]
    checkup = doctor.checkup("h", {"checks": rows, "gpus": gpus}, None)
    assert [(check.name, check.status) for check in checkup.checks] == [
        ("GPU 1", PROBLEM),
        ("GPU 2", PROBLEM),
        ("new", UNKNOWN),
        ("disk [31m/data", OK),
    ]
    assert "ECC" in checkup.checks[1].found and checkup.checks[1].remedy
    assert checkup.checks[3].found == "a b"
    assert checkup.clock_offset_s is None
    with pytest.raises(LinkError, match="no checks"):
        doctor.checkup("h", {}, None)


def test_a_summary_counts_and_never_hides_that_there_is_no_problem() -> None:
    checks = [Check("a", OK, ""), Check("b", WARNING, ""), Check("c", PROBLEM, ""), Check("d", PROBLEM, "")]
    assert summary(checks) == "2 problems, 1 warning, 1 ok"
    assert summary(checks[:1]) == "no problem, 1 ok"
    assert [check.name for check in in_order(checks)] == ["c", "d", "b", "a"]
    assert has_problem(checks) and not has_problem(checks[:2])
