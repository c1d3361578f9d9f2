"""The doctor's word on one node, over whatever screen is open: what it can do, what it lacks and how to mend it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, cast

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from backends.questions import CapabilitiesSpec
from backends.spec import SpecError
from dflash_tui.app.orders import model_on
from dflash_tui.app.widgets.checkup_view import checkup_content
from dflash_tui.app.widgets.plan_view import refusal_content
from dflash_tui.config import ConfigError
from dflash_tui.fleet.capabilities import about, verdicts
from dflash_tui.fleet.facts import Checkup
from dflash_tui.fleet.format import one_line
from dflash_tui.hftoken import secrets_for
from dflash_tui.link import LinkError

if TYPE_CHECKING:
    from dflash_tui.app.app import ConsoleApp


class DoctorScreen(ModalScreen[None]):
    """Asks the node when it opens, and again when it is told to."""

    HELP = """\
## Doctor

What this node can do, the worst first: `!` problem, `~` warning, `?` could not be looked at, `*` ok.
The line after `->` says what mends it. Disks are tried by writing up to 256 MiB, which is removed again;
a read-only console leaves that out. `m` asks about a model by its config.json alone: can hf, can each vLLM here, and why not.
"""
    DEFAULT_CSS = """
    DoctorScreen {
        align: center middle;

        & > #doctor {
            width: 100%;
            max-width: 140;
            height: auto;
            max-height: 100%;
            padding: 0 1;
            border: round $border;
            background: $surface;
            scrollbar-size-vertical: 1;
            scrollbar-gutter: stable;
        }
        & #doctor-text {
            height: auto;
        }
        & #doctor-model {
            display: none;
        }
        & #doctor-model.-asked {
            display: block;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "again", "Look again"),
        Binding("m", "model", "A model"),
        Binding("escape,q", "leave", "Close"),
        Binding("question_mark", "app.help", "Help"),  # a modal screen gets none of the app's
    ]

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host
        self._checkup: Checkup | None = None
        self._asking = False
        self._spec: CapabilitiesSpec | None = None
        self._about = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="doctor"):
            yield Input(placeholder="folder of the model on the node, or org/name", compact=True, id="doctor-model")
            yield Static(id="doctor-text")

    def on_mount(self) -> None:
        scroll = self.query_one("#doctor")
        scroll.border_title = Content(one_line(f"Doctor: {self.host}"))
        scroll.border_subtitle = "r looks again, m asks about a model, Esc closes"
        scroll.focus()
        self.action_again()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_again(self) -> None:
        if self._asking:
            return
        if self._spec is not None:
            self._ask_model(self._spec)
        else:
            self._ask()

    def action_model(self) -> None:
        self._field.add_class("-asked")
        self._field.focus()
        self.query_one("#doctor").scroll_home(animate=False)

    def action_leave(self) -> None:
        """Out of the question about a model first."""
        if self._field.has_class("-asked"):
            asked, self._spec = self._spec, None
            self._hide_field()
            if asked is not None:
                self.action_again()
        else:
            self.dismiss()

    def _hide_field(self) -> None:
        self._field.remove_class("-asked")
        self.query_one("#doctor").focus()

    @property
    def _field(self) -> Input:
        return self.query_one("#doctor-model", Input)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._asking or not event.value.strip():
            return
        try:
            self._spec = CapabilitiesSpec(model_on(self.host, event.value.strip()))
        except SpecError as error:
            self._checkup = None
            self._show(refusal_content(str(error)))
            return
        self.query_one("#doctor").focus()
        self._ask_model(self._spec)

    @work
    async def _ask_model(self, spec: CapabilitiesSpec) -> None:
        app = cast("ConsoleApp", self.app)
        fields = spec.to_json()
        self._asking, self._checkup = True, None
        self._show(Content(one_line(f"asking {self.host} about {spec.model}")))
        try:
            secrets = secrets_for(spec.verb, fields, app.settings)
            asked = app.link(self.host).plan(spec.verb, fields, env=app.settings.env, secrets=secrets)
            answer = await asyncio.wrap_future(asked)
        except ConfigError as error:
            self._show(refusal_content(str(error)))
        except LinkError as error:
            self._show(refusal_content(error.message, error.remedy))
        else:
            if answer.get("ok"):
                self._checkup, self._about = verdicts(self.host, answer), f"{spec.model}: {about(answer)}"
                self._draw()
            else:
                self._show(refusal_content(str(answer.get("error")), str(answer.get("remedy") or "")))
        finally:
            self._asking = False

    @work
    async def _ask(self) -> None:
        app = cast("ConsoleApp", self.app)
        self._asking, self._checkup, self._about = True, None, ""
        self._show(Content(one_line(f"looking at {self.host}: this takes up to a minute")))
        try:
            self._checkup = await asyncio.wrap_future(app.link(self.host).doctor(write=not app.settings.read_only))
        except LinkError as error:
            self._show(refusal_content(error.message, error.remedy))
        else:
            self._draw()
        finally:
            self._asking = False

    def _draw(self) -> None:
        if self._checkup is not None:
            width = self.query_one("#doctor").scrollable_content_region.width
            text = checkup_content(self._checkup, width)
            self._show(Content(f"{one_line(self._about)}\n") + text if self._about else text)

    def _show(self, text: Content) -> None:
        self.query_one("#doctor-text", Static).update(text)
