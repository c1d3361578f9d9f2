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
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from backends.spec import FAMILIES

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
) -> list[float]:
    """Writes model and tokenizer to `folder`, as `save_pretrained` does, and returns each block's change of the stream.

    family: "qwen3" or "llama". hidden: a multiple of 16; heads have 16 channels and share keys and values by two.
    Raises ValueError for arguments that cannot be, and where a block changes its stream by less than `LEAST_CHANGE`.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family is called {family!r}; use {' or '.join(FAMILIES)}")
    if hidden % 32 or layers < 1:
        raise ValueError(f"hidden must be a multiple of 32 and layers at least 1, not {hidden} and {layers}")
    tokenizer = train_tokenizer(texts, vocab_size)
    config = _config(family, layers, hidden, len(tokenizer), tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    probe = torch.tensor([tokenizer(" ".join(texts[:8]))["input_ids"][:256]])
    with torch.no_grad():
        _randomise(model, seed)
        for block in model.model.layers:
            for part, projection in ((block.self_attn, block.self_attn.o_proj), (block.mlp, block.mlp.down_proj)):
                projection.weight.mul_(_SHARE / _share_added(model, block, part, probe))
        # Measured in the dtype that is saved: rounding is part of the model.
        model.to(dtype)
        changes = measure_changes(model, probe)
    if min(changes) < LEAST_CHANGE:
        worst = changes.index(min(changes))
        raise ValueError(f"block {worst} changes its residual stream by {min(changes):.3f}, less than {LEAST_CHANGE}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return changes


def measure_changes(model: Any, ids: torch.Tensor) -> list[float]:
    """Each block's change of its residual stream: the mean over tokens of |after - before| / |before|. `ids`: [1, T]."""
    changes: list[float] = []

    def after(_block: Any, inputs: tuple[Any, ...], output: Any) -> None:
        before = inputs[0].float()
        out = (output[0] if isinstance(output, tuple) else output).float()
        changes.append(float(((out - before).norm(dim=-1) / before.norm(dim=-1)).mean()))

    hooks = [block.register_forward_hook(after) for block in model.model.layers]
    try:
        with torch.no_grad():
            model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return changes


def _config(family: str, layers: int, hidden: int, vocab_size: int, tokenizer: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 32,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**shape) if family == "qwen3" else LlamaConfig(**shape)


def _randomise(model: Any, seed: int) -> None:
    """Weights that keep the size of what passes through them; norms that are not 1, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.copy_(0.5 + torch.rand(weight.shape, generator=generator))
        else:
            scale = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


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
        model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return float((seen["added"].norm(dim=-1) / seen["stream"].norm(dim=-1)).mean())
