"""How the console reaches a node: SSH or pipes, one thread a node, facts out and requests in. Loads no paramiko."""

import logging

from dflash_tui.link.asking import new_job_id
from dflash_tui.link.errors import LinkError, RequestRefused
from dflash_tui.link.follow import Tail
from dflash_tui.link.node import NodeLink
from dflash_tui.link.requests import FilePosition, Reply
from dflash_tui.link.target import LinkOptions, Target, parse_target

__all__ = [
    "FilePosition",
    "LinkError",
    "LinkOptions",
    "NodeLink",
    "Reply",
    "RequestRefused",
    "Tail",
    "Target",
    "new_job_id",
    "parse_target",
]

# Without a handler the last-resort one would write over the screens.
for _name in ("dflash_tui", "paramiko"):
    logging.getLogger(_name).addHandler(logging.NullHandler())
