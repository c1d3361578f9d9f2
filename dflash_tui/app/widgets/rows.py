"""A list of lines of which only the visible ones are drawn: a fleet of 64 nodes costs what one screen of it costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dflash_tui.fleet.format import one_line

Row = Hashable
Cell = tuple[str, str]  # text, and the name of a style or ""


def cell(text: str, width: int, style: str = "", *, right: bool = False) -> Cell:
    """A text of exactly `width` columns, cut or padded; what a node wrote loses its control characters."""
    text = one_line(text)
    return (set_cell_size(text.rjust(width) if right else text, width), style)


# Without Textual's own keys: of those the ones that are not here go sideways, and no row is wider than the screen.
class RowsView(ScrollView, can_focus=True, inherit_bindings=False):
    """Shows rows, one a line, with a cursor that stays on its row when others come and go.

    A subclass says by `draw_row` how; a row is any hashable value that names what stands on the line.
    """

    STYLES: ClassVar[tuple[str, ...]] = ("dim", "good", "warn", "bad", "accent", "strong")
    CLICKS_TO_CHOOSE: ClassVar[int] = 2
    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--cursor", *(f"rows--{name}" for name in STYLES)}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "edge(-1)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]

    class Moved(Message):
        """The cursor stands on another row, or on none."""

        def __init__(self, view: RowsView, row: Row | None) -> None:
            super().__init__()
            self.view = view
            self.row = row

        @property
        def control(self) -> RowsView:
            return self.view

    class Chosen(Moved):
        """The user asked for more of the row (Enter, or a second click)."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: tuple[Row, ...] = ()
        self._places: dict[Row, int] = {}
        self._cursor: Row | None = None
        self._row_styles: dict[str, Style] = {}

    # What a subclass says.

    def draw_row(self, row: Row, width: int) -> Sequence[Cell]:
        """The line of a row, in cells that add up to at most `width` columns; the row's own text where a subclass says no other."""
        return (cell(str(row), width),)

    def selectable(self, row: Row) -> bool:
        """Whether the cursor may stand on the row."""
        return True

    # What a screen asks.

    @property
    def rows(self) -> tuple[Row, ...]:
        return self._rows

    @property
    def cursor(self) -> Row | None:
        return self._cursor

    def set_rows(self, rows: Iterable[Row]) -> None:
        """Shows other rows. The cursor keeps its row; where that is gone it goes to the one at its place."""
        rows = tuple(rows)
        if rows == self._rows:
            return
        place = self._places.get(self._cursor, 0) if self._cursor is not None else 0
        self._rows = rows
        self._places = {row: number for number, row in enumerate(rows)}
        self._resize_content()
        if self._cursor not in self._places:
            self._set_cursor(self._nearest(place))
        self.refresh(layout=self.styles.is_auto_height)

    def refresh_rows(self, rows: Iterable[Row]) -> None:
        """Draws these rows anew, those of them that are visible."""
        first = self.scroll_offset.y
        last = first + self.scrollable_content_region.height
        for row in rows:
            place = self._places.get(row)
            if place is not None and first <= place < last:
                self.refresh_line(place)

    def move_to(self, row: Row) -> None:
        """Puts the cursor on a row and brings it into view."""
        if row in self._places and self.selectable(row):
            self._set_cursor(row)

    # Drawing.

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        base = self.rich_style
        place = y + self.scroll_offset.y
        if not 0 <= place < len(self._rows):
            return Strip.blank(width, base)
        row = self._rows[place]
        here = row == self._cursor and self.selectable(row)
        mark = "▌ " if here else "  "
        segments = [Segment(mark, base)]
        for text, name in self.draw_row(row, max(0, width - len(mark))):
            segments.append(Segment(text, base + self._style(name) if name else base))
        strip = Strip(segments).adjust_cell_length(width, base)
        return strip.apply_style(self._style("cursor")) if here and self.has_focus else strip

    def _style(self, name: str) -> Style:
        style = self._row_styles.get(name)
        if style is None:
            style = self.get_component_rich_style(f"rows--{name}", partial=True)
            if style.color is not None:
                # Without its background a colour that is "auto" would come out white, on a light ground too.
                style += Style(color=self.get_component_rich_style(f"rows--{name}").color)
            self._row_styles[name] = style
        return style

    def notify_style_update(self) -> None:
        self._row_styles.clear()
        super().notify_style_update()

    # Moving.

    def action_move(self, by: int) -> None:
        self._set_cursor(self._nearest(self._place() + by, by))

    def action_page(self, by: int) -> None:
        self._set_cursor(self._nearest(self._place() + by * max(1, self.scrollable_content_region.height - 1), by))

    def action_edge(self, by: int) -> None:
        self._set_cursor(self._nearest(0 if by < 0 else len(self._rows) - 1, -by))

    def action_choose(self) -> None:
        if self._cursor is not None:
            self.post_message(self.Chosen(self, self._cursor))

    def on_click(self, event: events.Click) -> None:
        place = event.y + self.scroll_offset.y
        if 0 <= place < len(self._rows) and self.selectable(self._rows[place]):
            self._set_cursor(self._rows[place])
            if event.chain >= self.CLICKS_TO_CHOOSE:
                self.action_choose()

    def on_resize(self) -> None:
        self._resize_content()

    def _resize_content(self) -> None:
        self.virtual_size = Size(0, len(self._rows))

    def _place(self) -> int:
        return self._places.get(self._cursor, 0) if self._cursor is not None else 0

    def _nearest(self, place: int, step: int = 1) -> Row | None:
        """The selectable row at `place`, else the next one in the direction of `step`, else the one before."""
        if not self._rows:
            return None
        place = min(max(place, 0), len(self._rows) - 1)
        step = 1 if step >= 0 else -1
        ahead = range(place, len(self._rows) if step > 0 else -1, step)
        behind = range(place, -1 if step > 0 else len(self._rows), -step)
        candidates = (self._rows[number] for number in (*ahead, *behind))
        return next((row for row in candidates if self.selectable(row)), None)

    def _set_cursor(self, row: Row | None) -> None:
        if row == self._cursor:
            return
        before, self._cursor = self._cursor, row
        self.refresh_rows([name for name in (before, row) if name is not None])
        if row is not None:
            self._show(self._places[row])
        self.post_message(self.Moved(self, row))

    def _show(self, place: int) -> None:
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        if height <= 0:
            return
        if place < top:
            # A heading that the cursor cannot stand on comes into view with the first row under it.
            heading = place if place == 0 or self.selectable(self._rows[place - 1]) else place - 1
            self.scroll_to(y=heading, animate=False)
        elif place >= top + height:
            self.scroll_to(y=place - height + 1, animate=False)
