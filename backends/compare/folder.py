"""The output folder of a comparison: one at a time, its own files and no others. Loads no torch.

compare.json         the report; while a comparison runs, and where it did not finish, only what it is of
parity.json          the comparison of what was written, layer by layer
hf/, vllm/           the hidden states, removed at the end unless they are to be kept
<side>.spec.json     what each side was asked to do
<side>.events.jsonl  what each side told
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.errors import JobError, one_line
from backends.flattening import write_json
from backends.spec import BACKENDS, CompareSpec
from backends.vllm.told import without_secrets

REPORT = "compare.json"
PARITY = "parity.json"
VERSION = 1
_LOCK = ".compare.lock"


def earlier(output: Path) -> bool:
    """Whether a folder holds an earlier comparison; False for a new or empty one. Raises JobError for any other."""
    remedy = "give a new folder, an empty one, or that of an earlier comparison"
    try:
        data = json.loads((output / REPORT).read_bytes())
        if data["compare"] != VERSION:
            raise JobError(f"{output / REPORT} is of version {data['compare']!r}; this program reads {VERSION}", remedy)
    except FileNotFoundError:
        try:
            # The lock alone is left by one that failed at its first write, and there is one that just begins.
            if any(path.name != _LOCK for path in output.iterdir()):
                raise JobError(f"the output {output} exists and holds no comparison", remedy) from None
        except FileNotFoundError:
            return False
        except OSError as error:
            raise JobError(f"the output {output} cannot be read: {one_line(error)}", remedy) from None
        return False
    except NotADirectoryError:
        raise JobError(f"the output {output} is a file", remedy) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(f"{output / REPORT} is no report of a comparison: {one_line(error)}", remedy) from None
    return True


def held_bytes(output: Path) -> int:
    """Bytes of the hidden states that a comparison left there."""
    total = 0
    for side in BACKENDS:
        for folder, _, names in os.walk(output / side):
            for name in names:
                try:
                    total += Path(folder, name).lstat().st_size
                except OSError:
                    continue  # it is being removed
    return total


class Folder:
    """The folder of a running comparison, locked. Raises JobError where it cannot be."""

    def __init__(self, spec: CompareSpec) -> None:
        self.output = Path(spec.output).absolute()
        self._made = {"compare": VERSION, "verb": "compare", "created": round(time.time(), 3)}
        try:
            earlier(self.output)
            self.output.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.output / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.output, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who wrote here until now may have ended meanwhile.
            if earlier(self.output):
                self._empty()
            write_json(self.output / REPORT, {**self._made, "finished": False, "spec": _told(spec)})
        except BlockingIOError:
            os.close(self._lock)
            raise JobError(f"another comparison writes to {self.output}", "wait for its end, or stop it") from None
        except OSError as error:
            os.close(self._lock)
            raise _unwritable(self.output, error) from None
        except JobError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def path(self, name: str) -> Path:
        return self.output / name

    def write(self, name: str, data: Mapping[str, Any]) -> Path:
        """Writes a file whole. Raises JobError."""
        try:
            write_json(self.output / name, data)
        except OSError as error:
            raise _unwritable(self.output, error) from None
        return self.output / name

    def keep_parity(self, report: Path) -> Path:
        """Copies the parity's report out of a folder that may be removed. Raises JobError."""
        try:
            shutil.copyfile(report, self.output / PARITY)
        except OSError as error:
            raise _unwritable(self.output, error) from None
        return self.output / PARITY

    def report(self, result: Mapping[str, Any]) -> None:
        """Raises JobError."""
        self.write(REPORT, {**self._made, "finished": True, **result})

    def remove_states(self) -> str:
        """Frees the disk of both sides' hidden states; why that did not work, in one line, or ""."""
        try:
            for side in BACKENDS:
                if (self.output / side).exists():
                    shutil.rmtree(self.output / side)
        except OSError as error:
            return f"the hidden states in {self.output} could not all be removed: {one_line(error)}"
        return ""

    def _empty(self) -> None:
        """Takes away an earlier comparison. Raises OSError, JobError."""
        if problem := self.remove_states():
            raise JobError(problem, "remove them yourself, or give another output folder")
        names = [PARITY, *(f"{side}.{ending}" for side in BACKENDS for ending in ("spec.json", "events.jsonl"))]
        for name in names:
            (self.output / name).unlink(missing_ok=True)


def _told(spec: CompareSpec) -> dict[str, Any]:
    """The spec for a file that others may read."""
    return {**spec.to_json(), "extra_args": without_secrets(spec.extra_args)}


def _unwritable(output: Path, error: OSError) -> JobError:
    return JobError(
        f"the output folder {output} cannot be written: {one_line(error)}",
        "free some space, mend its permissions or give another folder",
    )
