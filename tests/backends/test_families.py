"""What the table of families says of a config is what Transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from backends.demo.configs import tiny_config
from backends.errors import JobError
from backends.hf.families import FAMILIES, FULL, SLIDING, model_shape
from backends.hf.families.shape import read_config

FOLDER = Path("model")


def shape_of(config: Any, folder: Path) -> Any:
    """As from the config.json that Transformers writes."""
    config.save_pretrained(folder)
    return model_shape(read_config(folder), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_of_a_model_is_that_of_its_weights(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, 7, 256, 3000)
    shape = shape_of(config, tmp_path)
    with torch.device("meta"):
        model = AutoModel.from_config(config.get_text_config())
    for blocks in (1, 4, 7):
        whole = sum(weight.numel() for weight in model.parameters())
        cut = sum(weight.numel() for block in model.layers[blocks:] for weight in block.parameters())
        assert shape.parameters(blocks) == pytest.approx(whole - cut, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_kinds_of_blocks_are_those_of_the_config_class(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, 8, 64, 500)
    text = config.get_text_config()
    shape = shape_of(config, tmp_path)
    assert shape.model_type == text.model_type
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (8, 64, 500)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert shape.wrapper == (family if text is not config else None)
    kinds = getattr(text, "layer_types", None)
    assert kinds is None or list(shape.layer_types) == list(kinds)
    if SLIDING in shape.layer_types:
        assert shape.sliding_window == text.sliding_window
    if shape.num_experts:
        assert (shape.num_experts, shape.experts_per_token) == (text.num_experts, text.num_experts_per_tok)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    """With the sizes alone, as some published folders have it."""
    sizes = {
        "num_hidden_layers": 9,
        "hidden_size": 256,
        "intermediate_size": 384,
        "vocab_size": 900,
        "num_attention_heads": 8,
    }
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 96}
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes |= dict.fromkeys((*names, "linear_conv_kernel_dim"), 4)
    kind = FAMILIES[family].text
    fields: dict[str, Any] = {"text_config": {"model_type": kind, **sizes}} if kind else sizes
    text = AutoConfig.for_model(family, **json.loads(json.dumps(fields))).get_text_config()
    shape = model_shape({"model_type": family, **fields}, FOLDER)
    assert shape.head_dim == (getattr(text, "head_dim", None) or 256 // 8)
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    assert list(shape.layer_types) == list(kinds or [SLIDING if window else FULL] * 9)
    assert shape.sliding_window == (window if SLIDING in shape.layer_types else None)
    assert shape.max_positions in (None, text.max_position_embeddings)


def test_a_published_wrappers_text_config_may_name_almost_nothing() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = model_shape({"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}}, FOLDER)
    assert (shape.family, shape.wrapper, shape.vocab_size, shape.num_heads) == ("Gemma 3", "gemma3", 262208, 8)
    assert (shape.num_kv_heads, shape.head_dim, shape.sliding_window) == (4, 256, 1024)
    assert shape.layer_types.count(FULL) == 5
    # 3.88 billion weights in the published model's text part.
    assert shape.parameters(34) == pytest.approx(3.88e9, rel=0.01)


def test_all_experts_are_counted() -> None:
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    shape = model_shape({"model_type": "qwen3_moe", "vocab_size": 151936, **sizes, **experts}, FOLDER)
    # Qwen3-30B-A3B: 30.5 billion with its head of 0.31.
    assert shape.parameters(48) == pytest.approx(30.2e9, rel=0.01)


def test_a_config_without_a_model_type_is_refused_as_what_it_is() -> None:
    with pytest.raises(JobError, match=r"^config.json of .* has no model_type: give"):
        model_shape({"hidden_size": 64}, FOLDER)
