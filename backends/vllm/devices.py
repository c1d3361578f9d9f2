"""How a vLLM is told which cards are its own. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

from backends.environment import cards_by_uuid
from backends.errors import JobError
from backends.vllm.compat import version_of

# 0.20.1 takes what it is given for a number (int() in its platforms/interface.py); 0.26.0 takes UUIDs, both tried on an H200.
_UUIDS_FROM = (0, 26)


def visible(gpus: Sequence[str], version: str) -> str:
    """CUDA_VISIBLE_DEVICES for these UUIDs: themselves, or their places in the order of the bus. Raises JobError.

    The places are those among all cards of the machine, so what this process was told of its own is forgotten first.
    """
    if (version_of(version) or (0,)) >= _UUIDS_FROM:
        return ",".join(gpus)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    places = list(cards_by_uuid())
    for uuid in gpus:
        if uuid not in places:
            raise JobError(
                f"the driver shows no GPU {uuid}", "choose one that is there, or see whether it fell off the bus"
            )
    return ",".join(str(places.index(uuid)) for uuid in gpus)
