"""Whether the files of an extraction can be checked, and recomputed. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.environment import device_of, require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.hf.families import read_config
from backends.spec import VerifySpec


def plan_verify(spec: VerifySpec) -> tuple[dict[str, Any], list[str]]:
    require_packages()
    from backends.store import StoreError, file_dtype, read_manifest

    try:
        manifest = read_manifest(Path(spec.output))
    except StoreError as error:
        raise JobError(str(error), "give the output folder of an extraction") from None
    facts: dict[str, Any] = {
        "samples": len(manifest.entries),
        "tokens": sum(entry.tokens for entry in manifest.entries.values()),
        "bytes_total": sum(entry.bytes for entry in manifest.entries.values()),
        "layer_ids": manifest.header["layer_ids"],
        "dtype": manifest.header["dtype"],
        "file_dtype": file_dtype(manifest.header),
        "versions": versions(),
    }
    from backends.dataset import PreparedDataset

    PreparedDataset(spec.dataset or manifest.header["dataset"])
    warnings: list[str] = []
    if spec.recompute:
        read_config(Path(spec.model or manifest.header["model"]))
        facts["device"] = device_of(spec)
        warnings = torchvision_warnings()
    return facts, warnings
