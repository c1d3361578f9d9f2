"""The wanted layers of a forward, and nothing else, in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from backends.hf.families import blocks_of, final_norm_of


def keep_blocks(model: nn.Module, layer_ids: Sequence[int]) -> None:
    """Drops the blocks after the last wanted layer: nobody looks at what they compute."""
    model.layers = blocks_of(model)[: max(layer_ids)]


class Capture:
    """Copies the residual stream at `layer_ids` into `target` while the model runs.

    Id k is the input of block k, and with k = the number of blocks it is the input of the final norm (the trainer's
    numbering: 0 = embeddings, N = before the final norm). target: [T, L, H], set before each forward.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.target: torch.Tensor | None = None
        self.filled = 0
        blocks = blocks_of(model)
        for slot, layer in enumerate(layer_ids):
            module = final_norm_of(model) if layer == len(blocks) else blocks[layer]
            module.register_forward_pre_hook(self._hook(slot), with_kwargs=True)

    def _hook(self, slot: int) -> Any:
        def copy(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.target is None:
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            self.target[:, slot].copy_(hidden[0])
            self.filled += 1

        return copy
