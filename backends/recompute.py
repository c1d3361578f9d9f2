"""Hidden states computed anew by the plainest forward there is, to check what a backend wrote. Shares no code with it.

Stock Transformers, float32, eager attention, one sample at a time, no cache. Loads torch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from backends.errors import JobError, one_line

# float32: other kernels and another order of summing.
_FLOAT32_LIMIT = 1e-5
# Unit roundoff: the relative error of one rounding.
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

# Attention is [heads, T, T] in float32 here. What comes later changes nothing before it, so a prefix is a fair check.
MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class SlotCheck:
    """One slot of one file against the plain forward.

    error: relative error against the claimed id. best_id: the id that the slot is closest to, of all N + 1.
    """

    layer_id: int
    error: float
    best_id: int
    best_error: float


def limit(dtype: str, layer_id: int) -> float:
    """The largest relative error of a slot at `layer_id` that rounding to `dtype` explains.

    In 16 bits: one unit roundoff for each block, and two for the embeddings and the file, as if all went one way. Random
    models whose blocks each change the stream by half reach up to 0.55 of it (8, 36 and 64 blocks); trained ones are calmer.
    Where it is wide, late in a deep model, a fault of the whole forward shows in the early slots, and a wrong id as the best.
    """
    return _FLOAT32_LIMIT if dtype == "float32" else _ROUNDOFF[dtype] * (layer_id + 2)


class PlainForward:
    """A model folder in float32. device: "cuda" or "cpu". Raises JobError where it cannot be loaded."""

    def __init__(self, model: str | Path, device: str = "cpu") -> None:
        from transformers import AutoModel
        from transformers.utils import logging

        if not (Path(model) / "config.json").is_file():
            raise JobError(
                f"the model {model} has no config.json", "give the folder of the model that was extracted with"
            )
        if device == "cuda" and not torch.cuda.is_available():
            raise JobError("no CUDA device is available to recompute with", "use the device cpu")
        self._device = device
        # TensorFloat-32 keeps 10 bits of a product: not what a reference may do.
        torch.set_float32_matmul_precision("highest")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            loaded, report = AutoModel.from_pretrained(
                model,
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            self._model = loaded.to(self._device).eval()
        except (torch.OutOfMemoryError, MemoryError):
            raise _too_large(model, device) from None
        except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder.
            raise JobError(
                f"the model {model} cannot be loaded: {one_line(error)}", "see that its weights are whole"
            ) from error
        strange = {key for key in report["unexpected_keys"] if "layers." in key}
        wrong = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"]), *strange})
        if wrong:
            raise JobError(
                f"the weights and config.json of {model} differ in {len(wrong)} tensors, such as {wrong[0]}",
                "see that both are of one model",
            )
        self._norm: Any = getattr(self._model, "norm", None)
        if self._norm is None:
            raise JobError(f"{type(self._model).__name__} has no final norm that is known here", "recompute 0 samples")
        self.model = str(model)
        self.num_layers = int(self._model.config.num_hidden_layers)

    def states(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """The residual stream [T, H] at ids 0 to N, float32; id N is what the final norm reads. Raises JobError."""
        last: list[torch.Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._device)
        try:
            with torch.inference_mode():
                out = self._model(input_ids=ids, use_cache=False, output_hidden_states=True)
        except (torch.OutOfMemoryError, MemoryError):
            raise _too_large(self.model, self._device) from None
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):  # how torch says it of the host's memory
                raise
            raise _too_large(self.model, self._device) from None
        finally:
            hook.remove()
        return [state[0] for state in (*out.hidden_states[: self.num_layers], last[-1])]

    def check(self, path: Path, layer_ids: Sequence[int]) -> list[SlotCheck]:
        """Every slot of a hidden-state file against the forward of its own `token_ids`; the first 8,192 tokens of it."""
        stored = load_file(path)
        token_ids = stored["token_ids"][:MAX_TOKENS]
        slots = stored["hidden_states"][:MAX_TOKENS]
        return compare(slots, self.states(token_ids.tolist()), layer_ids)


def compare(slots: torch.Tensor, states: Sequence[torch.Tensor], layer_ids: Sequence[int]) -> list[SlotCheck]:
    """slots: [T, L, H] in any dtype; states: [T, H] for each id from 0 to N."""
    checks = []
    for slot, layer_id in enumerate(layer_ids):
        stored = slots[:, slot].to(states[0].device, torch.float32)
        errors = [relative_error(stored, state) for state in states]
        best = min(range(len(errors)), key=errors.__getitem__)
        checks.append(SlotCheck(layer_id, errors[layer_id], best, errors[best]))
    return checks


def relative_error(stored: torch.Tensor, reference: torch.Tensor) -> float:
    """The larger of |a - b| / |b| over all tokens together, and its mean over tokens each by itself; both [T, H].

    A few tokens of a real model are hundreds of times larger than the others; the second figure keeps them from hiding the rest.
    """
    difference = (stored - reference).norm(dim=-1).double()
    size = reference.norm(dim=-1).double()
    together = difference.norm() / size.norm().clamp_min(1e-30)
    each = (difference / size.clamp_min(1e-30)).mean()
    return float(torch.maximum(together, each))


def _too_large(model: str | Path, device: str) -> JobError:
    where, remedy = ("this machine's memory", "recompute on a machine with more")
    if device == "cuda":
        where, remedy = ("this GPU's memory", "recompute with the device cpu")
    return JobError(f"{model} in float32 does not fit into {where}", remedy)


def describe(checks: Sequence[SlotCheck], dtype: str) -> str | None:
    """What is wrong with a file, in one line; None where every slot is what it claims to be."""
    for check in checks:
        if check.best_id != check.layer_id:
            return (
                f"the slot of layer id {check.layer_id} holds id {check.best_id} "
                f"(relative error {check.best_error:.2g} there, {check.error:.2g} at its own)"
            )
        most = limit(dtype, check.layer_id)
        if not check.error <= most:
            return f"the slot of layer id {check.layer_id} is off by {check.error:.2g} (limit {most:.2g} in {dtype})"
    return None


def summary(checks: dict[int, list[SlotCheck]]) -> dict[str, Any]:
    """The worst error of all files by row, and for each layer id. checks: by row."""
    if not checks:
        return {"recomputed": 0, "recomputed_worst_error": None, "worst_row": None, "worst_error_by_layer": {}}
    worst = {row: max(check.error for check in found) for row, found in checks.items()}
    row = max(worst, key=worst.__getitem__)
    by_layer: dict[str, float] = {}
    for check in (check for found in checks.values() for check in found):
        by_layer[str(check.layer_id)] = max(check.error, by_layer.get(str(check.layer_id), 0.0))
    return {
        "recomputed": len(checks),
        "recomputed_worst_error": worst[row],
        "worst_row": row,
        "worst_error_by_layer": by_layer,
    }
