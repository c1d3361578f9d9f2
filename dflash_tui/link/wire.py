"""Values off the wire as Python's: what is not of the kind that was asked for is None, and text is fit for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# Control characters, marks that turn the direction of writing, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BLANK = re.compile("[\t\n\r\x0b\x0c\x85]+")


def clean(value: object) -> str | None:
    """Text fit for one line of a terminal, or None where `value` is no text."""
    return _CONTROL.sub("", _BLANK.sub(" ", value)) if isinstance(value, str) else None


def clean_tree(value: Any) -> Any:
    """A JSON value with every text in it cleaned and every number finite."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [clean_tree(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(name)): clean_tree(item) for name, item in value.items()}
    return value


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object) -> int | None:
    found = number(value)
    return None if found is None or found != int(found) else int(value)  # type: ignore[call-overload]  # `number` took it; as a float it may lose digits


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def truth(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
