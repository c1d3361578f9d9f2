"""Start-up, steady state, rates, their intervals and the sentence, from recorded and from made-up work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.compare.figures import Steady, Step, ratio, steady, student
from backends.compare.verdict import Subject, spell, verdict

HF, VLLM = "hf", "vllm"
SAME = {"verdict": "good", "reasons": [], "layers": {"2": {"relative_error": 0.004, "relative_error_by_token": 0.009}}}
OTHER = {"verdict": "bad", "reasons": ["layer id 2 is off by 0.4, limit 0.05: row 7 is worst (0.6)"], "layers": {}}


def even(count: int = 100, *, every: float = 0.5, tokens: int = 500, start: float = 10.0) -> list[Step]:
    return [(start + place * every, 1, tokens, tokens * 100) for place in range(count)]


def uneven(rng: np.random.Generator, count: int, mean: float = 0.5, tokens: int = 500) -> list[Step]:
    times = np.cumsum(rng.gamma(2.0, mean / 2, count))
    return [(float(time), 1, tokens, tokens * 100) for time in times]


def found(steps: list[Step], **more: Any) -> Steady:
    span = steady(steps, **more)
    assert span is not None
    return span


def test_even_work_has_its_exact_rate_and_no_doubt() -> None:
    span = found(even())
    assert (span.begin, span.end) == (10.0, 59.5)
    assert span.tokens_per_s == pytest.approx(1000)
    assert span.bytes_per_s == pytest.approx(100_000)
    assert span.interval() == pytest.approx((1000, 1000))


def test_what_was_done_before_the_steady_state_is_in_no_rate() -> None:
    first = (0.0, 9, 1_000_000, 9)
    assert found([first, *even(start=0.5)]).tokens_per_s == pytest.approx(1000)


def test_samples_that_come_in_bursts_count_as_what_they_are() -> None:
    # An engine's step ends for nine samples within milliseconds, twice a second.
    steps = [(round * 0.5 + place * 0.002, 1, 100, 1) for round in range(60) for place in range(9)]
    span = found(steps)
    assert span.begin == pytest.approx(0.016), "the first burst is no steady work"
    assert span.tokens_per_s == pytest.approx(1800)
    assert span.interval() == pytest.approx((1800, 1800), rel=1e-3)


def test_the_steady_state_begins_when_the_last_worker_was_ready_and_each_has_delivered() -> None:
    slow = [(10.0 + place, 1, 100, 1) for place in range(20)]
    fast = [(30.0 + place * 0.25, 1, 100, 1) for place in range(80)]
    # Four workers from second 30 on; one before.
    span = found([*slow, *fast], workers=4, ready=30.0)
    assert span.begin >= 30.0
    assert span.tokens_per_s == pytest.approx(400)
    assert found(even(), workers=2, ready=58.0).begin == pytest.approx(10.5), (
        "who came for the last two changed nothing"
    )
    assert found(even(), workers=4).begin == pytest.approx(11.5), "four have come"
    assert found(even(8), workers=8).begin == pytest.approx(10.5), "never more than a quarter is left out"


@pytest.mark.parametrize("steps", [[], even(1), [(1.0, 3, 30, 3), (1.0, 4, 40, 4)]])
def test_without_two_moments_nothing_is_known(steps: list[Step]) -> None:
    assert steady(steps) is None


def test_too_few_moments_have_a_rate_and_no_interval() -> None:
    span = found(even(9))
    assert span.tokens_per_s == pytest.approx(1000)
    assert span.interval() is None
    assert ratio(span, found(even())) == (pytest.approx(1.0), None, None)


def test_an_interval_of_95_percent_holds_the_truth_about_so_often() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        interval = found(uneven(rng, 150)).interval()
        assert interval is not None
        held += interval[0] <= 1000 <= interval[1]
    assert 0.90 <= held / 400 <= 0.99


def test_an_interval_from_a_few_packs_is_wide_and_holds_the_truth_as_often() -> None:
    """As many packs as 256 samples make on one GPU."""
    rng = np.random.default_rng(6)
    intervals = []
    for _ in range(400):
        gaps = rng.gamma(20.0, 0.5 / 20.0, 14)
        span = found([(float(time), 18, 500, 1) for time in np.cumsum(gaps)])
        interval = span.interval()
        assert interval is not None
        intervals.append(interval)
    assert 0.90 <= np.mean([low <= 1000 <= high for low, high in intervals]) <= 0.99
    assert np.mean([high - low for low, high in intervals]) > 200


def test_slow_and_fast_stretches_make_the_interval_wider() -> None:
    """Work whose speed drifts: blocks that follow each other are alike, and as many of them say less."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        pace, paces = 0.0, []
        for _ in range(300):
            pace = 0.95 * pace + rng.normal(0, 0.06)
            paces.append(0.5 * np.exp(pace))
        # The truth: tokens over the mean of the gaps in the long run, a log-normal's.
        true = 500 / (0.5 * np.exp(0.06**2 / (1 - 0.95**2) / 2))
        interval = found([(float(time), 1, 500, 1) for time in np.cumsum(paces)]).interval()
        assert interval is not None
        held += interval[0] <= true <= interval[1]
    assert 0.85 <= held / 400 <= 1.0


def test_a_run_that_stood_still_for_half_of_its_time_may_have_had_any_rate_but_none() -> None:
    span = found([*even(10, every=1.0), *even(10, every=1.0, start=34.0)])
    interval = span.interval()
    assert interval is not None
    low, high = interval
    assert 0 < low < span.tokens_per_s / 5 and high > 5 * span.tokens_per_s


def test_a_ratio_of_equals_holds_one_about_so_often_and_a_true_difference_is_found() -> None:
    rng = np.random.default_rng(2)
    held = seen = 0
    for _ in range(300):
        one, other, faster = found(uneven(rng, 150)), found(uneven(rng, 90)), found(uneven(rng, 150, mean=0.3))
        _, low, high = ratio(one, other)
        assert low is not None and high is not None
        held += low <= 1 <= high
        _, low, high = ratio(faster, one)
        assert low is not None
        seen += low > 1
    assert 0.90 <= held / 300 <= 0.99
    assert seen / 300 > 0.95


def test_the_interval_of_a_ratio_turned_round_is_the_same_turned_round() -> None:
    rng = np.random.default_rng(3)
    one, other = found(uneven(rng, 150)), found(uneven(rng, 90))
    value, low, high = ratio(one, other)
    assert ratio(other, one) == pytest.approx((1 / value, 1 / high, 1 / low))


def test_students_t_is_that_of_the_tables() -> None:
    assert [student(freedom) for freedom in (1, 9, 19, 30)] == [12.706, 2.262, 2.093, 2.042]
    assert student(0.5) == student(1.9) == 12.706
    assert student(1000) == 2.042


# --- the sentence ---------------------------------------------------------------------------------------------------


def side(span: Steady | None, *, each: float = 500.0, whole: int = 913_000) -> dict[str, Any]:
    rate = None if span is None else span.tokens_per_s / each
    return {"samples_per_s": rate, "whole_dataset_s": None if rate is None else whole / rate + 30}


def said(hf: Steady | None, vllm: Steady | None, parity: dict[str, Any] = SAME, **subject: Any) -> dict[str, Any]:
    about = Subject(**{"model": "Qwen3-8B", "gpus": ["NVIDIA H200"], "rows": 913_000, **subject})
    return verdict(about, {HF: hf, VLLM: vllm}, {HF: side(hf), VLLM: side(vllm)}, parity)


def test_the_faster_side_is_named_with_ratio_interval_rates_time_and_parity() -> None:
    rng = np.random.default_rng(4)
    hf, vllm = found(uneven(rng, 400, mean=1 / 41.2)), found(uneven(rng, 400, mean=1 / 19.6))
    told = said(hf, vllm)
    assert told["faster"] == HF
    assert 1 < told["low"] < told["ratio"] < told["high"]
    assert told["sentence"] == (
        f"hf is {told['ratio']:.1f} times as fast ({told['low']:.1f} to {told['high']:.1f}) for Qwen3-8B on 1 H200:"
        f" {hf.tokens_per_s / 500:.3g} against {vllm.tokens_per_s / 500:.3g} samples/s;"
        f" 913,000 samples would take {spell(913_000 / hf.tokens_per_s * 500 + 30)} against"
        f" {spell(913_000 / vllm.tokens_per_s * 500 + 30)}, start-up included; both wrote the same (worst layer 0.9 %)"
    )
    turned = said(vllm, hf)
    assert turned["faster"] == VLLM
    assert (turned["ratio"], turned["low"], turned["high"]) == (told["ratio"], told["low"], told["high"])
    assert turned["sentence"].startswith("vllm is ")


def test_where_the_interval_holds_one_no_difference_is_told() -> None:
    rng = np.random.default_rng(5)
    told = said(found(uneven(rng, 100)), found(uneven(rng, 100)))
    assert told["faster"] is None
    assert told["low"] <= 1 <= told["ratio"] <= told["high"]
    assert told["sentence"].startswith("no difference can be told between ")


def test_too_few_samples_are_said_and_nobody_is_called_faster() -> None:
    told = said(found(even(9)), found(even(9, every=1.0)))
    assert told["faster"] is told["low"] is told["high"] is None
    assert told["ratio"] == pytest.approx(2)
    assert "hf did 2.0 times as many samples a second as vllm" in told["sentence"]
    assert "too few samples to tell how sure" in told["sentence"]
    nothing = said(None, found(even()))
    assert nothing["ratio"] is None
    assert "cannot be told, too few samples" in nothing["sentence"]


def test_a_bad_parity_comes_first_and_says_why() -> None:
    told = said(found(even()), found(even(every=1.0)), OTHER)
    assert told["sentence"].startswith(
        "hf and vllm did NOT write the same for Qwen3-8B on 1 H200: layer id 2 is off by 0.4, limit 0.05: row 7 is worst"
    )
    assert "its speed" not in told["sentence"] and "their speed decides nothing" in told["sentence"]
    assert "both wrote the same" not in told["sentence"]


def test_a_server_that_was_started_anew_is_no_part_of_a_speed_without_a_word() -> None:
    spans = {HF: found(even()), VLLM: found(even(every=1.0))}
    sides = {HF: side(spans[HF]), VLLM: {**side(spans[VLLM]), "restarts": 2}}
    sentence = verdict(Subject("Qwen3-8B", [], 9), spans, sides, SAME)["sentence"]
    assert "; vllm was started anew 2 times, which its rate includes; both wrote the same" in sentence


@pytest.mark.parametrize(("error", "words"), [(0.0949, "9 %"), (0.096, "10 %"), (0.1, "10 %"), (0.12, "12 %")])
def test_a_share_is_said_without_an_exponent(error: float, words: str) -> None:
    parity = {**SAME, "layers": {"2": {"relative_error": error, "relative_error_by_token": 0.0}}}
    assert said(found(even()), found(even()), parity)["sentence"].endswith(f"(worst layer {words})")


def test_a_rate_is_said_without_an_exponent() -> None:
    span = found(even(100, every=0.5 / 499.85))
    assert "1,000 against 1,000 samples/s" in said(span, span)["sentence"]


@pytest.mark.parametrize(
    ("gpus", "each", "words"),
    [
        ([], False, "on the CPU:"),
        ([], True, "on the CPU that both shared:"),
        (["NVIDIA H200"] * 4, True, "on 4 H200 each:"),
        ([None], False, "on 1 GPU:"),
        (["NVIDIA H200", "NVIDIA L40S"], False, "on 2 H200 and L40S:"),
    ],
)
def test_the_machine_is_said_as_a_person_says_it(gpus: list[str | None], each: bool, words: str) -> None:
    assert words in said(found(even()), found(even(every=1.0)), gpus=gpus, each=each)["sentence"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (89, "89 s"), (720, "12 min"), (22_320, "6.2 h"), (46_800, "13 h"), (267_840, "3.1 days")],
)
def test_a_time_is_said_as_a_person_says_it(seconds: float, words: str) -> None:
    assert spell(seconds) == words
