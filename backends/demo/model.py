"""A tiny model of a real architecture with random weights that matter, and a tokenizer trained on the conversations.

A small model initialised as usual hardly changes its residual stream, so a wrong layer id would go unnoticed. Here every
attention and every MLP is scaled until it moves the stream by a set share, and the builder measures that it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from backends.demo.configs import tiny_config
from backends.demo.hybrids import settle
from backends.hf.families import FAMILIES

# What each attention and each MLP adds, as a share of the stream that it reads; a block then changes it by about half.
_SHARE = 0.35
# The least change of the residual stream by a block, mean over tokens of |after - before| / |before|.
LEAST_CHANGE = 0.20

# ChatML, written to be prefix-stable: a conversation's text begins with the text of its first turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2000) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template, trained on `texts`. The same texts give the same tokenizer."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32768
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(
    folder: str | Path,
    texts: Sequence[str],
    *,
    family: str = "qwen3",
    layers: int = 8,
    hidden: int = 64,
    vocab_size: int = 2000,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> list[float]:
    """Writes model and tokenizer to `folder`, as `save_pretrained` does, and returns each block's change of the stream.

    family: a model_type of the table of families; fields: of its (text) config, beside or instead of the usual tiny ones.
    hidden: a multiple of 32; heads have 16 channels and share keys and values by two.
    Raises ValueError for arguments that cannot be, and where a block changes its stream by less than `LEAST_CHANGE`.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family is called {family!r}; use {', '.join(FAMILIES)}")
    if hidden % 32 or layers < 1:
        raise ValueError(f"hidden must be a multiple of 32 and layers at least 1, not {hidden} and {layers}")
    tokenizer = train_tokenizer(texts, vocab_size)
    config = tiny_config(
        family,
        layers,
        hidden,
        len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **fields,
    )
    probe = torch.tensor([tokenizer(" ".join(texts[:8]))["input_ids"][:256]])
    model = random_model(config, probe, seed)
    # Measured in the dtype that is saved: rounding is part of the model.
    changes = measure_changes(model.to(dtype), probe)
    if min(changes) < LEAST_CHANGE:
        worst = changes.index(min(changes))
        raise ValueError(f"block {worst} changes its residual stream by {min(changes):.3f}, less than {LEAST_CHANGE}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return changes


def text_model(model: Any) -> Any:
    """The base model of one with a head: of a wrapper, its text part."""
    return getattr(model.model, "language_model", model.model)


def random_model(config: Any, probe: torch.Tensor, seed: int = 0) -> Any:
    """A model with a head, float32, whose parts each add the same share to the stream of `probe`, token ids [1, T].

    On torch's default device, where `probe` must be too.
    """
    kind = AutoModelForImageTextToText if FAMILIES[config.model_type].text else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        _randomise(model, seed)
        settle(text_model(model))
        for block in text_model(model).layers:
            for part, offset, weights in _added_parts(block):
                by = _SHARE / _share_added(text_model(model), block, part, probe)
                for weight in weights:
                    weight.add_(offset).mul_(by).sub_(offset)
    return model


def measure_changes(model: Any, ids: torch.Tensor) -> list[float]:
    """Each block's change of its residual stream: the mean over tokens of |after - before| / |before|. `ids`: [1, T]."""
    changes: list[float] = []

    def after(_block: Any, inputs: tuple[Any, ...], output: Any) -> None:
        before = inputs[0].float()
        out = (output[0] if isinstance(output, tuple) else output).float()
        changes.append(float(((out - before).norm(dim=-1) / before.norm(dim=-1)).mean()))

    hooks = [block.register_forward_hook(after) for block in text_model(model).layers]
    try:
        with torch.no_grad():
            text_model(model)(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return changes


def _randomise(model: Any, seed: int) -> None:
    """Weights that keep the size of what passes through them; norms that are not 1, so that leaving one out shows."""
    generator = torch.Generator(model.device).manual_seed(seed)

    def normal(weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(weight.shape, generator=generator, device=generator.device)

    config = text_model(model).config
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.copy_(normal(weight) * 0.5)
        elif name.endswith("sinks"):
            # As large as the other logits, so that they take a good part of each softmax.
            weight.copy_(normal(weight) + 1)
        elif weight.dim() == 1:
            # Around 1, or around 0 for norms that add 1 themselves and begin with zeros.
            middle = 0.0 if "norm" in name and not weight.any() else 1.0
            weight.copy_(middle - 0.5 + torch.rand(weight.shape, generator=generator, device=generator.device))
        else:
            scale = weight.shape[_input_dim(name, config)] ** -0.5
            if "embed_tokens" in name:  # Gemma multiplies what it looks up by sqrt(hidden).
                scale = scale if config.model_type.startswith("gemma") else 1.0
            weight.copy_(normal(weight) * scale)


def _input_dim(name: str, config: Any) -> int:
    """The dimension of a weight that is summed over: gpt-oss keeps those of its experts as [experts, in, out]."""
    return 1 if config.model_type == "gpt_oss" and "experts." in name else -1


def _added_parts(block: Any) -> list[tuple[Any, float, list[torch.Tensor]]]:
    """What a block adds to its stream, in order: the module whose output is added, and what makes that output larger.

    The output is proportional to (offset + weights).
    """
    if hasattr(block, "post_feedforward_layernorm"):  # Gemma: a norm of 1 + weight comes after each part.
        return [
            (norm, 1.0, [norm.weight]) for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm)
        ]
    mixer = block.self_attn if hasattr(block, "self_attn") else block.linear_attn
    last = ("o_proj.", "out_proj.", "down_proj")
    return [
        (part, 0.0, [weight for name, weight in part.named_parameters() if any(output in name for output in last)])
        for part in (mixer, block.mlp)
    ]


def _share_added(model: Any, block: Any, part: Any, ids: torch.Tensor) -> float:
    """What `part` adds, as a share of the stream that `block` reads: the mean over tokens."""
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        block.register_forward_pre_hook(lambda _m, inputs: seen.__setitem__("stream", inputs[0])),
        part.register_forward_hook(
            lambda _m, _i, output: seen.__setitem__("added", output[0] if isinstance(output, tuple) else output)
        ),
    ]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return float((seen["added"].norm(dim=-1) / seen["stream"].norm(dim=-1)).mean())
