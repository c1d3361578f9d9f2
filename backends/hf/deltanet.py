"""Gated delta nets that stop at the boundaries of a pack: neither their state nor their convolution reaches another sample.

Transformers' own PyTorch functions take boundaries and ignore them. Here every gated delta net of a model keeps its own
code and weights, but for the two functions that mix tokens: they are replaced by ones that know the boundaries, which
come with the forward's keyword arguments (`pack_lengths`, see `attention.pack_arguments`).

The delta rule in chunks: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), section 3.3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from backends.errors import one_line
from backends.hf.kernels import DELTA_RULE_NUMBERS, FLA, fla_version, takes_fla

# Tokens whose updates of the state are computed together.
CHUNK = 64
# What a gated delta net's forward calls, in Transformers 5.16 to 5.19.
_CONVOLUTION, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where the samples of a pack begin and end, in the forms that the computations need.

    ends: [N + 1] int32, the first is 0. chunks: [C, 2] int32, sample and number within it, sample by sample.
    near: [R] tokens so near their sample's start that the convolution would reach past it; within: [R, K - 1], which of the
    tokens 1, 2, … before each are its sample's own.
    slots: [C · 64] the token at each place of chunks ordered by their number, so that `steps` (first and last chunk of each
    number) are slices; samples with the most chunks come first. Places after a sample's end repeat its last token.
    places: [T] where each token went.
    """

    ends: torch.Tensor
    chunks: torch.Tensor
    near: torch.Tensor
    within: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int], taps: int, device: torch.device) -> PackLayout:
        """lengths: tokens of each sample; taps: the convolution's, the token's own included."""
        sizes = torch.tensor(lengths)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        counts = (sizes + CHUNK - 1) // CHUNK
        sample = torch.arange(len(lengths)).repeat_interleave(counts)
        number = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[sample]
        # By number, and within it by falling length: a chunk's sample is then at the same place in every step.
        rank = torch.empty_like(counts)
        rank[counts.argsort(descending=True, stable=True)] = torch.arange(len(lengths))
        order = (number * len(lengths) + rank[sample]).argsort()
        inside = torch.arange(CHUNK)
        slots = (ends[sample] + number * CHUNK)[order].unsqueeze(1) + inside
        places = torch.empty(int(ends[-1]), dtype=torch.int64)
        real = slots < ends[sample + 1][order].unsqueeze(1)
        places[slots[real]] = real.flatten().nonzero().squeeze(1)
        slots = slots.minimum(ends[sample + 1][order].unsqueeze(1) - 1)
        positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(sizes)
        near = (positions < taps - 1).nonzero().squeeze(1)
        borders = [0, *torch.bincount(number).cumsum(0).tolist()]

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return cls(
            ends=put(ends.int()),
            chunks=put(torch.stack([sample, number], 1).int()),
            near=put(near),
            within=put(positions[near].unsqueeze(1) >= torch.arange(1, taps)),
            slots=put(slots.flatten()),
            places=put(places),
            steps=tuple(pairwise(borders)),
        )


def packed_convolution(
    layout: PackLayout, tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The causal convolution of each channel by itself, in float32. tokens [T, C], weight [C, K], bias [C]; returns [T, C]."""
    tokens, taps = tokens.float(), weight.float().t().flip(0)
    near = layout.near
    mixed, anew = tokens * taps[0], tokens[near] * taps[0]
    for back in range(1, len(taps)):
        mixed[back:].addcmul_(tokens[:-back], taps[back])
        before = tokens[(near - back).clamp_min(0)]
        anew.addcmul_(before.where(layout.within[:, back - 1, None], before.new_zeros(())), taps[back])
    # The first tokens of every sample have seen the sample before it.
    mixed.index_copy_(0, near, anew)
    return mixed if bias is None else mixed.add_(bias.float())


def packed_delta_rule(
    layout: PackLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule of every sample from an empty state, in float32; all samples of a pack at the same time.

    query, key [T, H, K], not yet normalised; value [T, H, V]; decay (its logarithm) and beta [T, H]. Returns [T, H, V] in
    the value's dtype.
    """
    heads, width = value.shape[1], max(key.shape[2], value.shape[2])
    group = max(DELTA_RULE_NUMBERS // (len(layout.slots) * width), 1)
    parts = [
        _delta_rule_of_heads(layout, *(tensor[:, first : first + group] for tensor in (query, key, value, decay, beta)))
        for first in range(0, heads, group)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _delta_rule_of_heads(
    layout: PackLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    heads, width, dtype = value.shape[1], value.shape[2], value.dtype

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        """[T, H, …] to [C, H, 64, …] in float32."""
        placed = tensor.index_select(0, layout.slots).reshape(-1, CHUNK, *tensor.shape[1:]).transpose(1, 2)
        return torch.empty(placed.shape, dtype=torch.float32, device=placed.device).copy_(placed)

    query, key, value = chunked(query), chunked(key), chunked(value)
    query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + _EPSILON) * query.shape[-1] ** -0.5
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + _EPSILON)
    rate, gone = chunked(beta).unsqueeze(-1), chunked(decay).cumsum(2)
    # decays[i, j]: what is left at token i of what token j wrote; nothing of what comes later.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    decays = (gone.unsqueeze(-1) - gone.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    faded = gone.exp().unsqueeze(-1)
    # What each token writes, given that the earlier ones of its chunk were written: a triangular system.
    rated = key * rate
    system = torch.matmul(rated, key.transpose(2, 3)).mul_(decays)
    written = torch.linalg.solve_triangular(
        system, torch.cat([value * rate, rated.mul_(faded)], -1), upper=False, unitriangular=True
    )
    del system, rated, rate
    attended = torch.matmul(query, key.transpose(2, 3)).mul_(decays)
    query.mul_(faded)
    key.mul_((gone[..., -1:] - gone).exp_().unsqueeze(-1))
    kept = faded[:, :, -1:]
    del decays, gone

    def flat(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return tensor[begin:end].flatten(0, 1)

    values, reading = written[..., :width], written[..., width:]
    state = query.new_zeros(layout.steps[0][1], heads, query.shape[-1], width)
    mixed = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    for begin, end in layout.steps:
        old = flat(state, 0, end - begin)
        new = torch.baddbmm(flat(values, begin, end), flat(reading, begin, end), old, alpha=-1)
        here = torch.bmm(flat(query, begin, end), old)
        flat(mixed, begin, end).copy_(here.baddbmm_(flat(attended, begin, end), new))
        old.mul_(flat(kept, begin, end)).baddbmm_(flat(key, begin, end).transpose(1, 2), new)
    return mixed.to(dtype).transpose(1, 2).flatten(0, 1).index_select(0, layout.places)


class PackedDeltaNets:
    """The gated delta nets of one model, with the boundaries of the pack that is being computed.

    kernels: what computes the delta rule, in words; "" where the model has no delta nets. fallback: why it is PyTorch although
    other kernels are here, else "". why_not: why the boundaries cannot reach them, else "".
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self.kernels = ""
        self.fallback = ""
        self.why_not = ""
        self._rule: Callable[..., Any] | None = None
        self._layout: PackLayout | None = None
        self._lengths: tuple[int, ...] = ()
        nets = [module for module in model.modules() if hasattr(module, "A_log") and hasattr(module, "conv1d")]
        if not nets:
            return
        self.kernels = "PyTorch"
        for net in nets:
            self.why_not = _replace(net, {_CONVOLUTION: self._convolve, _DELTA_RULE: self._mix}) or self.why_not
        if takes_fla(device.type, str(dtype).removeprefix("torch.")) and not self.why_not:
            self._use_fla(nets[0], device, dtype)

    def use_pytorch(self, why: str) -> bool:
        """From now on PyTorch's own operations, because of `why`. Returns whether that is another way than before."""
        if self._rule is None:
            return False
        self._fall_back(why)
        return True

    def _fall_back(self, why: str) -> None:
        self._rule, self.fallback = None, f"not {self.kernels}: {why}"
        self.kernels = f"PyTorch ({self.fallback})"

    def _use_fla(self, net: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """flash-linear-attention's kernel, if it is here and runs."""
        version = fla_version()
        if version is None:
            return
        self.kernels = f"{FLA} {version}"
        try:
            rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            if not {"cu_seqlens", "chunk_indices"} <= inspect.signature(rule).parameters.keys():
                raise ImportError("chunk_gated_delta_rule takes no chunk_indices")
            self._rule = rule
            self._tune(net, device, dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # An import of Triton, and its compiler, fail in many ways.
            self._fall_back(f"{type(error).__name__}: {one_line(error)}")

    def _tune(self, net: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Triton keeps what is fastest at the first call: that must be of a pack's size, not of the proof's."""
        tokens, longest = 8192, 1024
        heads = net.num_v_heads
        query, value = (
            torch.randn(1, tokens, heads, width, device=device, dtype=dtype)
            for width in (net.head_k_dim, net.head_v_dim)
        )
        decay = -torch.rand(1, tokens, heads, device=device)
        beta = torch.rand(1, tokens, heads, device=device, dtype=dtype)
        lengths = (longest,) * (tokens // longest)
        self._mix(query, query, value, g=decay, beta=beta, pack_lengths=lengths, taps=net.conv_kernel_size)

    def _boundaries(self, lengths: tuple[int, ...] | None, tokens: int, taps: int, device: torch.device) -> PackLayout:
        if lengths is None or sum(lengths) != tokens:
            raise RuntimeError("the boundaries of the pack did not reach the gated delta net")
        if self._layout is None or lengths != self._lengths:
            self._layout, self._lengths = PackLayout.of(lengths, taps, device), lengths
        return self._layout

    def _convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        *,
        pack_lengths: tuple[int, ...] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [1, C, T], weight [C, K]. Called where Transformers calls its convolution."""
        tokens = hidden_states[0].t()
        layout = self._boundaries(pack_lengths, len(tokens), weight.shape[-1], tokens.device)
        mixed = packed_convolution(layout, tokens, weight, bias)
        if activation in ("silu", "swish"):
            mixed = functional.silu(mixed, inplace=True)
        elif activation is not None:
            mixed = ACT2FN[activation](mixed)
        return mixed.to(hidden_states.dtype).t().unsqueeze(0)

    def _mix(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        pack_lengths: tuple[int, ...] | None = None,
        taps: int = 1,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key [1, T, H, K], value [1, T, H, V], g and beta [1, T, H]. Called where Transformers calls its delta rule."""
        # The convolution came first: its layout is there, whatever `taps` says.
        layout = self._boundaries(pack_lengths, query.shape[1], taps, query.device)
        if self._rule is None:
            return packed_delta_rule(layout, query[0], key[0], value[0], g[0], beta[0]).unsqueeze(0), None
        # Not in its kernel, which Triton tunes again for every 65,536 rows more.
        mixed, _state = self._rule(
            _normalised(query),
            _normalised(key),
            value,
            g=g,
            beta=beta,
            cu_seqlens=layout.ends,
            chunk_indices=layout.chunks,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
        )
        return mixed, None


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 along the last dimension, rounded once."""
    length = torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.mul(tensor, torch.rsqrt(length.square_().add_(_EPSILON)), out=torch.empty_like(tensor))


def _replace(net: nn.Module, functions: dict[str, Callable[..., Any]]) -> str:
    """Gives one module a forward that calls `functions` by their names. Returns why that cannot be, or ""."""
    forward = inspect.unwrap(type(net).forward)
    missing = functions.keys() - set(forward.__code__.co_names)
    if missing:
        return f"{type(net).__name__} of this version of Transformers does not call {', '.join(sorted(missing))}"
    mine = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    mine.__kwdefaults__ = forward.__kwdefaults__
    net.forward = MethodType(mine, net)
    return ""
