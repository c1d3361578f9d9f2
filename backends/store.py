"""The output folder of an extraction: one job at a time, resumable, every sample listed. Loads no torch.

`manifest.jsonl` starts with one header line and goes on with one line a sample; the runner alone appends to it. Where a
row stands twice (its file was lost and made again) the later line counts. The files themselves: `hsfile`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.disk import free_bytes
from backends.errors import JobError, one_line
from backends.hsfile import TMP_PREFIX, Entry, StoreError, check_file, file_name, write_all

__all__ = ["MANIFEST", "Entry", "Manifest", "Store", "StoreError", "check_file", "file_dtype", "read_manifest"]

MANIFEST = "manifest.jsonl"
LOCK = ".lock"
MANIFEST_VERSION = 1

# Header fields that must agree before more samples are added to a folder, and how to say them.
_BOUND = {
    "layer_ids": "layers",
    "model_fingerprint": "model",
    "dtype": "dtype",
    "file_dtype": "dtype of the files",
    "dataset_fingerprint": "dataset",
    "backend": "backend",
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """header: the first line; entries: by row. whole_bytes: length up to the last whole line."""

    header: dict[str, Any]
    entries: dict[int, Entry]
    whole_bytes: int = 0


def read_manifest(output: Path) -> Manifest:
    """The manifest of an output folder; a torn last line is left out. Raises StoreError."""
    path = output / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"{output} has no {MANIFEST}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {one_line(error)}") from None
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if not lines:
        raise StoreError(f"{path} is empty or its first line is torn")
    entries: dict[int, Entry] = {}
    number = 0
    try:
        header = json.loads(lines[0])
        if header["manifest"] != MANIFEST_VERSION:
            raise StoreError(f"{path} is of version {header['manifest']!r}; this program reads {MANIFEST_VERSION}")
        for line in lines[1:]:
            number += 1
            item = json.loads(line)
            entries[item["row"]] = Entry(item["row"], item["file"], item["tokens"], item["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"line {number + 1} of {path} is not a manifest's: {one_line(error)}") from None
    return Manifest(header, entries, len(whole))


def file_dtype(header: Mapping[str, Any]) -> str:
    """The dtype of an output folder's files, by its name in torch; `dtype` is the one that the model was run in."""
    return str(header.get("file_dtype") or header.get("dtype"))


def check_sample(header: Mapping[str, Any], path: Path, token_ids: Sequence[int]) -> None:
    """Raises StoreError where a file is not what this manifest's header says of a sample of these tokens."""
    check_file(
        path,
        token_ids=token_ids,
        layers=len(header["layer_ids"]),
        hidden_size=header["hidden_size"],
        dtype=file_dtype(header),
    )


def disagreement(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """How two headers differ in what a folder must have in common, in one line; None where they agree."""
    # A header of before there were float8 files names no `file_dtype`.
    old, new = ({**header, "file_dtype": file_dtype(header)} for header in (old, new))
    for name, word in _BOUND.items():
        if old.get(name) != new.get(name):
            shown = word if name.endswith("_fingerprint") else name
            return f"{word}: {old.get(shown)} there, {new.get(shown)} here" + (
                " (its content differs)" if name.endswith("_fingerprint") else ""
            )
    return None


def _sizes(output: Path) -> dict[str, int]:
    """Bytes of each hidden-state file of a folder, by name."""
    with os.scandir(output) as items:
        return {
            item.name: item.stat().st_size
            for item in items
            if item.name.startswith("hs_") and item.name.endswith(".safetensors")
        }


def _present(entries: Mapping[int, Entry], sizes: Mapping[str, int]) -> dict[int, Entry]:
    """The entries whose file is there in its size; the others are to be made again."""
    return {row: entry for row, entry in entries.items() if sizes.get(entry.file) == entry.bytes}


def _agreeing_manifest(output: Path, header: Mapping[str, Any]) -> Manifest | None:
    """The manifest that is there, None where there is none yet. Raises JobError where it is another extraction's."""
    path = output / MANIFEST
    try:
        sizes = _sizes(output) if output.is_dir() else {}
        # A header line that is torn means that nothing was listed yet.
        manifest = read_manifest(output) if path.exists() and b"\n" in path.read_bytes() else None
    except OSError as error:
        raise unwritable(output, error) from None
    except StoreError as error:
        raise JobError(str(error), "mend or move that file, or give another output folder") from None
    if manifest is None:
        if sizes:
            # Files of the same shape may be of other layers or another model: nothing tells.
            raise JobError(
                f"{output} holds {len(sizes)} hidden-state files but no {MANIFEST} that says of what",
                "give another output folder, or remove them",
            )
        return None
    difference = disagreement(manifest.header, header)
    if difference is None:
        return manifest
    if not sizes and not manifest.entries:
        return None  # an earlier run that wrote nothing binds nobody
    raise JobError(f"{output} holds other hidden states ({difference})", "give another output folder")


def listed_in(output: Path, header: Mapping[str, Any]) -> dict[int, Entry]:
    """What an earlier run with this header left in a folder, by row; changes nothing. Raises JobError."""
    manifest = _agreeing_manifest(output, header)
    return _present(manifest.entries, _sizes(output)) if manifest else {}


class Store:
    """An output folder that one job writes to. Made by `open`; `close` gives the lock back.

    listed: what the manifest lists and the disk still holds, by row. stray: rows whose file has its final name but is not
    listed (the runner was killed between the two); the caller checks them (`check_file`) and commits or makes them again.
    """

    def __init__(self, output: Path, lock_fd: int, manifest_fd: int, header: dict[str, Any]) -> None:
        self.output = output
        self.header = header
        self.lock_fd = lock_fd
        self.listed: dict[int, Entry] = {}
        self.stray: list[int] = []
        self._manifest_fd = manifest_fd
        self._folder_fd = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @classmethod
    def open(cls, output: Path, header: Mapping[str, Any], *, patience_s: float = 30.0) -> Store:
        """Locks the folder and reads what is there. Raises JobError naming the difference or the other job's pid.

        patience_s: how long to wait for the workers of a runner that was killed; a job that lives is not waited for.
        """
        try:
            _make_folder(output)
            lock_fd = _lock(output, patience_s)
        except OSError as error:
            raise unwritable(output, error) from None
        try:
            return cls._opened(output, lock_fd, dict(header))
        except OSError as error:
            os.close(lock_fd)
            raise unwritable(output, error) from None
        except BaseException:
            os.close(lock_fd)
            raise

    @classmethod
    def _opened(cls, output: Path, lock_fd: int, header: dict[str, Any]) -> Store:
        path = output / MANIFEST
        manifest = _agreeing_manifest(output, header)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        store = cls(output, lock_fd, fd, manifest.header if manifest else header)
        try:
            os.ftruncate(fd, manifest.whole_bytes if manifest else 0)
            if manifest is None:
                store._append([header])
            # Files that outlive a power cut while the manifest's own name does not would belong to nobody.
            os.fsync(store._folder_fd)
            store._survey(manifest.entries if manifest else {})
        except BaseException:
            os.close(fd)
            os.close(store._folder_fd)
            raise
        return store

    def _survey(self, entries: Mapping[int, Entry]) -> None:
        for path in self.output.glob(f"{TMP_PREFIX}*"):
            path.unlink(missing_ok=True)
        sizes = _sizes(self.output)
        self.listed = _present(entries, sizes)
        known = {entry.file for entry in entries.values()}
        for name in sorted(sizes):
            number = name[3 : -len(".safetensors")]
            if name not in known and number.isdigit() and file_name(int(number)) == name:
                self.stray.append(int(number))

    def commit(self, entries: Iterable[Entry]) -> None:
        """Lists samples whose files have their final names. The names reach the disk first. Raises OSError."""
        added = list(entries)
        if not added:
            return
        os.fsync(self._folder_fd)
        self._append([entry.to_json() for entry in added])
        self.listed.update((entry.row, entry) for entry in added)

    def _append(self, items: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items)
        before = os.fstat(self._manifest_fd).st_size
        try:
            write_all(self._manifest_fd, memoryview(text.encode()))
            os.fsync(self._manifest_fd)
        except OSError:
            os.ftruncate(self._manifest_fd, before)
            raise

    def path(self, row: int) -> Path:
        """Where a sample's file is, or will be."""
        return self.output / file_name(row)

    def free_bytes(self) -> int:
        """Bytes that the disk still has for us."""
        return free_bytes(self.output)

    def sweep(self, pid: int) -> None:
        """Removes the temporary files of a worker that is gone."""
        for path in self.output.glob(f"{TMP_PREFIX}{pid}-*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._manifest_fd)
        os.close(self._folder_fd)
        os.close(self.lock_fd)


def unwritable(output: Path, error: OSError) -> JobError:
    """The error of a folder that cannot be written to."""
    return JobError(
        f"the output folder {output} cannot be written: {one_line(error)}",
        "free some space, mend its permissions or give another folder",
    )


def _make_folder(output: Path) -> None:
    """Makes a folder and those above it; each new name reaches the disk."""
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fd = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _lock(output: Path, patience_s: float) -> int:
    """Takes the folder's lock; workers inherit it, so it is free only when the last of them is gone."""
    fd = os.open(output / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            if _lives(owner) or time.monotonic() > deadline:
                os.close(fd)
                raise JobError(
                    f"another job (pid {owner or 'unknown'}) is writing to {output}",
                    "wait for it or stop it, or give another output folder",
                ) from None
            time.sleep(0.05)
        except OSError:
            os.close(fd)
            raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _lives(pid: str) -> bool:
    """Whether a process of that id runs; a zombie does not."""
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return False
    return state not in "ZX"
