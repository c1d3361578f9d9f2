"""A dataset folder that appears whole or not at all. Importing this loads neither torch nor datasets."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from backends.errors import JobError, one_line

# Rows handed to the Arrow writer together.
_BATCH = 256


class ArrowFolder:
    """Collects rows beside `output` and renames them into place at `commit`; leaving without it removes every trace.

    What a killed prepare left beside the output is removed by the next one; a prepare that lives is not disturbed.
    Raises JobError where the place cannot be written or another job writes it.
    """

    def __init__(self, output: Path, *, keep_messages: bool) -> None:
        self.output = output
        self._work = output.parent / f".{output.name}.preparing"
        self._keep_messages = keep_messages
        self._lock = -1
        self._writer: Any = None
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                self._lock = -1
                raise JobError(
                    f"another prepare is writing {self.output}", "wait for it, stop it, or give another output"
                ) from None
            for item in self._work.iterdir():
                shutil.rmtree(item) if item.is_dir() else item.unlink()
            self._open_writer()
        except OSError as error:
            self._remove()
            raise self._unwritable(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            # On a full disk closing fails as writing did, and what was written goes away anyway.
            with contextlib.suppress(OSError):
                self._writer.close()
        self._remove()

    def add(self, input_ids: list[int], loss_mask: list[int], messages: Sequence[dict[str, Any]]) -> None:
        """Adds one row. Raises JobError (a full disk)."""
        row: dict[str, Any] = {"input_ids": input_ids, "loss_mask": loss_mask, "seq_len": len(input_ids)}
        if self._keep_messages:
            row["messages"] = [{"role": message["role"], "content": message["content"]} for message in messages]
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self._flush()

    def commit(self, record_name: str, record: str, fingerprint: str) -> None:
        """Puts the dataset, with a file `record_name` beside its own, into its final place. Raises JobError."""
        import datasets

        self._flush()
        whole = self._work / "whole"
        try:
            self._writer.finalize()
            rows = datasets.Dataset.from_file(str(self._work / "rows.arrow"))
            # A fingerprint made from what the rows were made from: the same prepare gives the same dataset.
            datasets.Dataset(rows.data, info=rows.info, fingerprint=fingerprint).save_to_disk(str(whole))
            (whole / record_name).write_text(record, encoding="utf-8")
            _for_torch(whole / "state.json")
            for path in (*whole.iterdir(), whole):
                _sync(path)
            whole.rename(self.output)
            _sync(self.output.parent)
        except OSError as error:
            raise self._unwritable(error) from None

    def _open_writer(self) -> None:
        import datasets
        from datasets.arrow_writer import ArrowWriter

        datasets.disable_progress_bars()
        columns: dict[str, Any] = {
            "input_ids": datasets.List(datasets.Value("int64")),
            "loss_mask": datasets.List(datasets.Value("int64")),
            "seq_len": datasets.Value("int64"),
        }
        if self._keep_messages:
            columns["messages"] = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
        self._writer = ArrowWriter(features=datasets.Features(columns), path=str(self._work / "rows.arrow"))

    def _flush(self) -> None:
        if not self._rows:
            return
        batch = {name: [row[name] for row in self._rows] for name in self._rows[0]}
        try:
            self._writer.write_batch(batch)
        except OSError as error:
            raise self._unwritable(error) from None
        self._rows = []

    def _remove(self) -> None:
        if self._lock < 0:
            return
        shutil.rmtree(self._work, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _unwritable(self, error: OSError) -> JobError:
        reason = error.strerror or one_line(error)
        return JobError(
            f"the dataset {self.output} cannot be written: {reason}", "free space or give another output folder"
        )


def _for_torch(state: Path) -> None:
    """Rows are to be read as tensors: the trainer (speculators 0.9.0) compares them with tensors and stops at a list.

    Written into the file, because `Dataset.with_format("torch")` would load torch.
    """
    fields = json.loads(state.read_text(encoding="utf-8"))
    fields["_format_type"] = "torch"
    state.write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
