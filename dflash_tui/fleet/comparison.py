"""What a comparison found, read from JSON that a node wrote, and its figures as every place shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_tui.fleet.format import NOT_AVAILABLE


def number(value: Any) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def pair(value: Any) -> tuple[float, float] | None:
    """Two numbers, low and high."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = number(value[0]), number(value[1])
    return None if low is None or high is None else (low, high)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def left_off(result: Any, layers: Mapping[str, Any]) -> str:
    """Says that the node told of the worst layers alone; "" where it told of all."""
    ids = mapping(result).get("layer_ids")
    count = len(ids) - len(layers) if isinstance(ids, list) else 0
    return f"and {count} better layer{'s' if count > 1 else ''}: parity.json has them" if count > 0 else ""


def figure(value: float | None, missing: str = NOT_AVAILABLE) -> str:
    """A measured value with three digits, or all of them before the point: "0.0123", "8.70", "1,234"."""
    if value is None:
        return missing
    # By what is shown: 9.996 is "10.0".
    size = abs(float(f"{value:.3g}"))
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.{1 if size >= 10 else 2}f}"
    return f"{value:.3g}"
