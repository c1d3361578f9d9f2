"""Whether two output folders can be compared. Loads no torch."""

from __future__ import annotations

from typing import Any

from backends.environment import require_packages, versions
from backends.plan.output import check_output
from backends.spec import ParitySpec


def plan_parity(spec: ParitySpec) -> tuple[dict[str, Any], list[str]]:
    require_packages()
    from backends.parity import open_pair

    pair = open_pair(spec)
    check_output(pair.output)
    (_, before), (_, now) = pair.dtypes
    return {
        "samples": len(pair.rows),
        "tokens": pair.tokens,
        "bytes_to_read": pair.bytes,
        "layer_ids": pair.layer_ids,
        "reference_dtype": before,
        "output_dtype": now,
        "limits": [round(pair.limit(layer_id), 4) for layer_id in pair.layer_ids],
        "versions": versions(),
    }, []
