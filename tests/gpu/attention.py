"""`python -m tests.gpu.attention`: a pack's attention by PyTorch's kernel on a GPU against the sums written out in float64.

Prints a line for each case and exits 1 where one is off by more than rounding to bfloat16.
"""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise, product

import torch
from torch import nn

from backends.hf import attention

PACKS = ((700, 1, 64, 4, 2100, 33), (4,), (8,))  # as many tokens as heads, too
# Rounding of values and results to 8 bits, over the largest result.
LIMIT = 0.01


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[T, heads, D] in float64; query [1, heads, T, D]."""
    groups = query.shape[1] // key.shape[1]
    parts = []
    for begin, end in pairwise([0, *accumulate(lengths)]):
        q, k, v = (tensor[0, :, begin:end].double() for tensor in (query, key, value))
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        scores = q @ k.transpose(1, 2) * query.shape[-1] ** -0.5
        row, column = torch.arange(end - begin, device=q.device)[:, None], torch.arange(end - begin, device=q.device)
        scores.masked_fill_((column > row) | (column <= row - (window or end)), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, end - begin, 1)], dim=-1)
        parts.append((scores.softmax(-1)[..., : end - begin] @ v).transpose(0, 1))
    return torch.cat(parts)


def main() -> int:
    generator = torch.Generator("cuda").manual_seed(0)
    worst = 0.0
    shapes = ((64, 8, 2), (128, 4, 4), (256, 4, 2), (320, 4, 2))
    for lengths, (width, heads, kv_heads), window in product(PACKS, shapes, (None, 1, 128, 1000)):
        arguments = attention.pack_arguments(lengths, torch.device("cuda"))
        del arguments["position_ids"]
        query, key, value = (
            torch.randn(1, count, sum(lengths), width, generator=generator, device="cuda").bfloat16()
            for count in (heads, kv_heads, kv_heads)
        )
        for sinks in (None, torch.randn(heads, generator=generator, device="cuda").bfloat16() + 1):
            found, _ = attention.packed_attention(
                nn.Module(), query, key, value, None, sliding_window=window, s_aux=sinks, **arguments
            )
            wanted = written_out(query, key, value, lengths, window, sinks)
            error = float((found[0].double() - wanted).abs().max() / wanted.abs().max())
            worst = max(worst, error)
            way = "kernel" if attention.varlen_usable(query, sinks=sinks is not None) else "by sample"
            extra = "no sinks" if sinks is None else "sinks"
            print(f"{sum(lengths)} tokens, heads of {width}, window {window}, {extra}: {way}, {error:.2g}")
    print(f"torch {torch.__version__}, the worst error is {worst:.2g} (limit {LIMIT})")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
