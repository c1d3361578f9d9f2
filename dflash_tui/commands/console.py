"""Opens the screens on the hosts of the settings."""

from __future__ import annotations

import queue
from contextlib import suppress

from dflash_tui.commands.nodes import make_link
from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.config import Settings, config_file


def open_console(settings: Settings) -> int:
    """Shows the screens until the user leaves them; their exit status. Raises CommandError where no host is named."""
    if not settings.hosts:
        remedy = f'name one with --host, as `dflash-tui --host me@gpu-1` or `--host local`, or hosts = ["gpu-1"] in {config_file()}'
        raise CommandError(Exit.BAD_INPUT, "no host to look at", remedy)
    links = [
        make_link(host, settings, queue.SimpleQueue()) for host in settings.hosts
    ]  # the screens take the facts over
    from dflash_tui.app import run

    try:
        return run(links, settings)
    finally:
        for link in links:
            with suppress(RuntimeError):  # closed already
                link.close()
