"""Which GPUs a job takes: one line a card, with what is going on on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from dflash_tui.app.widgets.rows import Cell, Row, RowsView, cell
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Gpu
from dflash_tui.fleet.state import gpu_key


class GpuChoice(RowsView):
    """Cards to tick with Space; what is ticked stays so while readings change. A card that cannot be read cannot be taken."""

    CLICKS_TO_CHOOSE = 1
    BINDINGS: ClassVar[list[BindingType]] = [Binding("space,enter", "choose", "Tick", show=False)]

    class Ticked(Message):
        """Other cards are ticked than before."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._cards: dict[str, Gpu] = {}
        self._ticked: set[str] = set()

    def show(self, gpus: Sequence[Gpu]) -> None:
        """Shows these cards; draws those that changed, and no other."""
        before, self._cards = self._cards, {gpu_key(gpu): gpu for gpu in gpus}
        self.set_rows(self._cards)
        self.refresh_rows(key for key, gpu in self._cards.items() if before.get(key) != gpu)
        if self._ticked - self._cards.keys():
            self._ticked &= self._cards.keys()
            self.post_message(self.Ticked())

    def clear(self) -> None:
        """Takes every tick away: another node's cards are to be shown."""
        self._ticked.clear()

    @property
    def ticked(self) -> tuple[str, ...]:
        """UUIDs (the index of a card without one), in the order of the cards."""
        return tuple(key for key in self._cards if key in self._ticked)

    def selectable(self, row: Row) -> bool:
        gpu = self._cards.get(row) if isinstance(row, str) else None
        return gpu is not None and gpu.error is None

    def action_choose(self) -> None:
        """Ticks the card under the cursor, or takes its tick away."""
        if isinstance(self.cursor, str):
            self._ticked ^= {self.cursor}
            self.refresh_rows([self.cursor])
            self.post_message(self.Ticked())

    def draw_row(self, row: Row, width: int) -> Sequence[Cell]:
        gpu = self._cards.get(row) if isinstance(row, str) else None
        if gpu is None:
            return ()
        name = (gpu.name or fmt.NOT_AVAILABLE).removeprefix("NVIDIA ")
        if gpu.error:
            return (cell(f" -  {gpu.index} {name}: {gpu.error}", width, "bad"),)
        tick = "[x]" if row in self._ticked else "[ ]"
        use = (
            f"{fmt.percent(gpu.utilisation_percent)} busy, {fmt.size_of(gpu.memory_used_bytes, gpu.memory_total_bytes)}"
        )
        count = len(gpu.processes or ())
        processes = "" if gpu.processes is None else f", {count} process" + ("" if count == 1 else "es")
        return (
            cell(f"{tick} {gpu.index} {name}", min(24, width), "strong"),
            cell(f"  {use}{processes}", max(0, width - 24)),
        )
