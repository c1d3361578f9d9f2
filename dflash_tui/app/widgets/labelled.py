"""A label and what belongs to it, over as many lines as it takes: what goes on stands under what began."""

from __future__ import annotations

import textwrap

from textual.content import Content

from dflash_tui.fleet import format as fmt

_LEAST = 24  # columns for the text; a narrower screen gets longer lines than it has room for


def labelled(label: str, text: str, *, label_width: int, width: int, style: str = "") -> Content:
    """The lines for `width` columns; style: of the text."""
    room = max(width - label_width, _LEAST)
    lines = textwrap.wrap(fmt.one_line(text), room, break_on_hyphens=False) or [""]
    rest = "".join(f"\n{' ' * label_width}{line}" for line in lines[1:])
    return Content.assemble((f"{label:{label_width}}", "dim"), (lines[0] + rest, style))
