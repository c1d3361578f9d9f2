"""Colours of a source, by pygments (which rich and Textual bring along), as the colours of a log's lines.

Textual's own `highlight` gives one text of the whole file, which would be cut into lines anew at every drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import PurePosixPath

from pygments.lexers import get_lexer_for_filename
from pygments.token import Token
from pygments.util import ClassNotFound

from dflash_tui.fleet.logline import PLAIN, Span, Style

# Beyond these it takes seconds, or a screen's row takes too long to draw.
MOST_CHARACTERS = 512 * 1024
LONGEST_LINE = 2000

# The numbers are those of a terminal's colours, for which the themes have readable ones.
_STYLES = {
    Token.Comment: Style(colour=0, italic=True),
    Token.Keyword: Style(colour=5, bold=True),
    Token.Keyword.Constant: Style(colour=3),
    Token.Literal.String: Style(colour=2),
    Token.Literal.String.Doc: Style(colour=2, italic=True),
    Token.Literal.Number: Style(colour=3),
    Token.Name.Function: Style(colour=4, bold=True),
    Token.Name.Class: Style(colour=4, bold=True),
    Token.Name.Decorator: Style(colour=6),
    Token.Name.Builtin: Style(colour=6),
    Token.Name.Exception: Style(colour=1),
    Token.Name.Tag: Style(colour=4),
    Token.Name.Attribute: Style(colour=6),
    Token.Operator.Word: Style(colour=5, bold=True),
    Token.Generic.Deleted: Style(colour=1),
    Token.Generic.Inserted: Style(colour=2),
    Token.Generic.Heading: Style(colour=4, bold=True),
}

Spans = tuple[Span, ...]


def highlight(lines: Sequence[str], path: str) -> list[Spans] | None:
    """The colours of each line; None where the file's name tells no language or it is too large."""
    if sum(map(len, lines)) > MOST_CHARACTERS or max(map(len, lines), default=0) > LONGEST_LINE:
        return None
    try:
        lexer = get_lexer_for_filename(PurePosixPath(path).name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None
    painted: list[list[Span]] = [[] for _ in lines]
    row, column = 0, 0
    for kind, value in lexer.get_tokens("\n".join(lines)):
        style = _style(kind)
        for number, part in enumerate(value.split("\n")):
            if number:
                row, column = row + 1, 0
            if part and style is not PLAIN and row < len(painted):
                painted[row].append(Span(column, column + len(part), style))
            column += len(part)
    return [tuple(spans) for spans in painted]


@cache
def _style(kind: object) -> Style:
    """That of a token, else of the kind above it."""
    while kind is not None:
        if kind in _STYLES:
            return _STYLES[kind]
        kind = getattr(kind, "parent", None)
    return PLAIN
