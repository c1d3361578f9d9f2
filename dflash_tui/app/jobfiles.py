"""What was asked for when a job was launched, read from its folder on the node."""

from __future__ import annotations

import asyncio

from dflash_tui.app.bridge import NodeLinkLike
from dflash_tui.link import LinkError
from dflash_tui.link.facts import launch_of
from dflash_tui.node.protocol import Launch

_MOST_BYTES = 65536


async def read_launch(link: NodeLinkLike, job: str) -> Launch:
    """The `launch.json` of a job. Raises LinkError."""
    _, data = await asyncio.wrap_future(link.read(job=job, file="launch", offset=0, length=_MOST_BYTES))
    try:
        return launch_of(data)
    except ValueError as error:
        message = f"the launch.json of job {job} cannot be read: {error}"
        raise LinkError("io-error", message, "launch it anew from the form") from None
