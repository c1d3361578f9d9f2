from __future__ import annotations

import random

import pytest

from backends.packing import Pack, pack_samples


def _samples(count: int, longest: int) -> list[tuple[int, int]]:
    chance = random.Random(7)
    return [(row, min(longest, 1 + int(chance.lognormvariate(6.5, 0.8)))) for row in range(count)]


def test_every_sample_is_in_one_pack_and_no_pack_is_too_long() -> None:
    samples = _samples(10_000, 4096)
    packs = pack_samples(samples, 16384)
    placed = [pair for pack in packs for pair in zip(pack.rows, pack.lengths, strict=True)]
    assert sorted(placed) == samples
    assert max(pack.tokens for pack in packs) <= 16384


def test_packs_of_real_lengths_are_full() -> None:
    packs = pack_samples(_samples(10_000, 4096), 16384)
    # One pack, the last, holds what is left over.
    assert sorted(pack.tokens for pack in packs)[1] > 0.98 * 16384


def test_the_order_of_the_samples_does_not_change_the_packs_within_a_window() -> None:
    samples = _samples(1000, 4096)
    shuffled = samples.copy()
    random.Random(1).shuffle(shuffled)
    assert pack_samples(samples, 8192) == pack_samples(shuffled, 8192)


def test_a_sample_longer_than_a_pack_goes_alone() -> None:
    packs = pack_samples([(0, 5), (1, 100), (2, 5)], 10)
    assert packs == [Pack((1,), (100,)), Pack((0, 2), (5, 5))]


def test_packs_keep_to_the_datasets_order_from_window_to_window() -> None:
    packs = pack_samples([(row, 3) for row in range(1000)], 7, window=10)
    assert all(max(pack.rows) - min(pack.rows) <= 20 for pack in packs)
    assert sum(len(pack.rows) for pack in packs) == 1000


def test_the_boundaries_are_the_running_sum_of_the_lengths() -> None:
    pack = Pack((4, 9, 11), (3, 1, 5))
    assert pack.cu_seqlens == (0, 3, 4, 9)
    assert pack.tokens == 9


def test_no_samples_give_no_packs() -> None:
    assert pack_samples([], 10) == []


def test_an_empty_sample_and_a_repeated_row_are_refused() -> None:
    with pytest.raises(ValueError, match="row 3 has 0 tokens"):
        pack_samples([(3, 0)], 10)
    with pytest.raises(ValueError, match="row 3 is named twice"):
        pack_samples([(3, 1), (3, 2)], 10)
