"""The launch form: what, where, on which GPUs; planned by the node before it can be started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Button, Footer, Input, Label, Select, Static

from backends.spec import SpecError
from dflash_tui.app.fields import CHOICE_LABELS, CHOICES, ORDER, TEXTS, VERBS, WITH_GPUS, fields_of, hint
from dflash_tui.app.orders import Order, make_order
from dflash_tui.app.screens.base import ConsoleScreen, TitleBar
from dflash_tui.app.widgets.gpu_choice import GpuChoice
from dflash_tui.app.widgets.plan_view import plan_content, refusal_content
from dflash_tui.app.widgets.put import put
from dflash_tui.config import ConfigError
from dflash_tui.fleet.state import Fleet
from dflash_tui.hftoken import secrets_for
from dflash_tui.link import LinkError, new_job_id

SHARE = ("refuse them", "share them with others")


class FormRow(Horizontal):
    """A label and the field beside it."""

    def __init__(self, label: str, field: Widget, *, id: str) -> None:
        super().__init__(id=id, classes="form-row")
        self._label = label
        self._field = field

    def compose(self) -> ComposeResult:
        yield Label(self._label, classes="form-label")
        yield self._field


class LaunchScreen(ConsoleScreen):
    """Fill in, plan (F5), launch (F9). Launch works only for exactly what the node said yes to."""

    HELP = """\
## A new job

Tab and Shift+Tab go through the fields, Space ticks a GPU, F5 asks the node for a plan, F9 launches what was planned.
The plan is made by the node's worker Python before anything is loaded: layers, bytes, room on the disk, memory.
A change after the plan needs a new plan. No GPU ticked means the CPU. Esc leaves; what was typed is kept.
Of vLLM the plan says which one the node has, whether it can extract from this model, with which options, what can where
it cannot, and the command that will be run. vLLM options are split as a shell does and go to `vllm serve` untouched.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f5", "plan", "Plan"),
        Binding("f9", "launch", "Launch"),
        Binding("escape", "leave", "Back"),
        # With priority, so that what is typed right after a Tab goes to the next field on a slow machine too.
        Binding("tab", "app.focus_next", "Next field", show=False, priority=True),
        Binding("shift+tab", "app.focus_previous", "Field before", show=False, priority=True),
    ]

    def __init__(self, mode: str = "jobs", verb: str = "") -> None:
        """mode: of the screen that it lies over; verb: the first choice, "" for what was chosen last."""
        super().__init__()
        self._mode = mode
        self._verb = verb

    def compose(self) -> ComposeResult:
        yield TitleBar(self._mode)
        kept = self.console.form_values
        verb = self._verb or kept.get("verb", VERBS[0])
        hosts = self.console.hosts
        host = kept.get("host", "")
        with VerticalScroll(id="form", can_focus=False):
            node: Select[str] = Select(
                [(Content(name), name) for name in hosts],
                value=host if host in hosts else hosts[0],
                allow_blank=False,
                compact=True,
                id="host",
            )
            yield FormRow("node", node, id="row-host")
            yield FormRow("what", _select("verb", VERBS, verb), id="row-verb")
            for name in ORDER:
                if name in CHOICES:
                    value = kept.get(name, CHOICES[name][0])
                    field_label = CHOICE_LABELS.get(name, name)
                    yield FormRow(field_label, _select(name, CHOICES[name], value), id=f"row-{name}")
                else:
                    field = Input(kept.get(name, ""), placeholder=TEXTS[name][1], compact=True, id=name)
                    yield FormRow(TEXTS[name][0], field, id=f"row-{name}")
            yield FormRow("GPUs", GpuChoice(id="gpus"), id="row-gpus")
            yield FormRow("", Static("", id="no-gpus"), id="row-no-gpus")
            yield FormRow("busy GPUs", _select("share", SHARE, kept.get("share", SHARE[0])), id="row-share")
            with Horizontal(id="form-buttons"):
                yield Button("Plan (F5)", id="plan", variant="primary", compact=True)
                yield Button("Launch (F9)", id="launch", variant="success", compact=True, disabled=True)
                yield Static(Content("plan it first"), id="form-hint")
            yield Static("", id="plan-text")
        yield Footer()

    def on_mount(self) -> None:
        self._shown_host = ""
        self._planned: Order | None = None
        self._busy = False
        self._show_fields()
        self.show_fleet(self.console.fleet)
        self.query_one("#host", Select).focus()

    # What the fields say.

    def _value(self, name: str) -> str:
        value = self.query_one(f"#{name}", Select).value
        return value if isinstance(value, str) else ""

    def _texts(self) -> dict[str, str]:
        texts = {name: self.query_one(f"#{name}", Input).value for name in TEXTS}
        return texts | {name: self._value(name) for name in CHOICES}

    def _order(self) -> Order:
        gpus = self.query_one(GpuChoice).ticked
        share = self._value("share") == SHARE[1]
        return make_order(self._value("host"), self._value("verb"), self._texts(), gpus=gpus, share=share)

    def _show_fields(self) -> None:
        verb = self._value("verb")
        shown = (*fields_of(verb, self._value("backend")), "name", "python")
        for name in ORDER:
            self.query_one(f"#row-{name}").display = name in shown
            if name in TEXTS and name != "python":
                self.query_one(f"#{name}", Input).placeholder = hint(verb, name)
        self._show_gpu_rows()

    def show_fleet(self, fleet: Fleet) -> None:
        host = self._value("host")
        node = fleet.node(host)
        choice = self.query_one(GpuChoice)
        if host != self._shown_host:
            self._shown_host = host
            choice.clear()
        choice.show(() if node is None or node.metrics is None else node.metrics.gpus)
        if node is not None and node.agent is not None:
            default = f"{node.agent.default_python or 'python3'} (the node's default)"
            self.query_one("#python", Input).placeholder = default
        self._show_gpu_rows()
        self._show_state()

    def _show_gpu_rows(self) -> None:
        with_gpus = self._value("verb") in WITH_GPUS
        count = len(self.query_one(GpuChoice).rows)
        self.query_one("#row-gpus").display = with_gpus and count > 0
        self.query_one("#row-share").display = with_gpus and count > 0
        self.query_one("#row-no-gpus").display = with_gpus and count == 0
        node = self.console.fleet.node(self._value("host"))
        known = node is not None and node.metrics is not None
        text = "no GPU on this node: it runs on the CPU" if known else "the node's GPUs are not known yet"
        put(self.query_one("#no-gpus", Static), Content(text))

    def _show_state(self) -> None:
        """Launch can be pressed only for what was planned, word for word."""
        try:
            ready = self._planned is not None and self._order() == self._planned
        except SpecError:
            ready = False
        self.query_one("#launch", Button).disabled = not ready or self._busy
        said = (
            "planned: it can be launched"
            if ready
            else "plan it first"
            if self._planned is None
            else "changed: plan it again"
        )
        put(self.query_one("#form-hint", Static), Content("asking the node ..." if self._busy else said))

    @on(Select.Changed)
    def _chosen(self, event: Select.Changed) -> None:
        if event.select.id in ("verb", "backend"):
            self._show_fields()
        self.show_fleet(self.console.fleet)

    @on(Input.Changed)
    @on(GpuChoice.Ticked)
    def _edited(self) -> None:
        self._show_state()

    @on(Input.Submitted)
    def _next_field(self) -> None:
        self.focus_next()

    # Plan and launch.

    @on(Button.Pressed, "#plan")
    def action_plan(self) -> None:
        if self._busy:
            return
        try:
            order = self._order()
        except SpecError as error:
            self._planned = None
            self._answer(refusal_content(str(error)))
            return
        self._plan(order)

    @work(exclusive=True, group="form")
    async def _plan(self, order: Order) -> None:
        self._planned = None
        self._set_busy(True)
        link = self.console.link(order.host)
        try:
            secrets = secrets_for(order.verb, order.spec, self.console.settings)
            asked = link.plan(
                order.verb,
                order.spec,
                python=order.python,
                gpus=order.gpus,
                share=order.share,
                env=self.console.settings.env,
                secrets=secrets,
            )
            plan: Mapping[str, Any] = await asyncio.wrap_future(asked)
        except ConfigError as error:
            self._answer(refusal_content(str(error)))
        except LinkError as error:
            self._answer(refusal_content(error.message, error.remedy))
        else:
            self._planned = order if plan.get("ok") else None
            self._answer(plan_content(plan, self.query_one("#form").scrollable_content_region.width))
        finally:
            self._set_busy(False)

    @on(Button.Pressed, "#launch")
    def action_launch(self) -> None:
        self._show_state()
        if self.query_one("#launch", Button).disabled:
            self._answer(refusal_content("this was not planned yet", "F5 asks the node for a plan"))
        else:
            self._launch(self._order())

    @work(exclusive=True, group="form")
    async def _launch(self, order: Order) -> None:
        self._set_busy(True)
        try:
            secrets = secrets_for(order.verb, order.spec, self.console.settings)
            launch = order.launch._replace(env=dict(self.console.settings.env))
            asked = self.console.link(order.host).launch(new_job_id(order.verb), launch, secrets=secrets)
            job = await asyncio.wrap_future(asked)
        except ConfigError as error:
            self._answer(refusal_content(str(error)))
        except LinkError as error:
            self._planned = None
            self._answer(refusal_content(error.message, error.remedy))
        else:
            self._keep()
            self.dismiss()
            self.console.job_started(order.host, job)
        finally:
            if self.is_attached:
                self._set_busy(False)

    def _set_busy(self, busy: bool) -> None:
        self._busy = busy
        self.query_one("#plan", Button).disabled = busy
        self._show_state()

    def _answer(self, text: Content) -> None:
        self.query_one("#plan-text", Static).update(text)
        self._show_state()
        self.call_after_refresh(self._show_answer)

    def _show_answer(self) -> None:
        """Brings the answer into view from its first line on, which says yes or no."""
        form, buttons = self.query_one("#form", VerticalScroll), self.query_one("#form-buttons")
        form.scroll_to_widget(buttons, top=True, animate=False)

    def _keep(self) -> None:
        self.console.form_values = self._texts() | {name: self._value(name) for name in ("host", "verb", "share")}

    def action_leave(self) -> None:
        self._keep()
        self.dismiss()


def _select(id: str, choices: tuple[str, ...], value: str) -> Select[str]:
    return Select([(name, name) for name in choices], value=value, allow_blank=False, compact=True, id=id)
