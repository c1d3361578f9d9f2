from __future__ import annotations

import pytest

from backends.layers import CONVENTIONS, LayerError, from_trainer, layer_ids, preset, to_trainer


@pytest.mark.parametrize(
    ("name", "blocks", "ids"),
    [
        ("dflash", 36, (2, 10, 18, 26, 34, 36)),
        ("dflash", 64, (2, 17, 32, 47, 62, 64)),
        ("speculators", 36, (2, 18, 33, 36)),
        ("speculators", 64, (2, 32, 61, 64)),
    ],
)
def test_the_presets_are_those_of_the_trainers(name: str, blocks: int, ids: tuple[int, ...]) -> None:
    assert preset(name, blocks) == ids


@pytest.mark.parametrize("name", ["dflash", "speculators"])
def test_a_preset_rises_and_ends_before_the_final_norm_for_every_model_size(name: str) -> None:
    for blocks in range(6, 200):
        ids = preset(name, blocks)
        assert list(ids) == sorted(set(ids))
        assert ids[0] == 2 and ids[-1] == blocks and len(ids) >= 3


def test_a_preset_of_a_model_that_is_too_small_says_what_to_name_instead() -> None:
    with pytest.raises(LayerError, match="at least 6 blocks, not 5; name the layer ids, each from 0 to 5"):
        preset("dflash", 5)


def test_an_id_beyond_the_model_is_named_with_the_range() -> None:
    assert layer_ids((0, 8), 8) == (0, 8)
    with pytest.raises(LayerError, match="id 9 is not in a model of 8 blocks: use ids from 0 to 8"):
        layer_ids((2, 9), 8)
    with pytest.raises(LayerError, match="id -1 is not in a model of 8 blocks"):
        layer_ids((-1, 3), 8)


@pytest.mark.parametrize("ids", [(), (3, 2), (2, 2)])
def test_ids_that_do_not_rise_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(LayerError, match="must rise"):
        layer_ids(ids, 8)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(LayerError, match="dflash or speculators"):
        layer_ids("eagle3", 36)
    with pytest.raises(LayerError, match="specforge"):
        to_trainer([1], "medusa", 36)


def test_block_numbers_of_dflash_and_specforge_are_one_less_than_the_trainers_ids() -> None:
    # z-lab's published choice for 36 blocks.
    numbers = (1, 9, 17, 25, 33)
    for convention in ("dflash", "specforge"):
        assert to_trainer(numbers, convention, 36) == (2, 10, 18, 26, 34)
    for convention in ("speculators", "vllm"):
        assert to_trainer(numbers, convention, 36) == numbers


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_converting_there_and_back_changes_nothing(convention: str) -> None:
    ids = (1, 2, 18, 35, 36)
    assert to_trainer(from_trainer(ids, convention, 36), convention, 36) == ids


def test_the_embeddings_have_no_block_number() -> None:
    assert from_trainer((0, 2), "vllm", 8) == (0, 2)
    with pytest.raises(LayerError, match="embeddings"):
        from_trainer((0, 2), "dflash", 8)
    with pytest.raises(LayerError, match="use ids from 0 to 7 in dflash's numbering"):
        to_trainer((8,), "dflash", 8)
