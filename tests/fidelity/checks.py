"""The checks of the table, and what each sabotage does to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch

from backends.hf.extractor import Extractor
from tests.fidelity.cases import LAYERS, Model
from tests.fidelity.sabotage import SABOTAGES, Sabotage

# float32: other kernels and another order of summing. bfloat16 rounds to 8 bits (0.2 % on average) some six times a block:
# errors that add up like a random walk reach 0.2 % * sqrt(6 * 6 blocks) = 1.2 %; a token may have four times that.
LIMITS = {"float32": 1e-5, "bfloat16": 0.05}
# The norm after a gated delta net enlarges the rounding of tokens whose output nearly cancels: those of the stock model in
# bfloat16 reach 6 %.
LINEAR_LIMIT = 0.15
# A sabotage must not be noticed by a hair.
FACTORS = {"float32": 100.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class Result:
    """error: relative; good: what the table wants, for a check an error within the limit, for a sabotage one beyond."""

    error: float
    good: bool
    note: str = ""


def limit_of(model: Model, dtype: str) -> float:
    routed = model.shape.num_experts > 0
    return LINEAR_LIMIT if dtype == "bfloat16" and model.shape.linear and not routed else LIMITS[dtype]


def by_token(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|a - b| / |b| of every token, [T]; both [T, H]."""
    return (states - reference).norm(dim=1) / reference.norm(dim=1)


def error_of(model: Model, states: list[torch.Tensor], dtype: str) -> float:
    """The error of the worst slot. Its worst token counts, but for rounded models with experts: there half of the tokens.

    Rounding sends a token whose experts score nearly the same to another one, in the stock model too: a large error at once.
    """
    worst = 0.0
    for slot, layer in enumerate(LAYERS):
        errors = torch.cat(
            [by_token(mine[:, slot], theirs[layer]) for mine, theirs in zip(states, model.plain, strict=True)]
        )
        routed = dtype != "float32" and model.shape.num_experts
        worst = max(worst, float(errors.median() if routed else errors.max()))
    return worst


def _packs(dtype: str) -> Callable[[Model], Result]:
    def check(model: Model) -> Result:
        """Every slot of a pack against the plain forward."""
        using = model.opened(dtype)
        error = error_of(model, model.packed(using), dtype)
        return Result(error, error <= limit_of(model, dtype) and using.packing == "packs", using.why_not)

    return check


def _one_at_a_time(model: Model) -> Result:
    """A pack against its samples alone, by the backend both times."""
    using = model.opened("float32")
    alone = [using.states([ids]).cpu() for ids in model.samples]
    error = max(
        float(by_token(mine[:, slot], single[:, slot]).max())
        for mine, single in zip(model.packed(using), alone, strict=True)
        for slot in range(len(LAYERS))
    )
    return Result(error, error <= LIMITS["float32"])


def _recomputed(model: Model) -> Result:
    """What `verify` recomputes with against the plain forward: two that share no code."""
    pairs = zip(model.recomputed, model.plain, strict=True)
    error = max(float(by_token(mine.flatten(0, 1), plain.flatten(0, 1)).max()) for mine, plain in pairs)
    return Result(error, error <= LIMITS["float32"])


def _leak_found_at_start(model: Model) -> Result:
    """A model whose attention leaks runs one sample at a time, and is right again."""
    leak = next(sabotage for sabotage in SABOTAGES if sabotage.what == "attention boundary dropped")
    with leak.put():
        using = model.open("float32")
        states = model.packed(using)
    error = error_of(model, states, "float32")
    return Result(error, error <= LIMITS["float32"] and using.packing == "one sample at a time", using.why_not)


CHECKS: dict[str, Callable[[Model], Result]] = {
    "float32": _packs("float32"),
    "bfloat16": _packs("bfloat16"),
    "pack = alone": _one_at_a_time,
    "recompute": _recomputed,
    "leak found": _leak_found_at_start,
}


def sabotaged(model: Model, sabotage: Sabotage, dtype: str) -> Result:
    """The check of a dtype under a sabotage; good where it fails, and not by a hair."""
    # The proof at start would turn packs off; here the check alone must notice.
    proof = patch.object(Extractor, "_prove", lambda self: None) if sabotage.reopen else nullcontext()
    using = None if sabotage.reopen else model.opened(dtype)
    with proof, sabotage.put():
        states = model.packed(using or model.open(dtype))
    error = error_of(model, states, dtype)
    return Result(error, not error <= FACTORS[dtype] * limit_of(model, dtype))
