"""How long the samples of a dataset are, and how much of them is supervised."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

_QUANTILES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


class Statistics:
    """Two numbers are kept of each sample; `to_json` makes the figures of them all."""

    def __init__(self) -> None:
        self._tokens = array("L")
        self._supervised = array("L")

    def add(self, tokens: int, supervised: int) -> None:
        self._tokens.append(tokens)
        self._supervised.append(supervised)

    def to_json(self) -> dict[str, Any]:
        """lengths, supervised: tokens a sample (min, p10, p50, p90, p99, max, mean). supervised_share: of a sample's tokens.

        histogram: samples of at most so many tokens and of more than the bucket before, with their supervised share.
        """
        shares = array("d", (part / whole for part, whole in zip(self._supervised, self._tokens, strict=True)))
        return {
            "lengths": _figures(self._tokens, 1),
            "supervised": _figures(self._supervised, 1),
            "supervised_share": _figures(shares, 4),
            "histogram": self._histogram(),
        }

    def _histogram(self) -> list[dict[str, Any]]:
        """Powers of two from the shortest sample's to the longest's."""
        if not self._tokens:
            return []
        edges = [1 << power for power in range((max(self._tokens) - 1).bit_length() + 1)]
        samples, tokens, supervised = ([0] * len(edges) for _ in range(3))
        for length, part in zip(self._tokens, self._supervised, strict=True):
            bucket = bisect_left(edges, length)
            samples[bucket] += 1
            tokens[bucket] += length
            supervised[bucket] += part
        first = next(i for i, number in enumerate(samples) if number)
        return [
            {
                "to": edges[i],
                "samples": samples[i],
                "tokens": tokens[i],
                "supervised_share": round(supervised[i] / tokens[i], 4) if tokens[i] else None,
            }
            for i in range(first, len(edges))
        ]


def _figures(values: array[Any], digits: int) -> dict[str, float]:
    """Quantiles are values that occur: the smallest that so large a part of all does not exceed."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    found = {name: ordered[min(last, int(share * len(ordered)))] for name, share in _QUANTILES.items()}
    named = {"min": ordered[0], **found, "max": ordered[last]}
    rounded = {name: round(value, digits) if isinstance(value, float) else value for name, value in named.items()}
    return {**rounded, "mean": round(sum(ordered) / len(ordered), digits)}
