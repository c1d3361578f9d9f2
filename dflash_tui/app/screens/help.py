"""Help for the screen that was open: a few sentences about it, and every key that does something there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Markdown, Static

KEY_WIDTH = 18


class Keys(NamedTuple):
    """The keys of one action, as they are shown, and what it does."""

    where: str
    keys: str
    what: str


class HelpScreen(ModalScreen[None]):
    """Made from the bindings that are active on `screen`, so that it cannot tell of a key that does nothing."""

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;

        & > #help {
            width: 76;
            max-width: 100%;
            height: auto;
            max-height: 100%;
            padding: 0 1;
            border: round $border;
            background: $surface;
            scrollbar-size-vertical: 1;
        }
        & #help-text {
            height: auto;
            padding: 0;
            margin: 0;
            background: $surface;
        }
        & #help-keys {
            height: auto;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close the help"),
    ]

    def __init__(self, screen: Screen[Any] | None = None) -> None:
        """screen: what the help is about; None: the one that it opens over."""
        super().__init__()
        self._about = screen

    def compose(self) -> ComposeResult:
        about = self._about or self.app.screen_stack[-2]
        with VerticalScroll(id="help"):
            if about.HELP:
                yield Markdown(about.HELP.strip(), id="help-text")
            yield Static(_table(active_keys(about)), id="help-keys")

    def on_mount(self) -> None:
        scroll = self.query_one("#help")
        scroll.border_subtitle = "? or Esc closes"
        scroll.focus()


def _table(rows: Iterable[Keys]) -> Content:
    lines: list[Content] = []
    where = ""
    for keys in rows:
        if keys.where != where:
            where = keys.where
            lines += [Content(""), Content.styled(where, "bold")]
        lines.append(Content.assemble((f"  {keys.keys:<{KEY_WIDTH}}", "$text-accent"), f" {keys.what}"))
    return Content("\n").join(lines[1:])


def active_keys(screen: Screen[Any]) -> Iterator[Keys]:
    """What can be pressed on a screen: first where the cursor is, then on the screen, then everywhere."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for active in screen.active_bindings.values():
        binding = active.binding
        if not active.enabled or not binding.description:
            continue
        if isinstance(active.node, App):
            where = "Everywhere"
        elif isinstance(active.node, Screen):
            where = "On this screen"
        else:
            where = "Where the cursor is"
        shown = found.setdefault((where, binding.action, binding.description), [])
        key = screen.app.get_key_display(binding)
        if key not in shown:
            shown.append(key)
    order = ("Where the cursor is", "On this screen", "Everywhere")
    for (where, _, what), keys in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        yield Keys(where, " ".join(keys), what)
