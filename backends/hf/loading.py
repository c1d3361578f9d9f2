"""The text model of a folder, as the hf backend runs it. Loads torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from backends.errors import JobError, one_line
from backends.hf.attention import ATTENTION
from backends.hf.capture import keep_blocks
from backends.hf.families import FAMILIES, read_config

# Where a wrapper keeps its text model: "model.language_model." now, "language_model.model." in older folders.
_TEXT_PART = {r"^(model\.)?language_model\.(model\.)?": ""}
# A block of the text model, wherever it stands; those of a vision tower or of extra prediction heads are none of ours.
_TEXT_BLOCK = re.compile(r"^(model\.)?(language_model\.)?(model\.)?layers\.")


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, layer_ids: Sequence[int]) -> nn.Module:
    """The base model of a folder, in eval mode, cut after the last wanted layer: of a wrapper, its text part alone.

    Nothing is downloaded. Raises JobError.
    """
    from transformers import AutoConfig, AutoModel, Mxfp4Config
    from transformers.utils import logging

    # Its bars and its report of tensors that a base model does not need would bury the log.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    wrapper = FAMILIES[read_config(folder)["model_type"]].text is not None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        packed = getattr(config, "quantization_config", None) is not None
        model, info = AutoModel.from_pretrained(
            folder,
            # The one packed format of the table: `model_shape` refuses all others.
            **({"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}),
            config=config.get_text_config() if wrapper else config,
            key_mapping=_TEXT_PART if wrapper else None,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        broken = ", ".join(_broken(folder))
        remedy = f"fetch {broken} again" if broken else "check its files"
        raise JobError(f"the model {folder} cannot be loaded: {one_line(error)}", remedy) from error
    _refuse_misfits(folder, info)
    keep_blocks(model, layer_ids)
    if packed:
        # Weights that are unpacked come in bfloat16, those beside them as they are stored.
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)
    moved: nn.Module = model.to(device).eval().requires_grad_(False)
    return moved


def _broken(folder: Path) -> list[str]:
    """The weights files that are not whole: the error of loading names none of them."""
    names = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError):
            names.append(path.name)
    return names


def _refuse_misfits(folder: Path, info: dict[str, Any]) -> None:
    """Raises JobError where weights and config.json are not of one model.

    Transformers fills what is missing or of another shape with random numbers, and leaves out what the config does not know.
    """
    misfits = {
        "lack": info["missing_keys"],
        "have another shape than config.json says in": (key[0] for key in info["mismatched_keys"]),
        # A head is not needed; a bias or a block that is left out makes other states.
        "hold, unknown to config.json,": (key for key in info["unexpected_keys"] if _TEXT_BLOCK.match(key)),
    }
    for what, keys in misfits.items():
        names = sorted(keys)
        if names:
            raise JobError(
                f"the weights in {folder} {what} {len(names)} tensors, {names[0]} first",
                "fetch the model again, config.json and weights together",
            )
