"""Which layers: presets, and the numbering conventions converted in one place. Loads no torch.

An id in this project is the trainer's: id k is the residual stream after k blocks, so 0 is the embeddings and N, the number of
blocks, is the last block's output *before* the final norm. speculators and vLLM number the same way. z-lab's DFlash and
SpecForge number the blocks themselves from 0: their k is our k + 1, and the embeddings have no number there.
A wrong id with the right count trains without an error and to no acceptance at all, so nothing else converts ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from backends.spec import PRESETS, SpecError

# What to add to a convention's number to get the trainer's id.
_OFFSETS = {"speculators": 0, "vllm": 0, "dflash": 1, "specforge": 1}
CONVENTIONS = tuple(_OFFSETS)

# Below this, N - 3 is no longer to the right of id 2 and the presets stop meaning anything.
_LEAST_BLOCKS = 6


class LayerError(SpecError):
    """Layer ids that this model does not have: one line, with the remedy in it."""


def preset(name: str, num_layers: int) -> tuple[int, ...]:
    """The layer ids of a preset for a model of N = `num_layers` blocks, rising.

    speculators: [2, N//2, N-3, N], the default of the speculators trainer.
    dflash: z-lab's round(linspace(1, N-3, 5)), converted, plus N.
    Where N is small, ids that fall together are named once, so the list is shorter. Raises LayerError below 6 blocks.
    """
    if name not in PRESETS:
        raise LayerError(f"layers: no preset is called {name!r}; use {' or '.join(PRESETS)}, or layer ids")
    if num_layers < _LEAST_BLOCKS:
        raise LayerError(
            f"layers: the preset {name!r} needs a model of at least {_LEAST_BLOCKS} blocks, not {num_layers}; "
            f"name the layer ids, each from 0 to {num_layers}"
        )
    if name == "speculators":
        ids = {2, num_layers // 2, num_layers - 3, num_layers}
    else:
        step = (num_layers - 4) / 4
        ids = {*to_trainer((round(1 + i * step) for i in range(5)), "dflash", num_layers), num_layers}
    return tuple(sorted(ids))


def layer_ids(layers: str | Iterable[int], num_layers: int) -> tuple[int, ...]:
    """The layer ids of a preset or of a list of ids, for a model of `num_layers` blocks, rising.

    Raises LayerError for an id outside 0 to `num_layers`, for ids that do not rise, and for an empty list.
    """
    if isinstance(layers, str):
        return preset(layers, num_layers)
    ids = tuple(layers)
    _in_range(ids, num_layers)
    if not ids or list(ids) != sorted(set(ids)):
        raise LayerError(f"layers: the ids must rise and not repeat, not {list(ids)}")
    return ids


def to_trainer(numbers: Iterable[int], convention: str, num_layers: int) -> tuple[int, ...]:
    """A convention's layer numbers as the trainer's ids. Raises LayerError."""
    offset = _offset(convention)
    ids = tuple(number + offset for number in numbers)
    _in_range(ids, num_layers, offset, convention)
    return ids


def from_trainer(ids: Iterable[int], convention: str, num_layers: int) -> tuple[int, ...]:
    """The trainer's ids as a convention's layer numbers.

    Raises LayerError; also for id 0, the embeddings, in a convention that numbers only blocks.
    """
    offset = _offset(convention)
    ids = tuple(ids)
    _in_range(ids, num_layers)
    if offset and 0 in ids:
        raise LayerError(f"layers: id 0, the embeddings, has no number in {convention}'s convention; leave it out")
    return tuple(k - offset for k in ids)


def _offset(convention: str) -> int:
    if convention not in _OFFSETS:
        raise LayerError(f"layers: no convention is called {convention!r}; use one of {', '.join(CONVENTIONS)}")
    return _OFFSETS[convention]


def _in_range(ids: tuple[int, ...], num_layers: int, offset: int = 0, convention: str = "") -> None:
    """Refuses ids outside the model, named as the user wrote them."""
    # A convention that numbers blocks starts at its own 0, which is id 1.
    least = 1 if offset else 0
    for k in ids:
        if not least <= k <= num_layers:
            whose = f" in {convention}'s numbering" if convention else ""
            raise LayerError(
                f"layers: id {k - offset} is not in a model of {num_layers} blocks: "
                f"use ids from {least - offset} to {num_layers - offset}{whose}"
            )
