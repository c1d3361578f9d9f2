"""A vLLM server that runs already: which of its models is the job's, and what plan says of it. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.errors import JobError
from backends.vllm.client import Served


def our_model(url: str, served: Sequence[Served], model: str, header: Mapping[str, Any]) -> Served:
    """The model of the job among those of a server. Raises JobError where it is none of them.

    It is told by its folder, by its name on the hub, or by the last part of its path.
    """
    real = os.path.realpath(model)
    names = {model, real, Path(model).name, Path(real).name, str(header.get("model_hub") or model)}
    names.add(str(header.get("model_hub") or model).rpartition("/")[2])
    for one in served:
        told = {one.root, one.id, os.path.realpath(one.root) if one.root else one.id}
        if names & (told | {Path(name).name for name in told}):
            return one
    found = ", ".join(f"{one.id}" + (f" ({one.root})" if one.root not in ("", one.id) else "") for one in served)
    raise JobError(
        f"the vLLM server at {url} serves {found or 'no model'}, not {model}", "give its model, or another URL"
    )
