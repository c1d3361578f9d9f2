"""Causal attention that stops at the boundaries of a pack, registered with Transformers under the name `ATTENTION`.

A pack is one sequence [1, T] of samples laid end to end; the forward's keyword arguments carry its boundaries down to
here (`pack_arguments`). Windows and sinks are what a block's own attention passes on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

# Not a name with "flash" in it: Transformers looks for those on its hub of kernels.
ATTENTION = "packed_samples"
# Queries at a time where scores are written out: [heads, queries, keys] in float32 stays small beside a model.
_QUERIES = 512


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


def varlen_usable(query: torch.Tensor, scaling: float | None = None, *, sinks: bool = False) -> bool:
    """Whether PyTorch's kernel takes this query: CUDA of compute capability 8.0 on, 16 bits, heads of at most 256.

    Sinks need the logarithm of the sum, which it does not give in every version.
    """
    usual = scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5)
    return (
        _VARLEN is not None
        and ("scale" in _VARLEN_OPTIONS or usual)
        and ("return_aux" in _VARLEN_OPTIONS or not sinks)
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
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one pack. query [1, heads, T, D], key and value [1, kv_heads, T, D]; returns [1, T, heads, D].

    sliding_window: a token sees so many tokens, itself included. s_aux [heads]: a logit for each head that joins the softmax
    and adds nothing (an attention sink). Raises RuntimeError where the boundaries did not arrive, without them samples would
    see each other, and for what is not computed here.
    """
    if pack_lengths is None or cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError("the boundaries of the pack did not reach the attention")
    if query.shape[0] != 1 or query.shape[2] != sum(pack_lengths) or attention_mask is not None:
        raise RuntimeError(f"not one pack without a mask: query {list(query.shape)}, lengths {pack_lengths}")
    if softcap or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise RuntimeError("attention with capped logits, or to later tokens, is not computed here")
    # A window as long as the longest sample hides nothing.
    window = sliding_window if sliding_window and sliding_window < max_length_q else None
    if varlen_usable(query, scaling, sinks=s_aux is not None):
        attended = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, window, s_aux)
        return attended.unsqueeze(0), None
    return _by_sample(query, key, value, pack_lengths, scaling, window, s_aux).transpose(1, 2), None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[T, heads, D] by one kernel over all samples."""
    assert _VARLEN is not None
    groups = query.shape[1] // key.shape[1]
    # FlashAttention counts the tokens to the left of a token, without the token itself.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "scale" in _VARLEN_OPTIONS:
        options["scale"] = scaling
    if groups > 1 and "enable_gqa" in _VARLEN_OPTIONS:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if sinks is None:
        attended: torch.Tensor = _VARLEN(query, key, value, ends, ends, longest, longest, **options)
        return attended
    from torch.nn.attention.varlen import AuxRequest

    attended, logsum = _VARLEN(
        query, key, value, ends, ends, longest, longest, return_aux=AuxRequest(lse=True), **options
    )
    return with_sinks(attended, logsum if _tokens_first(attended.device) else logsum.transpose(0, 1), sinks)


@cache
def _tokens_first(device: torch.device) -> bool:
    """Whether the kernel's logarithms of sums are [T, heads], as PyTorch 2.13 says, or [heads, T]: asked with three tokens."""
    from torch.nn.attention.varlen import AuxRequest

    assert _VARLEN is not None
    tokens = torch.zeros(3, 1, 16, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([0, 3], dtype=torch.int32, device=device)
    _, logsum = _VARLEN(tokens, tokens, tokens, ends, ends, 3, 3, return_aux=AuxRequest(lse=True))
    return bool(logsum.shape[0] == 3)


def with_sinks(attended: torch.Tensor, logsum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with sinks of attention without. attended [T, heads, D], logsum [T, heads], sinks [heads].

    With l the logarithm of the sum of exp(scores) and s the sink, every weight shrinks by exp(l) / (exp(l) + exp(s)).
    """
    share = torch.sigmoid(logsum.float() - sinks.float())
    return (attended.float() * share.unsqueeze(-1)).to(attended.dtype)


def _by_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[1, heads, T, D], one sample after the other."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # Repeated, not `enable_gqa`: that rules out the kernels that do without a [T, T] matrix in float32.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = []
    for q, k, v in zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True):
        length = q.shape[2]
        if sinks is not None:
            parts += _written_out(q, k, v, scaling, window or length, sinks)
        elif window is None or length <= window:
            parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
        else:
            parts += _windowed(q, k, v, scaling, window)
    return torch.cat(parts, dim=2)


def _stretches(length: int, window: int, queries: int) -> list[tuple[int, int, int]]:
    """(first key, first query, end) of stretches of queries; what a stretch sees lies between first key and end."""
    return [(max(begin - window + 1, 0), begin, min(begin + queries, length)) for begin in range(0, length, queries)]


def _visible(first_key: int, begin: int, end: int, window: int, device: torch.device) -> torch.Tensor:
    """[queries, keys], True where a query sees a key."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first_key, end, device=device)
    return (distance >= 0) & (distance < window)


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int
) -> list[torch.Tensor]:
    """Parts of [1, heads, T, D]: stretches of a window's length, so that no mask is as large as T x T."""
    return [
        functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, first:end],
            value[:, :, first:end],
            attn_mask=_visible(first, begin, end, window, query.device),
            scale=scaling,
        )
        for first, begin, end in _stretches(query.shape[2], window, max(window, _QUERIES))
    ]


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int,
    sinks: torch.Tensor,
) -> list[torch.Tensor]:
    """Parts of [1, heads, T, D]: a softmax in float32 that the sinks join, for a stretch of queries at a time."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = sinks.float().view(1, -1, 1, 1)
    parts = []
    for first, begin, end in _stretches(query.shape[2], window, _QUERIES):
        scores = query[:, :, begin:end].float() @ key[:, :, first:end].float().transpose(2, 3) * scale
        scores.masked_fill_(~_visible(first, begin, end, window, query.device), -torch.inf)
        largest = torch.maximum(scores.amax(dim=-1, keepdim=True), logits)
        weights = (scores - largest).exp_()
        total = weights.sum(dim=-1, keepdim=True) + (logits - largest).exp()
        parts.append((weights / total).to(value.dtype) @ value[:, :, first:end])
    return parts


# No mask function is registered under this name, so Transformers builds no mask.
AttentionInterface.register(ATTENTION, packed_attention)
