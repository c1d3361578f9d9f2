"""Random gated delta nets that are as calm as trained ones. Loads torch."""

from __future__ import annotations

from typing import Any

import torch


def settle(text_model: Any) -> None:
    """Changes the random weights of a text model's gated delta nets in place; nothing where it has none.

    What a delta net reads is divided by its own length. With random queries and keys it is a small difference of large numbers,
    so that rounding in 16 bits reaches the size of the states within a few blocks. Trained ones look for what they wrote:
    here keys are queries and a remainder, and all tokens have a part in common.
    """
    nets = [block.linear_attn for block in text_model.layers if hasattr(block, "linear_attn")]
    if not nets:
        return
    # As long as the part of a token's own.
    embeddings = text_model.embed_tokens.weight
    embeddings.add_(embeddings[0].clone())
    for net in nets:
        convolution = net.conv1d.weight
        convolution[net.key_dim : 2 * net.key_dim].copy_(convolution[: net.key_dim])
        for queries, keys in _rows_of_heads(net):
            keys.mul_(0.6).add_(queries, alpha=0.8)
        # The state lives on for tens of tokens.
        net.A_log.uniform_(-4, 0, generator=torch.Generator(net.A_log.device).manual_seed(0))


def _rows_of_heads(net: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of the input projection that make the queries and the keys; for each head where they are kept by heads."""
    if hasattr(net, "in_proj_qkv"):
        rows = net.in_proj_qkv.weight
        return [(rows[: net.key_dim], rows[net.key_dim : 2 * net.key_dim])]
    size = net.head_k_dim
    heads = net.in_proj_qkvz.weight.unflatten(0, (net.num_k_heads, -1))
    return [(head[:size], head[size : 2 * size]) for head in heads]
