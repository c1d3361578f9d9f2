"""The proof at start that a pack's samples do not see each other: a model whose packs fail it runs one sample at a time.

Two questions, asked with random tokens. Do samples in a pack come out as they do alone? And do they come out the same when the
samples before them are others? The second is answered to the bit where the kernels allow it, in 16 bits too, where rounding
could hide a leak from the first. Both are asked of all tokens and of the first ones of each sample by themselves: a convolution
of 4 taps that leaks touches only 3 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Samples longer and shorter than the 64 tokens of a delta rule's chunk; no boundary is on that grid. Each second one is watched
# while the one before it changes.
_LENGTHS = (70, 9, 131, 80, 66, 5)
# How far a convolution of 4 taps reaches back.
_NEAR = 3
# A relative error that rounding in float32 explains, through all blocks of a deep model.
_EXACT = 1e-4
# What rounding may add to a token's state in a pack, in 16 bits, and how much less than a full leak that must be.
_TOLERANCE = {torch.float32: _EXACT, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_MARGIN = 3.0
# What other samples may change, of what they change where nothing keeps them apart: experts that get other tokens round otherwise.
_SHARE = 0.05

States = Callable[[Sequence[Sequence[int]]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative differences of the worst slot. everywhere: mean over tokens; near: median over the first tokens of samples.

    By token, since a few tokens of real models have states hundreds of times longer than the others'. The median, since a
    token that rounding sends to other experts says nothing of a leak.
    """

    everywhere: float
    near: float

    @classmethod
    def of(cls, states: torch.Tensor, reference: torch.Tensor, watched: torch.Tensor, near: torch.Tensor) -> Difference:
        """states, reference: [T, L, H]. watched, near: indices of tokens."""
        states, reference = states.float(), reference.float()
        by_token = (states - reference).norm(dim=2) / reference.norm(dim=2).clamp_min(1e-12)
        return cls(float(by_token[watched].mean(0).max()), float(by_token[near].median(0).values.max()))


def prove(states: States, vocab_size: int, dtype: torch.dtype) -> str:
    """Why packs are not proven, in one line; "" where they are. states: samples laid end to end to [T, L, H]."""
    generator = torch.Generator().manual_seed(0)
    samples, others = (
        [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS] for _ in range(2)
    )
    changed = [others[place] if place % 2 == 0 else ids for place, ids in enumerate(samples)]
    places = torch.split(torch.arange(sum(_LENGTHS)), list(_LENGTHS))
    all_tokens, all_near = torch.cat(places), torch.cat([part[:_NEAR] for part in places[1:]])
    watched, near = torch.cat(places[1::2]), torch.cat([part[:_NEAR] for part in places[1::2]])

    packed = states(samples)
    single = torch.cat([states([ids]) for ids in samples])
    leaky = states([_joined(samples)])
    error = Difference.of(packed, single, all_tokens, all_near)
    leak = Difference.of(leaky, single, all_tokens, all_near)
    for found, most, where in (
        (error.everywhere, _allowed(dtype, leak.everywhere), ""),
        (error.near, _allowed(dtype, leak.near), " in the first tokens of each"),
    ):
        if not found <= most:
            return f"samples in a pack differ from single runs by {found:.2g}{where} (allowed {most:.2g})"

    moved = Difference.of(states(changed), packed, watched, near)
    swayed = Difference.of(states([_joined(changed)]), leaky, watched, near)
    share = 0.0 if dtype == torch.float32 else _SHARE
    for found, most, where in (
        (moved.everywhere, max(_EXACT, share * swayed.everywhere), "states"),
        (moved.near, max(_EXACT, share * swayed.near), "first states"),
    ):
        if not found <= most:
            return f"other samples before it in a pack change a sample's {where} by {found:.2g} (allowed {most:.2g})"
    return ""


def _allowed(dtype: torch.dtype, leak: float) -> float:
    return max(_EXACT, min(_TOLERANCE[dtype], leak / _MARGIN))


def _joined(samples: Sequence[Sequence[int]]) -> list[int]:
    return [token for ids in samples for token in ids]
