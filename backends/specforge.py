"""SpecForge's offline files for DFlash: one `torch.save` dict a sample. Importing this loads no torch.

`rows_<a>-<b>/data_<row>.ckpt` holds `input_ids` [T] and `loss_mask` [T] int64, and `hidden_states` [1, T, K * H]: the K
slots of a token one behind the other, in the model's dtype. The last layer's slot stays out: SpecForge's DFlash learns the
tokens themselves. Its reader takes every `*.ckpt` below a folder; `specforge.json` beside them is ours, and says the layers
in SpecForge's numbering (`layers.from_trainer`).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from backends.errors import JobError, one_line
from backends.fp8 import FLOAT8
from backends.hsfile import TMP_PREFIX, SampleFile
from backends.layers import LayerError, from_trainer
from backends.store import file_dtype

FILE = "specforge.json"
VERSION = 1

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# The most that the archive adds to a sample's bytes: names, alignment and directory of four entries.
_ARCHIVE_BYTES = 4096
_numbers = count()


@dataclass(frozen=True, slots=True)
class Layout:
    """What of an extraction goes into SpecForge's files.

    slots: the first so many of the L slots; layer_ids: theirs, in the trainer's numbering; target_layer_ids: the same in
    SpecForge's; dtype: of the states, torch's name.
    """

    slots: int
    layer_ids: tuple[int, ...]
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Layout:
        """The layout for a manifest. Raises JobError where its layers have no place in SpecForge's files."""
        ids, blocks = list(header["layer_ids"]), header["num_layers"]
        kept = tuple(ids[:-1] if ids[-1] == blocks else ids)
        if not kept:
            raise JobError(
                f"the only layer id is {ids[-1]}, the last one, which SpecForge's files do not hold",
                "extract more layers, as the preset dflash does",
            )
        try:
            target = from_trainer(kept, "specforge", blocks)
        except LayerError as error:
            raise JobError(
                str(error).removeprefix("layers: "), "extract other layers, as the preset dflash does"
            ) from None
        return cls(len(kept), kept, target, header["hidden_size"], header["dtype"])

    def file_bytes(self, tokens: int) -> int:
        """The most bytes that the file of a sample takes."""
        return tokens * (self.slots * self.hidden_size * _ITEM_BYTES[self.dtype] + 16) + _ARCHIVE_BYTES


def file_of(folder: Path, row: int, rows_per_folder: int) -> Path:
    """Where the file of a row is, or will be."""
    first = row // rows_per_folder * rows_per_folder
    return folder / f"rows_{first}-{first + rows_per_folder}" / f"data_{row}.ckpt"


def can_train(loss_mask: Sequence[int]) -> bool:
    """Whether SpecForge takes a sample: it stops at one without two supervised tokens in a row."""
    return any(a and b for a, b in pairwise(loss_mask))


def write(path: Path, sample: SampleFile, loss_mask: Sequence[int], layout: Layout) -> int:
    """Writes one file: a temporary name, fsync, rename. Its bytes. Raises OSError (a full disk).

    sample: checked, with the states of all slots [T, L, H]; float8 is dequantised.
    """
    import torch

    dtype = getattr(torch, layout.dtype)
    if sample.dtype == FLOAT8:
        # In float32 and rounded once; the trainer's own reader multiplies in bfloat16.
        states = torch.from_numpy(sample.values()[:, : layout.slots]).to(dtype)
    else:
        bits = np.array(sample.states[:, : layout.slots])  # a copy, or the last slot would be saved as well
        states = torch.from_numpy(bits.view(np.dtype(f"i{bits.itemsize}"))).view(dtype)
    record = {
        "input_ids": torch.from_numpy(np.array(sample.token_ids)),
        "loss_mask": torch.tensor(loss_mask, dtype=torch.int64),
        "hidden_states": states.reshape(1, len(states), layout.slots * layout.hidden_size).contiguous(),
    }
    # A name that the reader does not take for a sample.
    temporary = path.with_name(f"{TMP_PREFIX}{os.getpid()}-{threading.get_ident()}-{next(_numbers)}")
    try:
        with temporary.open("wb") as file:
            torch.save(record, file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch tells of a failed write with an error of its own, which has OSError as its context.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return size


def is_whole(path: Path, token_ids: Sequence[int], loss_mask: Sequence[int], layout: Layout) -> bool:
    """Whether a file holds this sample in this layout. Its states are not read, only their shape and dtype."""
    import torch

    try:
        record = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        states = record["hidden_states"]
        return (
            set(record) == {"input_ids", "loss_mask", "hidden_states"}
            and tuple(states.shape) == (1, len(token_ids), layout.slots * layout.hidden_size)
            and states.dtype == getattr(torch, layout.dtype)
            and record["input_ids"].tolist() == list(token_ids)
            and record["loss_mask"].tolist() == list(loss_mask)
        )
    except Exception:  # torch and pickle raise many kinds for a file that is not whole: then it is written anew
        return False


def description(header: Mapping[str, Any], layout: Layout, rows_per_folder: int) -> dict[str, Any]:
    """What `specforge.json` says; two exports into one folder must agree in all of it."""
    return {
        "specforge": VERSION,
        "strategy": "dflash",
        "target_layer_ids": list(layout.target_layer_ids),
        "layer_ids": list(layout.layer_ids),
        "num_layers": header["num_layers"],
        "hidden_size": layout.hidden_size,
        "dtype": layout.dtype,
        "from_file_dtype": file_dtype(header),
        "rows_per_folder": rows_per_folder,
        "model": header["model"],
        "model_fingerprint": header.get("model_fingerprint"),
        "dataset": header["dataset"],
        "dataset_fingerprint": header.get("dataset_fingerprint"),
    }


# Where the model and the dataset lie may change between two exports.
_PLACES = ("model", "dataset")


def check_described(folder: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether a folder holds an export like this one; False where it holds none. Raises JobError where it holds another."""
    path = folder / FILE
    remedy = "give another folder, or delete it"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        differs = [name for name in wanted if name not in _PLACES and found.get(name) != wanted[name]]
    except FileNotFoundError:
        if any(folder.glob("rows_*/data_*.ckpt*")):
            raise JobError(f"{folder} holds SpecForge files but no {FILE} that says of what", remedy) from None
        return False
    except NotADirectoryError:
        raise JobError(f"{folder} is a file", "give a folder") from None
    except (OSError, ValueError, AttributeError) as error:
        raise JobError(f"{path} cannot be read: {one_line(error)}", remedy) from None
    if differs:
        name = differs[0]
        raise JobError(f"{folder} holds another export ({name}: {found.get(name)} there, {wanted[name]} here)", remedy)
    return True
