"""Which models the hf backend takes, what it needs of their config.json, and where their parts are. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.hf.families.shape import ModelShape, model_shape, read_config, text_config
from backends.hf.families.table import FAMILIES, FULL, LINEAR, SLIDING, Family

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "FAMILIES",
    "FULL",
    "LINEAR",
    "SLIDING",
    "Family",
    "ModelShape",
    "blocks_of",
    "final_norm_of",
    "model_shape",
    "read_config",
    "text_config",
]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a base model (one without a head, the text part of a wrapper), in order."""
    blocks: nn.ModuleList = model.layers  # type: ignore[assignment]  # to torch any attribute may be a tensor
    return blocks


def final_norm_of(model: nn.Module) -> nn.Module:
    """The norm after the last block; its input is layer id N."""
    norm: nn.Module = model.norm  # type: ignore[assignment]  # to torch any attribute may be a tensor
    return norm
