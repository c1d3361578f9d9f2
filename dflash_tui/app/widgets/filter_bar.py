"""The line that `/` opens: it narrows what is shown while one types."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class FilterBar(Input):
    """Hidden until asked for. Enter keeps the filter and leaves the line, Escape takes the filter away."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear_filter", "Clear the filter", show=False)]

    class FilterChanged(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Left(Message):
        """The line gives the keyboard back."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(placeholder="filter: any part of a name; Enter keeps it, Esc clears it", compact=True, id=id)
        self.display = False

    def open(self) -> None:
        self.display = True
        self.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.FilterChanged(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.display = bool(self.value)
        self.post_message(self.Left())

    def action_clear_filter(self) -> None:
        self.value = ""
        self.display = False
        self.post_message(self.Left())
