"""What the processes of an orphaned job hold, as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Stray


def held(*strays: Stray) -> str:
    """ "70.0 GiB of GPU memory, 1.2 GiB of memory" of these together; what is not known is left out, "" where nothing is."""
    parts = [
        (_sum([stray.gpu_bytes for stray in strays]), "of GPU memory"),
        (_sum([stray.memory_bytes for stray in strays]), "of memory"),
    ]
    return ", ".join(f"{fmt.size(value)} {what}" for value, what in parts if value is not None)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
