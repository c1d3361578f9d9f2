"""Showing a text only where it is another one: a Static that is updated is laid out and drawn anew, same text or not."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


def put(static: Static, text: Content) -> None:
    """Shows `text`; lays the screen out anew only where it takes other lines than before."""
    before = static.content
    if not isinstance(before, Content):
        static.update(text)
    elif not before.is_same(text):
        static.update(text, layout=_widths(before) != _widths(text))


def _widths(text: Content) -> list[int]:
    return [line.cell_length for line in text.split("\n", allow_blank=True)]
