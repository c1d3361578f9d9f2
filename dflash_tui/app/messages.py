"""What happened, as the screens are told of it."""

from __future__ import annotations

from textual.message import Message

from dflash_tui.fleet.facts import LogArrived
from dflash_tui.fleet.state import Fleet


class FleetChanged(Message):
    """The fleet is another one than it was. A newer message replaces one that was not handled yet."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, FleetChanged)


class LogReceived(Message):
    """Bytes of a followed file arrived; each one counts, so none replaces another."""

    def __init__(self, fact: LogArrived) -> None:
        super().__init__()
        self.fact = fact
