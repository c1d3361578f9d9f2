"""Whether an output folder can be made and written to."""

from __future__ import annotations

import os
from pathlib import Path

from backends.disk import existing
from backends.errors import JobError


def check_output(output: Path) -> None:
    """Raises JobError where a folder cannot be made or written to; makes nothing."""
    folder = existing(output)
    remedy = "mend its permissions or give another folder"
    if not folder.is_dir():
        raise JobError(f"the output folder {output} cannot be made: {folder} is not a folder", "give another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise JobError(f"the output folder {output} cannot be written: no permission in {folder}", remedy)
