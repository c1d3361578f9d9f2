"""The table of families: a row for each `model_type` of config.json. Loads no torch.

The base model of every family here, without its head, keeps its blocks in `layers` and ends in `norm`. Defaults are those of
Transformers' configuration classes, for fields that published config.json files leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# What the attention of a block sees: everything before, a window of it, or a state carried along (a gated delta net).
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """What is special about a family.

    name: what people call it. layers: kind of each block, of a config's fields, defaults filled in.
    defaults: fields that config.json may leave out. text: of a wrapper, the `model_type` of its `text_config`; None where the
    fields stand in config.json itself. expert_size: the name of the field with the width of each expert; None where there are
    none. gated_attention: queries come with a gate of their size. dequantized: quant_methods whose weights are unpacked on loading.
    """

    name: str
    layers: Callable[[Fields], tuple[str, ...]]
    defaults: Fields = field(default_factory=dict)
    text: str | None = None
    expert_size: str | None = None
    gated_attention: bool = False
    dequantized: tuple[str, ...] = ()


def _all_full(config: Fields) -> tuple[str, ...]:
    return (FULL,) * int(config["num_hidden_layers"])


def _all_sliding(config: Fields) -> tuple[str, ...]:
    """Mistral's: the window is every block's."""
    return (SLIDING if config["sliding_window"] else FULL,) * int(config["num_hidden_layers"])


def _all_sliding_if_used(config: Fields) -> tuple[str, ...]:
    return _all_sliding(config) if config["use_sliding_window"] else _all_full(config)


def _upper_blocks_sliding(config: Fields) -> tuple[str, ...]:
    """Qwen's: full attention up to block `max_window_layers`, where windows are used at all."""
    window = config["use_sliding_window"] and config["sliding_window"]
    first = config["max_window_layers"] if window else config["num_hidden_layers"]
    return config.get("layer_types") or tuple(
        SLIDING if block >= first else FULL for block in range(config["num_hidden_layers"])
    )


def _every(interval: str, usual: str) -> Callable[[Fields], tuple[str, ...]]:
    """Full attention in every `interval`-th block, `usual` in the others, unless `layer_types` says it."""

    def layers(config: Fields) -> tuple[str, ...]:
        return config.get("layer_types") or tuple(
            usual if (block + 1) % config[interval] else FULL for block in range(config["num_hidden_layers"])
        )

    return layers


_HYBRID = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _hybrid(name: str, *, experts: bool, text: str | None = None) -> Family:
    """Three gated delta nets to one full attention whose output is gated."""
    return Family(
        name,
        _every("full_attention_interval", LINEAR),
        _HYBRID,
        text=text,
        expert_size="moe_intermediate_size" if experts else None,
        gated_attention=True,
    )


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3_TEXT = Family(
    "Gemma 3",
    _every("sliding_window_pattern", SLIDING),
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)

FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3", _upper_blocks_sliding, {"head_dim": 128, **_QWEN_WINDOW}),
    "qwen2": Family("Qwen2", _upper_blocks_sliding, _QWEN_WINDOW),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        _all_sliding_if_used,
        # Its head_dim is a field that Transformers reads where it is set, and else divides.
        {"use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1},
        expert_size="moe_intermediate_size",
    ),
    "llama": Family("Llama", _all_full),
    "mistral": Family("Mistral", _all_sliding, {"sliding_window": 4096}),
    "gemma3_text": _GEMMA3_TEXT,
    "gemma3": Family(_GEMMA3_TEXT.name, _GEMMA3_TEXT.layers, _GEMMA3_TEXT.defaults, text="gemma3_text"),
    "gpt_oss": Family(
        "gpt-oss",
        _every("full_attention_interval", SLIDING),
        {"head_dim": 64, "sliding_window": 128, "full_attention_interval": 2},
        expert_size="intermediate_size",
        # As it is published.
        dequantized=("mxfp4",),
    ),
    "qwen3_next": _hybrid("Qwen3-Next", experts=True),
    "qwen3_5_text": _hybrid("Qwen3.5", experts=False),
    "qwen3_5": _hybrid("Qwen3.5", experts=False, text="qwen3_5_text"),
    "qwen3_5_moe_text": _hybrid("Qwen3.5-MoE", experts=True),
    "qwen3_5_moe": _hybrid("Qwen3.5-MoE", experts=True, text="qwen3_5_moe_text"),
}
