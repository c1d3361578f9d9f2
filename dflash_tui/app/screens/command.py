"""What a job was started with: its command line for a shell, its servers', its environment without secrets, the versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType

from dflash_tui.app.screens.text import TextScreen
from dflash_tui.fleet.source import lines_of
from dflash_tui.fleet.started import StartedWith, runner_text, started_text
from dflash_tui.link import LinkError


class CommandScreen(TextScreen):
    """Asks the node when it opens."""

    HELP = """\
## Command

How a job was started, as text for a shell: the command of its runner with the variables that were set for it, those of its
vLLM servers, then versions and the whole environment as comments. Values of secrets are not shown: `***`, or `"$NAME"` in a
command, which takes the value of the shell that runs it. (What was given by `--env`, or after `--`, stands in the job's folder,
which its user alone can read: a restart needs it.) `y` copies the runner's command.
"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "copy", "Copy command"),
    ]

    def __init__(self, host: str, job: str) -> None:
        super().__init__(host)
        self.job = job
        self._started: StartedWith | None = None

    def on_mount(self) -> None:
        self.view.focus()
        self._ask()

    def header(self) -> Sequence[str]:
        return (f"command of {self.job} on {self.host}",)

    @work
    async def _ask(self) -> None:
        self.tell("asking the node")
        try:
            started = await asyncio.wrap_future(self.console.link(self.host).command(self.job))
        except LinkError as error:
            self.tell(str(error))
            return
        self._started = started
        node = self.console.fleet.node(self.host)
        time = started.time if node is None or started.time is None else node.console_time(started.time)
        text = started_text(self.job, self.host, started, self.console.clock_text(time))
        self.show_text(lines_of(text.encode()), "command.sh")

    def action_copy(self) -> None:
        if self._started is None or not self._started.argv:
            self.tell("there is no command to copy")
            return
        self.app.copy_to_clipboard(runner_text(self._started))
        self.tell("the runner's command was given to the terminal's clipboard")
