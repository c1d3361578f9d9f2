"""Hidden states in SpecForge's offline layout (`specforge`), beside the files that they are made from. Loads no torch by itself.

Resumable: a file gets its name when it is whole, and one that is there and not older than its source is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.dataset import PreparedDataset
from backends.disk import free_bytes
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.flattening import write_json
from backends.hsfile import TMP_PREFIX, Entry, StoreError, read_file
from backends.progress import Progress
from backends.spec import ExportSpec
from backends.specforge import FILE, Layout, can_train, check_described, description, file_of, is_whole, write
from backends.store import Manifest, check_sample, read_manifest, unwritable

LOCK = ".lock"
# Files in flight to each thread.
_AHEAD = 2
# Rows that are named where they are left out.
_NAMED = 100


@dataclass(frozen=True, slots=True)
class Source:
    """An extraction that may be exported. described: what `specforge.json` of the folder `to` says."""

    spec: ExportSpec
    output: Path
    to: Path
    manifest: Manifest
    dataset: PreparedDataset
    layout: Layout
    described: dict[str, Any]

    @classmethod
    def open(cls, spec: ExportSpec) -> Source:
        """Reads the manifest and the dataset. Raises JobError where the two do not suit each other or the layout."""
        output, to = Path(spec.output), Path(spec.to)
        if to.resolve() == output.resolve():
            raise JobError(f"the export would be written among its own source in {to}", "give another folder with `to`")
        try:
            manifest = read_manifest(output)
        except StoreError as error:
            raise JobError(str(error), "give the folder that `extract` wrote") from None
        header = manifest.header
        needed = ("layer_ids", "num_layers", "hidden_size", "dtype", "dataset", "model")
        missing = [name for name in needed if name not in header]
        if missing:
            raise JobError(f"the manifest of {output} does not say its {', '.join(missing)}", "extract anew")
        if not manifest.entries:
            raise JobError(f"the manifest of {output} lists no sample: there is nothing to export", "extract first")
        layout = Layout.of(header)
        dataset = PreparedDataset(spec.dataset or header["dataset"])
        expected = header.get("dataset_fingerprint")
        if expected is not None and dataset.fingerprint != expected:
            raise JobError(
                f"the dataset {dataset.path} is not the one that was extracted (its content differs)",
                "name the right one with `dataset`: the loss masks are its",
            )
        return cls(spec, output, to, manifest, dataset, layout, description(header, layout, spec.rows_per_folder))

    @property
    def entries(self) -> list[Entry]:
        return [self.manifest.entries[row] for row in sorted(self.manifest.entries)]

    def path(self, row: int) -> Path:
        return file_of(self.to, row, self.spec.rows_per_folder)

    def file_bytes(self, entry: Entry) -> int:
        """The most bytes that the exported file takes."""
        return self.layout.file_bytes(entry.tokens)


def export(spec: ExportSpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Writes what is missing in `spec.to` and returns the fields of `finished`.

    Raises JobError naming the first file that is not what the manifest says or the disk that is full, and Interrupted.
    """
    began = time.monotonic()
    source = Source.open(spec)
    layout, total = source.layout, len(source.manifest.entries)
    with _target(source):
        events.emit("started", verb="export", total=total, already_done=0, layer_ids=list(layout.layer_ids))
        progress = Progress(events, total=total)
        progress.phase = "exporting"
        kept, left_out = 0, []
        with contextlib.closing(_exported(source, should_stop)) as made:
            for entry, written in made:
                if written is None:
                    left_out.append(entry.row)
                    progress.skipped += 1
                else:
                    progress.add(samples=1, tokens=entry.tokens if written else 0, nbytes=written)
                    kept += not written
                progress.tell()
        progress.tell(now=True)
        if progress.done + progress.skipped < total:
            raise Interrupted(
                f"stopped after {progress.done + progress.skipped} of {total} samples", progress.done, total
            )
        message = None
        if left_out:
            message = (
                f"{len(left_out)} samples without two supervised tokens in a row are left out: SpecForge stops at such"
            )
            events.emit("warning", message=f"{message} (row {left_out[0]})")
        longest = max(entry.tokens for entry in source.entries)
        came_of_it = {"samples": progress.done, "left_out_rows": left_out, "longest_tokens": longest}
        try:
            write_json(source.to / FILE, {**source.described, **came_of_it})
        except OSError as error:
            raise unwritable(source.to, error) from None
    return {
        "done": progress.done,
        "total": total,
        "tokens": progress.tokens,
        "bytes": progress.bytes,
        "elapsed_s": round(time.monotonic() - began, 3),
        "exported": progress.done,
        "kept": kept,
        "left_out": len(left_out),
        "left_out_rows": left_out[:_NAMED],
        "not_extracted": len(source.dataset) - total,
        "layer_ids": list(layout.layer_ids),
        "target_layer_ids": list(layout.target_layer_ids),
        "longest_tokens": longest,
        "output": str(source.to),
        **({"message": message} if message else {}),
    }


@contextlib.contextmanager
def _target(source: Source) -> Iterator[None]:
    """The folder `to`, made and locked; what a killed export left there is gone. Raises JobError."""
    to = source.to
    try:
        to.mkdir(parents=True, exist_ok=True)
        lock = os.open(to / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(to, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(
                f"another export is writing to {to}", "wait for it or stop it, or give another folder"
            ) from None
        check_described(to, source.described)
        for left in (*to.glob(f"{TMP_PREFIX}*"), *to.glob(f"rows_*/{TMP_PREFIX}*")):
            left.unlink(missing_ok=True)
        # Before the first sample: files of another extraction could not be told from these.
        write_json(to / FILE, source.described)
        yield
    except OSError as error:
        raise unwritable(to, error) from None
    finally:
        os.close(lock)


def _exported(source: Source, should_stop: Callable[[], bool]) -> Generator[tuple[Entry, int | None], None, None]:
    """Each sample in order with the bytes that were written, 0 where its file is kept, None where it is left out.

    Ends early where a stop is asked for: what was begun is finished, nothing more is begun. Raises JobError and OSError.
    """
    threads = min(4, os.cpu_count() or 1)
    waiting: deque[tuple[Entry, int, Future[int | None]]] = deque()
    todo = iter(source.entries)
    folders: set[Path] = set()
    more = True
    with ThreadPoolExecutor(threads, thread_name_prefix="export") as pool:
        try:
            while more or waiting:
                while more and len(waiting) < threads * _AHEAD:
                    entry = None if should_stop() else next(todo, None)
                    if entry is None:
                        more = False
                        break
                    size = source.file_bytes(entry)
                    _check_floor(source, size + sum(ahead for _, ahead, _ in waiting))
                    ids, mask = _row(source, entry)
                    folder = source.path(entry.row).parent
                    if folder not in folders:
                        folder.mkdir(exist_ok=True)
                        folders.add(folder)
                    waiting.append((entry, size, pool.submit(_one, source, entry, ids, mask)))
                if waiting:
                    entry, _, answer = waiting.popleft()
                    yield entry, answer.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for folder in (*folders, source.to):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _check_floor(source: Source, size: int) -> None:
    free, floor = free_bytes(source.to), source.spec.min_free_bytes
    if free - size < floor:
        raise JobError(
            f"the disk of {source.to} has {free:,} bytes left, too few for the next {size:,} above the floor of {floor:,}",
            "free some space and export again: it goes on where it stopped",
        )


def _row(source: Source, entry: Entry) -> tuple[list[int], list[int]]:
    if not 0 <= entry.row < len(source.dataset):
        raise JobError(f"{entry.file} is listed, and the dataset has no row {entry.row}", "name the right dataset")
    return source.dataset.row(entry.row)


def _one(source: Source, entry: Entry, ids: list[int], mask: list[int]) -> int | None:
    """Exports one sample; the bytes written, 0 where its file is kept, None where SpecForge would stop at it."""
    if not can_train(mask):
        return None
    origin, path = source.output / entry.file, source.path(entry.row)
    remedy = "see what `verify` says, extract anew what is bad, and export again: it goes on where it stopped"
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime_ns >= origin.stat().st_mtime_ns and is_whole(path, ids, mask, source.layout):
            return 0
    try:
        check_sample(source.manifest.header, origin, ids)
        sample = read_file(origin)
    except StoreError as error:
        raise JobError(str(error), remedy) from None
    return write(path, sample, mask, source.layout)
