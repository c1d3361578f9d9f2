"""Samples -> packs of at most N tokens, no padding. Loads no torch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, islice

# Samples looked at together: enough to fill packs to the brim, few enough that packs keep to the dataset's order.
WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Pack:
    """Samples laid end to end in one sequence of `tokens` tokens.

    rows: their rows in the whole dataset, rising.
    lengths: tokens of each, in the order of `rows`.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where each sample starts, and the end: sample i is tokens [cu_seqlens[i], cu_seqlens[i + 1])."""
        return (0, *accumulate(self.lengths))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def pack_samples(samples: Iterable[tuple[int, int]], max_tokens: int, window: int = WINDOW) -> list[Pack]:
    """Packs of (row, tokens) pairs, each row in exactly one; the same samples give the same packs.

    A pack holds at most `max_tokens` tokens, except that a longer sample goes alone. Within each window of samples the
    fullest pack that a sample fits into takes it, longest samples first (best fit decreasing); a window's emptiest pack is
    opened again in the next. Raises ValueError for a sample without tokens and for a row named twice.
    """
    if max_tokens < 1 or window < 1:
        raise ValueError(f"max_tokens and window must be at least 1, not {max_tokens} and {window}")
    rest = iter(samples)
    seen: set[int] = set()
    packs: list[Pack] = []
    left_over: Pack | None = None
    while chunk := list(islice(rest, window)):
        for row, length in chunk:
            if length < 1:
                raise ValueError(f"row {row} has {length} tokens; a sample needs at least one")
            if row in seen:
                raise ValueError(f"row {row} is named twice")
            seen.add(row)
        if left_over is not None:
            chunk += zip(left_over.rows, left_over.lengths, strict=True)
        full = _best_fit(chunk, max_tokens)
        left_over = min(full, key=lambda pack: (pack.tokens, pack.rows))
        packs += (pack for pack in full if pack is not left_over)
    return packs if left_over is None else [*packs, left_over]


def _best_fit(samples: list[tuple[int, int]], max_tokens: int) -> list[Pack]:
    """One window's packs, ordered by their first row."""
    # Room left in each pack, with the pack's number; sorted, so that the tightest fit is one bisection away.
    room: list[tuple[int, int]] = []
    packs: list[list[tuple[int, int]]] = []
    for row, length in sorted(samples, key=lambda sample: (-sample[1], sample[0])):
        where = bisect.bisect_left(room, (length, -1))
        if where == len(room):
            packs.append([(row, length)])
            left, number = max_tokens - length, len(packs) - 1
        else:
            left, number = room.pop(where)
            packs[number].append((row, length))
            left -= length
        if left > 0:
            bisect.insort(room, (left, number))
    ordered = [tuple(zip(*sorted(pack), strict=True)) for pack in packs]
    return sorted((Pack(rows, lengths) for rows, lengths in ordered), key=lambda pack: pack.rows)
