"""Hidden states computed anew by the plainest forward there is, to check what a backend wrote. Shares no code with it.

Stock Transformers, float32, eager attention, one expert after the other, one sample at a time, no cache. Loads torch at once.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from backends import fp8
from backends.errors import JobError, one_line
from backends.limits import limit

# Where the norm after the last block stands in the base model of a folder.
_NORMS = {"gemma3": "language_model.norm", "qwen3_5": "language_model.norm", "qwen3_5_moe": "language_model.norm"}
_USUAL_NORM = "norm"

# What Transformers takes from a package of kernels where one is installed; beneath it is a plain function of its own.
_KERNELS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")

# Tokens that were sent to other experts are seen by those after them: so much wider is the limit of the median token.
_REROUTED = 2

# So much nearer must a float8 slot be to another id than to its own, to be of the other.
_CLEARLY = 1.1

# Attention is [heads, T, T] in float32 here. What comes later changes nothing before it, so a prefix is a fair check.
MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class SlotCheck:
    """One slot of one file against the plain forward.

    error: relative error against the claimed id. best_id: the id that the slot is closest to, of all N + 1.
    flattening: the error that the plain forward's own states get from being stored in float8 with the file's scales.
    rerouted: whether rounding may have changed the choice of experts; the error is then that of the median token.
    """

    layer_id: int
    error: float
    best_id: int
    best_error: float
    flattening: float = 0.0
    rerouted: bool = False


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
        torch.backends.cudnn.allow_tf32 = False  # convolutions have a switch of their own
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            loaded, report = AutoModel.from_pretrained(
                model,
                **_unpacking(Path(model)),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            for weight in loaded.parameters():  # those that were packed come in bfloat16
                weight.data = weight.data.float()
            self._model = loaded.to(self._device).eval()
        except (torch.OutOfMemoryError, MemoryError):
            raise _too_large(model, device) from None
        except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder.
            raise JobError(
                f"the model {model} cannot be loaded: {one_line(error)}", "see that its weights are whole"
            ) from error
        # Heads that predict further tokens (mtp) have layers of their own, which no base model holds.
        strange = {key for key in report["unexpected_keys"] if "layers." in key and not key.startswith("mtp.")}
        wrong = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"]), *strange})
        if wrong:
            raise JobError(
                f"the weights and config.json of {model} differ in {len(wrong)} tensors, such as {wrong[0]}",
                "see that both are of one model",
            )
        config = self._model.config
        norm = _NORMS.get(config.model_type, _USUAL_NORM)
        try:
            self._norm: Any = self._model.get_submodule(norm)
        except AttributeError:
            raise JobError(
                f"{type(self._model).__name__} has no final norm that is known here", "recompute 0 samples"
            ) from None
        # Whether a router sends each token to some of many experts.
        self.routed = bool(getattr(config.get_text_config(), "num_experts", 0))
        self.model = str(model)
        self.num_layers = int(config.get_text_config().num_hidden_layers)

    def states(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """The residual stream [T, H] at ids 0 to N, float32; id N is what the final norm reads. Raises JobError."""
        last: list[torch.Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._device)
        try:
            with torch.inference_mode(), _without_kernels(self._model):
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
        scales = stored["hidden_states_scales"][:MAX_TOKENS, 0] if slots.dtype is torch.float8_e4m3fn else None
        return compare(slots, self.states(token_ids.tolist()), layer_ids, scales, routed=self.routed)


def _unpacking(model: Path) -> dict[str, Any]:
    """How a model whose experts are stored in MXFP4, as gpt-oss is published, is loaded without kernels for it."""
    from transformers import Mxfp4Config

    stored = json.loads((model / "config.json").read_text(encoding="utf-8")).get("quantization_config") or {}
    return {"quantization_config": Mxfp4Config(dequantize=True)} if stored.get("quant_method") == "mxfp4" else {}


@contextmanager
def _without_kernels(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts, the modules of a model call Transformers' own PyTorch functions, whatever kernels are installed."""
    replaced = []
    for name in {type(part).__module__ for part in model.modules()}:
        names = vars(sys.modules[name])
        for function in _KERNELS:
            found = names.get(function)
            if found is not None:
                replaced.append((names, function, found))
                names[function] = inspect.unwrap(found)
    try:
        yield
    finally:
        for names, function, found in replaced:
            names[function] = found


def compare(
    slots: torch.Tensor,
    states: Sequence[torch.Tensor],
    layer_ids: Sequence[int],
    scales: torch.Tensor | None = None,
    *,
    routed: bool = False,
) -> list[SlotCheck]:
    """slots: [T, L, H] in any dtype; states: [T, H] for each id from 0 to N; scales: [T, 1], where the slots are float8.

    routed: of a model with experts. Rounding sends a token whose experts score nearly the same to other ones, in any forward
    in 16 bits: a large error at once, of a few tokens. So there the error is that of the median token, unless all is float32.
    """
    device = states[0].device
    rerouted = routed and slots.dtype is not torch.float32
    error_of = _median_error if rerouted else relative_error
    scales = None if scales is None else scales.to(device)
    checks = []
    for slot, layer_id in enumerate(layer_ids):
        stored = slots[:, slot].to(device, torch.float32)
        flattening = 0.0
        if scales is not None:
            stored = stored * scales
            # Clamped: a value that is larger than the file's largest would become NaN.
            fitted = (states[layer_id] / scales).clamp(-fp8.LARGEST, fp8.LARGEST).to(torch.float8_e4m3fn)
            flattening = relative_error(fitted.float() * scales, states[layer_id])
        errors = [error_of(stored, state) for state in states]
        best = min(range(len(errors)), key=errors.__getitem__)
        checks.append(SlotCheck(layer_id, errors[layer_id], best, errors[best], flattening, rerouted))
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


def _median_error(stored: torch.Tensor, reference: torch.Tensor) -> float:
    """|a - b| / |b| of the median token; both [T, H]."""
    size = reference.norm(dim=-1).double().clamp_min(1e-30)
    return float(((stored - reference).norm(dim=-1).double() / size).median())


def _too_large(model: str | Path, device: str) -> JobError:
    where, remedy = ("this machine's memory", "recompute on a machine with more")
    if device == "cuda":
        where, remedy = ("this GPU's memory", "recompute with the device cpu")
    return JobError(f"{model} in float32 does not fit into {where}", remedy)


def describe(checks: Sequence[SlotCheck], dtype: str, file_dtype: str = "") -> str | None:
    """What is wrong with a file, in one line; None where every slot is what it claims to be, those that are flattened aside."""
    for check in checks:
        if check.flattening > fp8.LIMIT:
            continue
        # Values that two layers share, far larger than all others, round alike in float8: neither id is then the nearer one.
        nearer = _CLEARLY if file_dtype == fp8.FLOAT8 else 1.0
        if check.best_id != check.layer_id and check.best_error * nearer < check.error:
            return (
                f"the slot of layer id {check.layer_id} holds id {check.best_id} "
                f"(relative error {check.best_error:.2g} there, {check.error:.2g} at its own)"
            )
        most = limit(dtype, check.layer_id, file_dtype) * (_REROUTED if check.rerouted else 1)
        if not check.error <= most:
            stored = f", {fp8.ROUNDOFF:.2g} of it for {file_dtype}" if file_dtype == fp8.FLOAT8 else ""
            return f"the slot of layer id {check.layer_id} is off by {check.error:.2g} (limit {most:.2g} in {dtype}{stored})"
    return None


def flattened(checks: Sequence[SlotCheck]) -> str | None:
    """The slots that float8 has flattened, in one line; None where there are none.

    Their scale, one for all layers of a token, is too large for them: stored so, the right states too would be off by more
    than rounding explains.
    """
    flat = [check for check in checks if check.flattening > fp8.LIMIT]
    if not flat:
        return None
    named = ", ".join(f"{check.layer_id} (off by {check.error:.2g})" for check in flat)
    return (
        f"float8 flattens layer ids {named}: a token's one scale is made by another layer's values, and the limit is"
        f" {fp8.LIMIT:.2g}"
    )


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
