"""One line at the bottom of a screen that asks for a text: what to look for, which line, which file."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input

SEARCH = "look for a regular expression; n next, N before"


class PromptBar(Input):
    """Hidden until it asks. Enter gives the text, Escape leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    class Given(Message):
        """The user's answer to the question `what`."""

        def __init__(self, what: str, text: str) -> None:
            super().__init__()
            self.what = what
            self.text = text

    class Left(Message):
        """The line gives the keyboard back."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(compact=True, id=id)
        self.display = False
        self.what = ""

    def ask(self, what: str, placeholder: str, text: str = "") -> None:
        """Asks a question, with a text to begin with."""
        self.what, self.placeholder, self.value = what, placeholder, text
        self.cursor_position = len(text)
        self.display = True
        # At once: `focus` comes a little later, and what is typed meanwhile would be taken for keys of the screen.
        self.screen.set_focus(self)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Given(self.what, event.value))

    def action_leave(self) -> None:
        self.display = False
        self.post_message(self.Left())
