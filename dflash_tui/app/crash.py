"""A fault of the console itself: the traceback goes to a file, one line goes to the user."""

from __future__ import annotations

import os
import time
import traceback

from dflash_tui.config import state_dir


def write_report(error: BaseException) -> str:
    """Writes the traceback below the console's state folder; the line that tells the user. Raises nothing."""
    line = f"dflash-tui: the console failed: {type(error).__name__}: {' '.join(str(error).split())}"
    path = state_dir() / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as reason:
        return f"{line}; its report could not be written to {path}: {reason.strerror}; jobs run on"
    return f"{line}; jobs run on; please report it with {path}"
