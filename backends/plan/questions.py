"""The answers to `backends.questions`: what the backends can do with a model, and what a vLLM accepts. Loads no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from backends import hub
from backends.environment import (
    cards_by_uuid,
    cuda_of_driver,
    device_of,
    require_packages,
    torchvision_warnings,
    versions,
)
from backends.errors import JobError
from backends.hf.families import model_shape, read_config
from backends.hf.kernels import expected_packing, fla_version
from backends.hubname import wanted_model
from backends.limits import limit
from backends.questions import CapabilitiesSpec, VllmOptionsSpec
from backends.spec import ExtractSpec
from backends.vllm.compat import can_extract
from backends.vllm.found import Found, environments, find_vllm, look
from backends.vllm.options import serve_options

Cards = Mapping[str, tuple[int, int]]

_ASK_S = 60.0


def capabilities(spec: CapabilitiesSpec) -> tuple[dict[str, Any], list[str]]:
    """The facts and warnings of the answer. Raises JobError where config.json cannot be had, or GPUs are named that are not there.

    `hf` and each of `vllm` have `ok` (null: not known), `why`, `remedy`, `warnings`; a vLLM has its verdict's other fields and what is
    beside it; `unusable` are Pythons that were named or made for a vLLM and do not answer.
    """
    # Nothing is taken: all cards may be looked at, also those that a job holds.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    folder, warnings = _folder(spec.model)
    config = read_config(folder)
    cards = _cards(spec)
    found, unusable = _vllms(spec)
    hf, refused = _hf(spec, config, folder, cards)
    # The best first; of equals the newest, as they were found.
    order = {True: 0, None: 1, False: 2}
    return {
        "model": spec.model,
        "family": config.get("model_type"),
        "dtype": spec.dtype,
        "tensor_parallel": spec.tensor_parallel,
        "gpus": [list(card) for card in cards.values()],
        "driver_cuda": list(cuda_of_driver() or ()) or None,
        "hf": hf,
        "vllm": sorted((_vllm(spec, config, one, cards, refused) for one in found), key=lambda one: order[one["ok"]]),
        "unusable": unusable,
    }, warnings


def _folder(model: str) -> tuple[Path, list[str]]:
    """The folder that has the model's config.json, fetched from the hub where that is meant."""
    name = wanted_model(model)
    if name is None:
        return Path(os.path.expanduser(model)), []
    require_packages()
    snapshot = hub.stoppable(lambda: hub.locate(name, weights=False), lambda: False, name, limit_s=_ASK_S)
    if "config.json" in snapshot.missing():
        fetch = ["config.json"]
        hub.stoppable(lambda: hub.fetch_small(snapshot, fetch), lambda: False, name, limit_s=_ASK_S)
    return snapshot.folder, [snapshot.note] if snapshot.note else []


def _cards(spec: CapabilitiesSpec) -> Cards:
    """The chosen cards. Raises JobError."""
    if spec.device == "cpu":
        return {}
    shown = cards_by_uuid()
    if not shown and (spec.gpus or spec.device == "cuda"):
        raise JobError("no CUDA device is visible on this machine", "choose device cpu, or a node with CUDA")
    uuids = list(shown)
    chosen = []
    for name in spec.gpus:
        uuid = uuids[int(name)] if name.isdecimal() and int(name) < len(uuids) else name
        if uuid not in shown:
            raise JobError(f"there is no GPU {name}: this node has {len(uuids)}", f"choose 0 to {len(uuids) - 1}")
        chosen.append(uuid)
    if shown and spec.tensor_parallel > len(chosen or uuids):
        raise JobError(
            f"tensor_parallel {spec.tensor_parallel} takes so many GPUs, and there are {len(chosen or uuids)}",
            "choose a smaller one",
        )
    return {uuid: shown[uuid] for uuid in chosen or uuids}


def _hf(
    spec: CapabilitiesSpec, config: Mapping[str, Any], folder: Path, cards: Cards
) -> tuple[dict[str, Any], JobError | None]:
    """The hf backend of this Python; and why no extraction is planned for this model, whichever the backend."""
    answer: dict[str, Any] = {"ok": False, "why": "", "remedy": "", "warnings": []}
    about = {"versions": {**versions(), "flash-linear-attention": fla_version()}}
    try:
        shape = model_shape(config, folder)
    except JobError as error:
        return {**answer, "why": error.message, "remedy": error.remedy, **about}, error
    try:
        require_packages()
        device = device_of(ExtractSpec(model=spec.model, dataset="-", output="-", dtype=spec.dtype, gpus=tuple(cards)))
    except JobError as error:
        return {**answer, "why": error.message, "remedy": error.remedy, **about}, None
    packing, slow = expected_packing(shape, device, spec.dtype)
    most = limit(spec.dtype, shape.num_layers)
    return {
        **answer,
        "ok": True,
        "why": f"the family {shape.family} is known, {shape.num_layers} blocks; on the {'GPU' if cards else 'CPU'} in {packing}",
        "warnings": [*slow, *torchvision_warnings()],
        "packing": packing,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        # What `verify --recompute` lets the last layer be off, relative; the first ones less.
        "error_limit": most,
        **about,
    }, None


def _vllm(
    spec: CapabilitiesSpec, config: Mapping[str, Any], found: Found, cards: Cards, refused: JobError | None
) -> dict[str, Any]:
    verdict = can_extract(
        config,
        found.version,
        missing=found.missing,
        torch=found.torch,
        cuda=found.cuda,
        driver=cuda_of_driver(),
        gpus=tuple(cards.values()),
        tensor_parallel=spec.tensor_parallel,
        dtype=spec.dtype,
    )
    if refused is not None and verdict.ok is not False:
        # What a vLLM may be able to do helps nobody whose launch is refused.
        verdict = replace(verdict, ok=False, why=f"extract refuses it: {refused.message}", remedy=refused.remedy)
    return {**asdict(found), "missing": list(found.missing), **verdict.to_json()}


def _vllms(spec: CapabilitiesSpec) -> tuple[list[Found], list[dict[str, str]]]:
    """Every vLLM of this node: those that were named, those that setup made, the one of this Python; and who does not answer."""
    found: dict[str, Found] = {}
    unusable = []
    for python in [*spec.vllm_pythons, *environments()]:
        try:
            one = find_vllm(python)
        except JobError as error:
            unusable.append({"python": python, "why": error.message, "remedy": error.remedy})
        else:
            found.setdefault(one.python, one)
    own = look(sys.executable)
    if own is not None:
        found.setdefault(own.python, own)
    return list(found.values()), unusable


def vllm_options(spec: VllmOptionsSpec) -> dict[str, Any]:
    """python, version, options (those that fit the words), and `all`: how many there are. Raises JobError."""
    found = find_vllm(spec.vllm_python)
    options = serve_options(found, spec.limit_s)
    fitting = [option.to_json() for option in options if option.has(spec.words)]
    return {"python": found.python, "version": found.version, "all": len(options), "options": fitting}
