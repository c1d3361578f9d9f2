"""Faults that the table must notice, each put into the real code while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AttentionInterface

from backends.hf import attention, capture, deltanet, extractor
from backends.hf.deltanet import PackLayout, packed_convolution, packed_delta_rule
from backends.hf.families import LINEAR, SLIDING, ModelShape
from tests.fidelity.cases import BLOCKS


@dataclass(frozen=True)
class Sabotage:
    """what: the fault. applies: to which models. reopen: whether it must be there when a model is opened.

    dtypes: in which the table must notice it; rounding to 16 bits may hide the smallest.
    """

    what: str
    put: Callable[[], AbstractContextManager[Any]]
    applies: Callable[[ModelShape], bool] = lambda shape: True
    reopen: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


@contextmanager
def _shifted_ids() -> Iterator[None]:
    class Shifted(capture.Capture):
        def __init__(self, model: nn.Module, layer_ids: Any) -> None:
            super().__init__(model, [min(layer + 1, BLOCKS) for layer in layer_ids])

    with patch.object(extractor, "Capture", Shifted):
        yield


@contextmanager
def _after_the_norm() -> Iterator[None]:
    def after_norm(model: Any) -> nn.Module:
        if not isinstance(model.norm, nn.Sequential):
            model.norm = nn.Sequential(model.norm, nn.Identity())
        found: nn.Module = model.norm[1]
        return found

    with patch.object(capture, "final_norm_of", after_norm):
        yield


def _attention_with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[], AbstractContextManager[None]]:
    """The attention called with other arguments than the model gives."""

    @contextmanager
    def put() -> Iterator[None]:
        def changed(*tensors: Any, **arguments: Any) -> Any:
            return attention.packed_attention(*tensors, **{**arguments, **change(arguments)})

        AttentionInterface.register(attention.ATTENTION, changed)
        try:
            yield
        finally:
            AttentionInterface.register(attention.ATTENTION, attention.packed_attention)

    return put


def _one_sample(arguments: dict[str, Any]) -> dict[str, Any]:
    """The boundaries of a pack that is one sample. Positions restart as they should: only the attention looks past."""
    whole = attention.pack_arguments([sum(arguments["pack_lengths"])], arguments["cu_seq_lens_q"].device)
    return {name: value for name, value in whole.items() if name != "position_ids"}


@contextmanager
def _state_carried_on() -> Iterator[None]:
    """The delta rule of a pack as if it were one sample."""

    def whole(_: PackLayout, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return packed_delta_rule(PackLayout.of([len(query)], 4, query.device), query, *others)

    with patch.object(deltanet, "packed_delta_rule", whole):
        yield


@contextmanager
def _convolution_carried_on() -> Iterator[None]:
    """The convolution of a pack as if it were one sample: wrong in the first three tokens of the others."""

    def whole(_: PackLayout, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        return packed_convolution(PackLayout.of([len(tokens)], 4, tokens.device), tokens, *others)

    with patch.object(deltanet, "packed_convolution", whole):
        yield


def _has_delta_nets(shape: ModelShape) -> bool:
    return LINEAR in shape.layer_types


def _longer_window(arguments: dict[str, Any]) -> dict[str, Any]:
    window = arguments.get("sliding_window")
    return {"sliding_window": window and window + 1}


def _has_windows(shape: ModelShape) -> bool:
    return SLIDING in shape.layer_types


SABOTAGES = (
    Sabotage("ids shifted by one", _shifted_ids, reopen=True),
    Sabotage("last slot after the norm", _after_the_norm, reopen=True),
    Sabotage("attention boundary dropped", _attention_with(_one_sample)),
    Sabotage("state boundary dropped", _state_carried_on, _has_delta_nets),
    Sabotage("convolution boundary dropped", _convolution_carried_on, _has_delta_nets),
    Sabotage("window dropped", _attention_with(lambda arguments: {"sliding_window": None}), _has_windows),
    Sabotage(
        "window one too long",
        _attention_with(_longer_window),
        _has_windows,
        dtypes=("float32",),
    ),
    Sabotage(
        "sinks dropped", _attention_with(lambda arguments: {"s_aux": None}), lambda shape: shape.model_type == "gpt_oss"
    ),
)
