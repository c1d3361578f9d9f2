"""What a config.json says about a model, checked. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import JobError, one_line
from backends.hf.families.table import FAMILIES, FULL, LINEAR, SLIDING

# Rotary embeddings whose frequencies are fixed. Others (dynamic, longrope) depend on the longest position of a forward, which in
# a pack is another sample's.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Sizes of a gated delta net, as Transformers names them without `linear_`."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What config.json says. Sizes as Transformers names them; max_positions: tokens, None where it does not say.

    model_type: that of the text model. wrapper: the folder's own model_type where the text model is a part of it, else None.
    intermediate_size: of a dense MLP, 0 where no block has one. layer_types: the kind of each block.
    sliding_window: tokens that a block of kind "sliding_attention" sees, its own included; None where no block has one.
    num_experts, experts_per_token, expert_size, shared_expert_size: 0 where there are none. expert_blocks: which blocks have them.
    """

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
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    wrapper: str | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    expert_blocks: frozenset[int] = frozenset()
    linear: LinearAttention | None = None
    gated_attention: bool = False

    def parameters(self, blocks: int) -> int:
        """Weights of the embeddings and the first `blocks` blocks; norms, biases and convolutions are too few to count."""
        return self.vocab_size * self.hidden_size + sum(
            self._mixer(block) + self._mlp(block) for block in range(blocks)
        )

    def _mixer(self, block: int) -> int:
        """Weights of what mixes tokens in a block: attention, or a gated delta net."""
        if self.layer_types[block] == LINEAR and self.linear:
            inputs = 2 * self.linear.key_size + 2 * self.linear.value_size + 2 * self.linear.num_value_heads
            return self.hidden_size * (inputs + self.linear.value_size)
        queries = (3 if self.gated_attention else 2) * self.num_heads
        return self.hidden_size * self.head_dim * (queries + 2 * self.num_kv_heads)

    def _mlp(self, block: int) -> int:
        """Weights of a block's MLP or of all its experts, used by a token or not."""
        if block not in self.expert_blocks:
            return 3 * self.hidden_size * self.intermediate_size
        experts = self.num_experts * self.expert_size + self.shared_expert_size
        return self.hidden_size * (3 * experts + self.num_experts)

    def widest_block(self) -> int:
        """Numbers that the widest block holds for each token at a time."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.linear:
            heads = max(heads, 2 * self.linear.key_size + 2 * self.linear.value_size)
        dense = self.intermediate_size if len(self.expert_blocks) < self.num_layers else 0
        # Each token is copied to each of its experts and comes back from each.
        experts = self.experts_per_token * (3 * self.expert_size + 2 * self.hidden_size) + 3 * self.shared_expert_size
        return 4 * self.hidden_size + 2 * heads + max(3 * dense, experts)


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


def text_config(config: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """The fields of the text model: those of config.json, or of a wrapper's `text_config`. Raises JobError.

    Fields that the family lets config.json leave out are filled in.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if kind is None:
        raise JobError(f"config.json of {model} has no model_type", "give the folder of a model, or fetch it again")
    if family is None:
        raise JobError(
            f"the model family {kind!r} of {model} is not supported by the hf backend",
            f"use a model of one of the families {', '.join(FAMILIES)}",
        )
    if family.text is None:
        return {**family.defaults, **config}
    inner = config.get("text_config")
    if not isinstance(inner, Mapping) or inner.get("model_type", family.text) != family.text:
        raise JobError(f"{model / 'config.json'}: text_config is not that of a {family.text}", "fetch the model again")
    return {**family.defaults, "model_type": family.text, **inner}


def model_shape(config: Mapping[str, Any], model: Path) -> ModelShape:
    """What the backend needs to know of a config. Raises JobError for a family or a feature that it does not take."""
    fields = text_config(config, model)
    kind = str(config["model_type"])
    family = FAMILIES[kind]
    for part in (config, fields):
        _refuse_features(part, model, family.dequantized)
    for name in _SIZES:
        _size(fields, name, model)
    experts: dict[str, Any] = {}
    blocks: frozenset[int] = frozenset()
    if family.expert_size:
        blocks = _expert_blocks(fields)
        experts = {
            # Transformers 5 writes num_local_experts for either name, and reads both.
            "num_experts": _size(fields, "num_experts" if "num_experts" in fields else "num_local_experts", model),
            "experts_per_token": _size(fields, "num_experts_per_tok", model),
            "expert_size": _size(fields, family.expert_size, model),
            "shared_expert_size": fields.get("shared_expert_intermediate_size") or 0,
            "expert_blocks": blocks,
        }
    dense = len(blocks) < fields["num_hidden_layers"]
    heads = fields["num_attention_heads"]
    layers = _layer_types(tuple(family.layers(fields)), fields, model)
    return ModelShape(
        model_type=family.text or kind,
        family=family.name,
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        intermediate_size=_size(fields, "intermediate_size", model) if dense else 0,
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        vocab_size=fields["vocab_size"],
        max_positions=fields.get("max_position_embeddings"),
        layer_types=layers,
        sliding_window=_size(fields, "sliding_window", model) if SLIDING in layers else None,
        wrapper=kind if family.text else None,
        linear=_linear(fields, model) if LINEAR in layers else None,
        gated_attention=family.gated_attention,
        **experts,
    )


def _size(fields: Mapping[str, Any], name: str, model: Path) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JobError(f"{model / 'config.json'}: {name} is {value!r}, not a size", "fetch the model again")
    return value


def _expert_blocks(fields: Mapping[str, Any]) -> frozenset[int]:
    """Every block, but for the dense ones that `mlp_only_layers` and `decoder_sparse_step` name."""
    dense, step = fields.get("mlp_only_layers") or (), fields.get("decoder_sparse_step") or 1
    return frozenset(
        block for block in range(fields["num_hidden_layers"]) if block not in dense and (block + 1) % step == 0
    )


def _layer_types(layers: tuple[str, ...], fields: Mapping[str, Any], model: Path) -> tuple[str, ...]:
    count = fields["num_hidden_layers"]
    strange = sorted({str(layer) for layer in layers} - {FULL, SLIDING, LINEAR})
    if strange:
        raise JobError(
            f"{model} has blocks of kind {', '.join(strange)} (layer_types), which the hf backend does not compute",
            f"use a model with blocks of the kinds {FULL}, {SLIDING} and {LINEAR}",
        )
    if SLIDING in layers and fields.get("use_sliding_window") is False:
        raise JobError(
            f"{model / 'config.json'}: layer_types names blocks with windows, but use_sliding_window is off",
            "make the two agree: as the model was trained",
        )
    if len(layers) != count:
        raise JobError(
            f"{model / 'config.json'}: layer_types names {len(layers)} blocks, num_hidden_layers says {count}",
            "fetch the model again",
        )
    return layers


def _linear(fields: Mapping[str, Any], model: Path) -> LinearAttention:
    return LinearAttention(
        **{name: _size(fields, f"linear_{name}", model) for name in LinearAttention.__dataclass_fields__}
    )


def _refuse_features(config: Mapping[str, Any], model: Path, dequantized: tuple[str, ...]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        if method not in dequantized:
            raise JobError(f"{model} is quantized ({method})", "give the unquantized model that it was made from")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        name = "is_causal" if config.get("is_causal") is False else "use_bidirectional_attention"
        raise JobError(
            f"{model} attends to later tokens too ({name} is {config[name]}), which a drafter's target cannot",
            "use a causal language model",
        )
    if config.get("attn_logit_softcapping"):
        raise JobError(
            f"{model} caps the logits of its attention (attn_logit_softcapping), which the hf backend does not compute",
            "use a model without it",
        )
    # Transformers 5 writes rope_parameters and still lets rope_scaling, the older name, overrule it.
    for name in ("rope_scaling", "rope_parameters"):
        for rope in _ropes(config.get(name)):
            kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
            if kind not in _FIXED_ROPE:
                raise JobError(
                    f"{model} scales its positions by rope type {kind!r} ({name}), whose frequencies may depend on the lengths"
                    " of other samples in a pack",
                    f"use a model with rope type {', '.join(_FIXED_ROPE)}",
                )


def _ropes(value: Any) -> list[Any]:
    """One rope, or one for each kind of block."""
    if isinstance(value, dict) and value and set(value) <= {FULL, SLIDING, LINEAR}:
        return [rope for rope in value.values() if rope]
    return [value] if value else []
