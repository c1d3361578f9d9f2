"""The screens. Importing this package loads neither Textual nor torch nor paramiko."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_tui.app.bridge import NodeLinkLike
    from dflash_tui.config import Settings


def run(links: Sequence[NodeLinkLike], settings: Settings) -> int:
    """Shows the console until the user leaves it. Starts the links and closes them; returns the exit status."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("dflash-tui: the console needs a terminal; use `dflash-tui status` in a script", file=sys.stderr)
        return 2
    from dflash_tui.app.app import ConsoleApp

    app = ConsoleApp(links, settings)
    app.run()
    return app.return_code or 0
