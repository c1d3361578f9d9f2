"""Where a folder would be on the disk, and how much that has left. Loads nothing but the standard library."""

from __future__ import annotations

import os
from pathlib import Path


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the disk of a folder that need not be there yet. Raises OSError."""
    disk = os.statvfs(existing(folder))
    return disk.f_bavail * disk.f_frsize
