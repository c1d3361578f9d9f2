"""Opening what is only read: a file of a node at a line, and what a job was started with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import App

from dflash_tui.app.screens.command import CommandScreen
from dflash_tui.app.screens.source import SourceScreen
from dflash_tui.fleet.source import Place


def show_source(app: App[Any], host: str, places: Sequence[Place] = (), at: int = 0, job: str | None = None) -> None:
    """Opens a file of a node, the one of `places` to begin with; without any it asks for one."""
    if isinstance(app.screen, SourceScreen) and not places and app.screen.host == host:
        app.screen.action_open()
    else:
        app.push_screen(SourceScreen(host, places, at, job))


def show_command(app: App[Any], host: str, job: str) -> None:
    """Opens what a job was started with."""
    if not (isinstance(app.screen, CommandScreen) and app.screen.job == job):
        app.push_screen(CommandScreen(host, job))
