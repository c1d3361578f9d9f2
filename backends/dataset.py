"""A prepared Arrow dataset, as the speculators trainer reads it: `input_ids`, `loss_mask`, `seq_len`, one row a sample.

Importing this loads neither torch nor datasets.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from backends.errors import JobError, one_line

COLUMNS = ("input_ids", "loss_mask", "seq_len")

# So many rows' tokens enter the fingerprint, spread evenly: a dataset of ten gigabytes is fingerprinted in a second.
_FINGERPRINT_ROWS = 4096


class DatasetError(JobError):
    """A folder that is not a prepared dataset, or one whose rows cannot be."""


class PreparedDataset:
    """A dataset folder written by `prepare`, by the trainer's own preparation, or by `save_to_disk`.

    Rows are read from the memory-mapped file when asked for; nothing is held. format: what the trainer will make of the rows;
    it takes "torch" alone. Raises DatasetError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DatasetError(f"the dataset {self.path} is not a folder", "give the folder that `prepare` wrote")
        if (self.path / "dataset_dict.json").is_file():
            raise DatasetError(f"the dataset {self.path} holds several splits", f"give one of them: {self._splits()}")
        if not (self.path / "state.json").is_file() or not (self.path / "dataset_info.json").is_file():
            raise DatasetError(
                f"{self.path} is not a prepared dataset: it has no state.json and dataset_info.json",
                "give the folder that `prepare` wrote, or make one with `prepare`",
            )
        import datasets

        try:
            # Not load_from_disk: a dataset saved for the trainer has torch's format, and loading it would load torch.
            state = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
            files = [str(self.path / item["filename"]) for item in state["_data_files"]]
            self._dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in files])
        except Exception as error:  # datasets and pyarrow raise many kinds for a damaged folder.
            raise DatasetError(
                f"the dataset {self.path} cannot be opened: {one_line(error)}", "prepare it again"
            ) from error
        missing = [name for name in COLUMNS if name not in self._dataset.column_names]
        if missing:
            raise DatasetError(
                f"the dataset {self.path} has no column {', '.join(missing)}, only {', '.join(self._dataset.column_names)}",
                "prepare it from the conversations with `prepare`",
            )
        self.format: str | None = state.get("_format_type")
        # Without `messages`, a row is two lists of numbers.
        self._rows = self._dataset.select_columns(["input_ids", "loss_mask"])
        self._lengths: list[int] | None = None
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def lengths(self) -> list[int]:
        """Tokens of every row, from `seq_len` alone. Raises DatasetError for a row without tokens."""
        if self._lengths is None:
            column = self._dataset.with_format("arrow").select_columns(["seq_len"])[:]["seq_len"]
            lengths = [-1 if length is None else int(length) for length in column.to_pylist()]
            for row, length in enumerate(lengths):
                if length < 1:
                    raise DatasetError(f"row {row} of {self.path} has no tokens (seq_len {length})", "prepare it again")
            self._lengths = lengths
        return self._lengths

    def row(self, index: int) -> tuple[list[int], list[int]]:
        """`input_ids` and `loss_mask` of a row. Raises IndexError, and DatasetError where its three columns disagree."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has no row {index}: it has {len(self)}")
        row = self._rows[index]
        ids, mask = list(row["input_ids"]), [int(value) for value in row["loss_mask"]]
        if not len(ids) == len(mask) == self.lengths()[index]:
            raise DatasetError(
                f"row {index} of {self.path} has {len(ids)} input_ids, {len(mask)} loss_mask and seq_len {self.lengths()[index]}",
                "prepare it again",
            )
        return ids, mask

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change with the rows, and neither with the folder's place nor with who opens it.

        Covers the number of rows, every length, the tokens of 4,096 rows spread evenly (all where there are fewer), and the
        fingerprint that `datasets` gives each change of a dataset.
        """
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            state = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
            digest.update(json.dumps([state.get("_fingerprint"), self.lengths()]).encode())
            step = max(1, -(-len(self) // _FINGERPRINT_ROWS))
            for start in range(0, len(self), step * 256):
                wanted = range(start, min(start + step * 256, len(self)), step)
                ids = self._rows.select(wanted)[:]["input_ids"]
                digest.update(json.dumps([list(row) for row in ids]).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _splits(self) -> str:
        try:
            names: Any = json.loads((self.path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            return ", ".join(str(self.path / name) for name in names)
        except (OSError, ValueError, KeyError, TypeError):
            return "its folders"
