"""What is known of float8 with a model and its layers, before days are spent on it. Loads no torch.

An extraction to float8 leaves `fp8.json` in its folder, `parity` leaves `parity.json`; both name the model and the layers.
Those of the output folder and of its neighbours are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from backends import flattening
from backends.fp8 import FLOAT8

PARITY = "parity.json"
# Neighbours that are looked at at most: a folder of a hundred thousand is no shelf of extractions.
_NEIGHBOURS = 500

UNKNOWN = (
    "how well float8 keeps these layers of this model is not known yet: the extraction measures it and warns; to know it"
    " before, extract 32 samples (--last 32) with and without --fp8, then `dflash-tui parity FOLDER FP8_FOLDER`"
)
# vLLM quantises before anything is written, so that nobody here sees what is lost.
UNKNOWN_BY_VLLM = (
    "how well float8 keeps these layers of this model is not known, and an extraction by vLLM does not measure it: extract 32"
    " samples (--last 32) with and without --fp8, then `dflash-tui parity FOLDER FP8_FOLDER`"
)


@dataclass(frozen=True, slots=True)
class Known:
    """A measurement. errors: by layer id; over: the layers beyond their limit."""

    source: Path
    tokens: int
    errors: dict[int, float]
    over: tuple[int, ...]

    def facts(self) -> dict[str, Any]:
        worst = max(self.errors, key=self.errors.__getitem__)
        return {
            "float8_worst_error": self.errors[worst],
            "float8_worst_layer_id": worst,
            "float8_measured_tokens": self.tokens,
        }

    def warning(self) -> str | None:
        """One line that names the layers; None where all are well."""
        if not self.over:
            return None
        named = ", ".join(f"{layer_id} (relative error {self.errors[layer_id]:.2g})" for layer_id in self.over)
        return (
            f"float8 flattens layer ids {named} of this model, as {self.source} tells of {self.tokens:,} tokens:"
            f" {flattening.REMEDY}"
        )


def float8_known(output: Path, header: Mapping[str, Any]) -> Known | None:
    """The measurement on the most tokens for the model and the layers of a header, None where there is none."""
    found = [known for folder in _folders(output) for known in _of(folder, header)]
    return max(found, key=lambda known: known.tokens, default=None)


def _folders(output: Path) -> Iterator[Path]:
    yield output
    try:
        with os.scandir(output.parent) as entries:
            first = islice(entries, _NEIGHBOURS)
            neighbours = sorted(Path(entry.path) for entry in first if entry.is_dir() and entry.name != output.name)
    except OSError:
        return
    yield from neighbours


def _of(folder: Path, header: Mapping[str, Any]) -> Iterator[Known]:
    wanted = {name: header[name] for name in ("model_fingerprint", "layer_ids")}
    measured = flattening.load(folder / flattening.FILE)
    if measured is not None and {name: measured.bound[name] for name in wanted} == wanted:
        errors = {layer_id: round(error, 6) for layer_id, error in measured.errors().items()}
        yield Known(folder / flattening.FILE, measured.tokens, errors, tuple(measured.flattened()))
    try:
        data = json.loads((folder / PARITY).read_bytes())
        float8 = [data[side]["file_dtype"] == FLOAT8 for side in ("reference_format", "output_format")]
        if float8.count(True) == 1 and {name: data[name] for name in wanted} == wanted:
            layers = {int(layer_id): item for layer_id, item in data["layers"].items()}
            errors = {k: max(i["relative_error"], i["relative_error_by_token"]) for k, i in layers.items()}
            over = tuple(layer_id for layer_id, item in layers.items() if not item["good"])
            yield Known(folder / PARITY, int(data["tokens"]), errors, over)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # none, or none of ours: it is only ever a hint
