"""One download by huggingface_hub, counted and stoppable. Loads no torch."""

from __future__ import annotations

import contextlib
import glob
import io
import re
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub
from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types

from backends import credentials
from backends.hubname import HubName

# An older library has no second part in the name, and goes on with such a file.
_HALF = re.compile(r"[0-9a-f]{40,64}\.[0-9a-f]{8}\.incomplete")
_STALE_S = 3600.0


class Transfer:
    """bytes: received so far, by the library's own bars. stopped: by `stop`; then `run` ends with an error."""

    def __init__(self) -> None:
        self.bytes = 0
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def run(self, name: HubName, commit: str, repository: Path, files: list[str], at_once: int) -> None:
        """Downloads files of a commit into the hub's cache. Raises what the library raises."""
        remove_stale(repository)
        huggingface_hub.snapshot_download(
            name.name,
            repo_type=name.kind,
            revision=commit,
            allow_patterns=[glob.escape(path) for path in files],
            token=credentials.hf_token(),
            max_workers=at_once,
            tqdm_class=_bar_of(self),
        )

    def remove_partial(self, repository: Path) -> None:
        """Removes the half files that this process still writes: the library names them anew each time and never goes on."""
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = link.readlink()
                if target.suffix == ".incomplete" and repository in target.parents:
                    target.unlink()


def remove_stale(repository: Path) -> None:
    """Removes half files that killed downloads left: a living one writes at least once an hour. Others' names stay."""
    for path in (repository / "blobs").glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if _HALF.fullmatch(path.name) and time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _bar_of(transfer: Transfer) -> type[Any]:
    """A progress bar that shows nothing: it counts, and ends the transfer that it belongs to where that was stopped."""
    lock = threading.Lock()

    class Bar(tqdm):  # type: ignore[misc]  # its base has no types
        monitor_interval = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            self._counts = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO(), "delay": 1e9})

        def update(self, n: float | None = 1) -> None:
            if transfer.stopped:
                raise InterruptedError("the download was stopped")
            with lock:
                self.n += n or 0
                # Several bars tell of the same bytes: as received, and as written.
                if self._counts:
                    transfer.bytes = max(transfer.bytes, int(self.n))

        def refresh(self, *_args: Any, **_options: Any) -> None:
            return

        def display(self, *_args: Any, **_options: Any) -> None:
            return

        def close(self) -> None:
            self.disable = True

    return Bar
