"""A question before something is ended or started: it says what will happen, and a stray Enter does nothing."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.facts import Job, JobState, Stray
from dflash_tui.fleet.state import NodeView
from dflash_tui.fleet.strays import held
from dflash_tui.node.protocol import Launch


class ConfirmScreen(ModalScreen[bool]):
    """Asks `question`; `text` says what will happen; `yes` is what the button that does it says."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, question: str, text: Content, yes: str) -> None:
        super().__init__()
        self._question = question
        self._text = text
        self._yes = yes

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm"):
            yield Static(Content(fmt.one_line(self._question)), id="confirm-question")
            with VerticalScroll(id="confirm-scroll"):
                yield Static(self._text, id="confirm-text")
            with Horizontal(id="confirm-buttons"):
                yield Button("No, leave it (n)", id="no", compact=True)
                yield Button(f"{self._yes} (y)", id="yes", variant="error", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no", Button).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


def stop_text(node: NodeView, job: Job, launch: Launch | None, *, force: bool) -> Content:
    """What a stop will do to which processes, how long that may take, and what is kept."""
    lines: list[str] = []
    if job.state is JobState.ORPHANED:
        lines.append("Its supervisor is gone; these processes of it are still alive and will be ended:")
        lines += [_stray(stray) for stray in job.strays]
        lines.append("Each gets SIGTERM, and SIGKILL where it does not end.")
    else:
        lines.append(f"Processes: {_processes(node, job)}.")
        lines += [
            f"  on GPU {index}: {pid}, {fmt.size(memory)}, {command}"
            for index, pid, memory, command in _on_gpus(node, job)
        ]
        if force:
            lines.append("Forced: no more time to end by itself. SIGTERM to every process of the job,")
            lines.append("then SIGKILL until none is left. Samples in work are lost.")
        else:
            grace = "its grace" if launch is None else fmt.duration(launch.stop_grace_s)
            lines.append("The runner gets SIGTERM: it takes no more samples, commits what is whole and ends.")
            lines.append(f"What is alive after {grace} gets SIGTERM, then SIGKILL until none is left.")
    output = None if launch is None else launch.spec.get("output")
    where = f" in {output}" if isinstance(output, str) else ""
    if job.verb == "compare":
        lines.append("Kept: the log. There is no verdict then, and a restart measures anew, from the beginning.")
    else:
        lines.append(f"Kept: every finished file{where}, and the log. A restart goes on from there.")
    return Content(
        "\n".join(fmt.one_line(line) if not line.startswith("  ") else "  " + fmt.one_line(line) for line in lines)
    )


def _processes(node: NodeView, job: Job) -> str:
    parts = []
    if job.supervisor_pid is not None:
        parts.append(f"supervisor {job.supervisor_pid}")
    if job.runner_pid is not None:
        parts.append(f"runner {job.runner_pid} and all that descend from it")
    return ", ".join(parts) or f"all of job {job.id}"


def _on_gpus(node: NodeView, job: Job) -> list[tuple[int, int, int | None, str]]:
    return [
        (gpu.index, process.pid, process.memory_bytes, process.command or fmt.NOT_AVAILABLE)
        for gpu in (() if node.metrics is None else node.metrics.gpus)
        for process in gpu.processes or ()
        if process.job == job.id
    ]


def _stray(stray: Stray) -> str:
    memory = held(stray)
    return f"  process {stray.pid}{', ' if memory else ''}{memory}: {stray.command}"
