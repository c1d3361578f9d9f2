"""Which models the hf backend takes, what it needs of their config.json, and where their parts are. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import JobError, one_line

if TYPE_CHECKING:
    from torch import nn

# model_type of config.json -> the name that people use. All of these keep their blocks in `layers` and end in `norm`.
FAMILIES = {"qwen3": "Qwen3", "llama": "Llama"}

# Rotary embeddings whose frequencies are fixed. Others (dynamic, longrope) depend on the longest position of a forward, which in
# a pack is another sample's.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What config.json says. Sizes as Transformers names them; max_positions: tokens, None where it does not say."""

    model_type: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None

    def parameters(self, blocks: int) -> int:
        """Weights of the embeddings and the first `blocks` blocks; norms and biases are too few to count."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.vocab_size * self.hidden_size + blocks * (attention + 3 * self.hidden_size * self.intermediate_size)


def read_config(model: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises JobError."""
    if not model.is_dir():
        raise JobError(f"the model {model} is not a folder", "give the folder that holds config.json and the weights")
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError(
            f"the model folder {model} has no config.json", "give the folder that holds config.json and the weights"
        ) from None
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read: {one_line(error)}", "fetch the model again") from None
    if not isinstance(config, dict):
        raise JobError(f"{path} is not a JSON object", "fetch the model again")
    return config


def model_shape(config: Mapping[str, Any], model: Path) -> ModelShape:
    """What the backend needs to know of a config. Raises JobError for a family or a feature that it does not take."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise JobError(
            f"the model family {kind!r} of {model} is not supported by the hf backend",
            f"use a model of one of the families {', '.join(FAMILIES)}",
        )
    _refuse_features(config, model)
    for name in _SIZES:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobError(f"{model / 'config.json'}: {name} is {value!r}, not a size", "fetch the model again")
    heads = config["num_attention_heads"]
    default_head_dim = 128 if kind == "qwen3" else config["hidden_size"] // heads
    return ModelShape(
        model_type=kind,
        family=FAMILIES[kind],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or default_head_dim,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings"),
    )


def _refuse_features(config: Mapping[str, Any], model: Path) -> None:
    sliding = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    if config.get("model_type") == "qwen3" and sliding:
        raise JobError(
            f"{model} uses sliding-window attention (use_sliding_window), which the hf backend does not compute",
            "use a model without it, or set use_sliding_window to false in config.json if the model was trained so",
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise JobError(f"{model} is quantized ({method})", "give the unquantized model that it was made from")
    # Transformers 5 writes rope_parameters and still lets rope_scaling, the older name, overrule it.
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
        if kind not in _FIXED_ROPE:
            raise JobError(
                f"{model} scales its positions by rope type {kind!r} ({name}), whose frequencies may depend on the lengths of"
                " other samples in a pack",
                f"use a model with rope type {', '.join(_FIXED_ROPE)}",
            )


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a base model (one without a head), in order."""
    blocks: nn.ModuleList = model.layers  # type: ignore[assignment]
    return blocks


def final_norm_of(model: nn.Module) -> nn.Module:
    """The norm after the last block; its input is layer id N."""
    norm: nn.Module = model.norm  # type: ignore[assignment]
    return norm
