"""A tiny config for each family: every feature of it at a size where leaving the feature out shows. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.hf.families import FAMILIES

# Shorter than almost every sample, so that windows matter.
WINDOW = 12
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _experts(hidden: int) -> dict[str, Any]:
    return {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}


def _gemma3(hidden: int) -> dict[str, Any]:
    return {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        # Not the size of a head, as in the larger models: the scaling of attention must come from here.
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gpt_oss(hidden: int) -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": hidden,
        "sliding_window": WINDOW,
        "rope_parameters": {**yarn, "rope_theta": 1.5e5, "original_max_position_embeddings": 1024},
    }


def _hybrid(hidden: int) -> dict[str, Any]:
    """Three gated delta nets to one full attention; values have twice as many heads as keys, and other widths."""
    return {
        "full_attention_interval": 4,
        "linear_num_key_heads": hidden // 32,
        "linear_num_value_heads": hidden // 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }


def _hybrid_vision_text(hidden: int) -> dict[str, Any]:
    rope = {**_hybrid(hidden)["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return {**_hybrid(hidden), "rope_parameters": rope}


def _shared_experts(hidden: int) -> dict[str, Any]:
    return {**_experts(hidden), "shared_expert_intermediate_size": hidden}


# What a family's tiny config has beside the sizes, by its model_type (of a wrapper, that of its text model), for a hidden size.
_TEXT: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen3": lambda hidden: {},
    "qwen2": lambda hidden: {},
    "qwen3_moe": lambda hidden: {**_experts(hidden), "norm_topk_prob": True},
    "llama": lambda hidden: {},
    "mistral": lambda hidden: {"sliding_window": WINDOW},
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_next": lambda hidden: {**_hybrid(hidden), **_shared_experts(hidden)},
    "qwen3_5_text": _hybrid_vision_text,
    "qwen3_5_moe_text": lambda hidden: {**_hybrid_vision_text(hidden), **_shared_experts(hidden)},
}

# The vision part of a wrapper.
_VISIONS: dict[str, dict[str, Any]] = {
    "gemma3": _VISION,
    "qwen3_5": _QWEN_VISION,
    "qwen3_5_moe": _QWEN_VISION,
}


def tiny_config(
    family: str,
    layers: int,
    hidden: int,
    vocab_size: int,
    *,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    **fields: Any,
) -> Any:
    """A Transformers config of a family of the table, with `fields` beside or instead of the usual ones of its text model.

    hidden: a multiple of 32; heads have 16 channels and share keys and values by two.
    """
    from transformers import AutoConfig

    kind = FAMILIES[family].text or family
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 32,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "tie_word_embeddings": False,
        **_TEXT[kind](hidden),
        **fields,
    }
    if family == kind:
        return AutoConfig.for_model(family, **text)
    return AutoConfig.for_model(
        family,
        text_config={"model_type": kind, **text},
        vision_config=_VISIONS[family],
        tie_word_embeddings=text["tie_word_embeddings"],
    )
