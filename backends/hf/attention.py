"""Causal attention that stops at the boundaries of a pack, registered with Transformers under the name `ATTENTION`.

A pack is one sequence [1, T] of samples laid end to end; the forward's keyword arguments carry its boundaries down to
here (`pack_arguments`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

# Not a name with "flash" in it: Transformers looks for those on its hub of kernels.
ATTENTION = "packed_samples"


def _find_varlen() -> tuple[Callable[..., Any] | None, frozenset[str]]:
    """PyTorch's variable-length FlashAttention and the options that it takes: they grew from 2.10 on."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    options = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, options) if "window_size" in options else (None, frozenset())


_VARLEN, _VARLEN_OPTIONS = _find_varlen()


def pack_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a forward over samples of these lengths: positions that restart and the boundaries.

    The names are Transformers' own for packed sequences; `pack_lengths` is ours, for attention computed sample by sample.
    """
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device, non_blocking=True)
    longest = max(lengths)
    return {
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "pack_lengths": tuple(lengths),
    }


def varlen_usable(query: torch.Tensor, scaling: float | None = None) -> bool:
    """Whether PyTorch's kernel takes this query: CUDA of compute capability 8.0 on, 16 bits, heads of at most 256."""
    usual = scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5)
    return (
        _VARLEN is not None
        and ("scale" in _VARLEN_OPTIONS or usual)
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    pack_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one pack. query [1, heads, T, D], key and value [1, kv_heads, T, D]; returns [1, T, heads, D].

    Raises RuntimeError where the boundaries did not arrive: without them samples would see each other.
    """
    if pack_lengths is None or cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError("the boundaries of the pack did not reach the attention")
    if query.shape[0] != 1 or query.shape[2] != sum(pack_lengths) or attention_mask is not None or sliding_window:
        raise RuntimeError(f"not one pack without a mask or window: query {list(query.shape)}, lengths {pack_lengths}")
    if varlen_usable(query, scaling):
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None
    return _by_sample(query, key, value, pack_lengths, scaling).transpose(1, 2), None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scaling: float | None,
) -> torch.Tensor:
    """[T, heads, D] by one kernel over all samples."""
    assert _VARLEN is not None
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "scale" in _VARLEN_OPTIONS:
        options["scale"] = scaling
    if groups > 1 and "enable_gqa" in _VARLEN_OPTIONS:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended: torch.Tensor = _VARLEN(query, key, value, ends, ends, longest, longest, **options)
    return attended


def _by_sample(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scaling: float | None
) -> torch.Tensor:
    """[1, heads, T, D], one sample after the other."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # Repeated, not `enable_gqa`: that rules out the kernels that do without a [T, T] matrix in float32.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = [
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2)


# No mask function is registered under this name, so Transformers builds no mask.
AttentionInterface.register(ATTENTION, packed_attention)
