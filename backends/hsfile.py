"""One hidden-state file: `hs_<row>.safetensors`, as the speculators trainer (0.9.0) reads it. Loads no torch.

It holds `hidden_states` [T, L, H] in the model's dtype and `token_ids` [T] int64. Its bytes are checked *before* it gets
that name, so whatever has the name is whole.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.errors import one_line

TMP_PREFIX = ".tmp-"

# dtype of torch: (name in safetensors, raw integer of the same size, bits that are all set only in inf and NaN)
_FORMATS: dict[str, tuple[str, type[np.unsignedinteger[Any]], int]] = {
    "bfloat16": ("BF16", np.uint16, 0x7F80),
    "float16": ("F16", np.uint16, 0x7C00),
    "float32": ("F32", np.uint32, 0x7F800000),
}
_LARGEST_HEADER = 1 << 20
_BLOCK_TOKENS = 64

Bits = npt.NDArray[np.unsignedinteger[Any]]


class StoreError(Exception):
    """A hidden-state file or a manifest that is not what it must be: one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample of the manifest. tokens: T. bytes: size of the file."""

    row: int
    file: str
    tokens: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"row": self.row, "file": self.file, "tokens": self.tokens, "bytes": self.bytes}


@dataclass(frozen=True, slots=True)
class SampleFile:
    """What a file holds. states: raw bits [T, L, H]; token_ids: [T] int64; dtype: torch's name."""

    states: Bits
    token_ids: npt.NDArray[np.int64]
    dtype: str


def file_name(row: int) -> str:
    return f"hs_{row}.safetensors"


def bytes_per_token(layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one token on the disk, its id included; the file's header is not counted."""
    return layers * hidden_size * np.dtype(_FORMATS[dtype][1]).itemsize + 8


def check_states(states: Bits, dtype: str) -> None:
    """Raises StoreError where a value is not finite, a slot is all zero or two neighbouring slots are identical.

    states: raw bits [T, L, H] of `dtype`.
    """
    exponent = _FORMATS[dtype][2]
    tokens, slots, _ = states.shape
    nonzero = np.zeros(slots, dtype=bool)
    differs = np.zeros(max(slots - 1, 0), dtype=bool)
    magnitude = ~(1 << (8 * states.itemsize - 1)) & ((1 << (8 * states.itemsize)) - 1)
    # By blocks of tokens, so that the passes over one block stay in the cache.
    for begin in range(0, tokens, _BLOCK_TOKENS):
        block = states[begin : begin + _BLOCK_TOKENS]
        largest = (block & states.dtype.type(magnitude)).max(axis=2)
        bad = largest >= exponent
        if bad.any():
            token, slot = (int(index) for index in np.argwhere(bad)[0])
            raise StoreError(f"slot {slot} of token {begin + token} holds a value that is not finite")
        nonzero |= largest.any(axis=0)
        if not differs.all():
            differs |= (block[:, 1:] != block[:, :-1]).any(axis=(0, 2))
    if not nonzero.all():
        raise StoreError(f"slot {int(np.argmin(nonzero))} is all zero")
    if not differs.all():
        slot = int(np.argmin(differs))
        raise StoreError(f"slots {slot} and {slot + 1} are identical")


def write_sample(
    folder: Path, row: int, states: Bits, token_ids: npt.NDArray[np.int64], *, dtype: str, layers: int, hidden_size: int
) -> Entry:
    """Writes one validated file: a temporary name, fsync, rename. Raises StoreError and OSError (a full disk).

    states: raw bits [T, L, H] of `dtype`, in C order; token_ids: [T].
    """
    if states.shape != (len(token_ids), layers, hidden_size) or not len(token_ids):
        raise StoreError(f"shape {list(states.shape)} instead of {[len(token_ids), layers, hidden_size]}")
    check_states(states, dtype)
    states = np.ascontiguousarray(states)
    token_ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    header = json.dumps(
        {
            "hidden_states": {
                "dtype": _FORMATS[dtype][0],
                "shape": list(states.shape),
                "data_offsets": [0, states.nbytes],
            },
            "token_ids": {
                "dtype": "I64",
                "shape": list(token_ids.shape),
                "data_offsets": [states.nbytes, states.nbytes + token_ids.nbytes],
            },
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)
    name = file_name(row)
    temporary = folder / f"{TMP_PREFIX}{os.getpid()}-{threading.get_ident()}-{next(_numbers)}-{name}"
    # Written by hand, not by safetensors: its writer copies every tensor into Python bytes first, under the GIL.
    try:
        with temporary.open("wb", buffering=0) as file:
            for part in (struct.pack("<Q", len(header)), header, states.data, token_ids.data):
                write_all(file.fileno(), memoryview(part).cast("B"))
            os.fsync(file.fileno())
        temporary.replace(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Entry(row, name, len(token_ids), 8 + len(header) + states.nbytes + token_ids.nbytes)


_numbers = count()


def write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def read_file(path: Path) -> SampleFile:
    """Maps one file. Raises StoreError where it is not a whole hidden-state file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 0 < length <= min(_LARGEST_HEADER, size - 8):
                raise StoreError(f"{path.name} is truncated or not a safetensors file")
            header = json.loads(file.read(length))
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        if max(value["data_offsets"][1] for value in tensors.values()) != len(data):
            raise StoreError(f"{path.name} is truncated or has bytes too many")
        states, ids = tensors["hidden_states"], tensors["token_ids"]
        dtype = next((name for name, known in _FORMATS.items() if known[0] == states["dtype"]), None)
        if dtype is None or ids["dtype"] != "I64":
            raise StoreError(
                f"{path.name} holds {states['dtype']} and {ids['dtype']}, not one of {', '.join(_FORMATS)}"
            )
        bits = data[slice(*states["data_offsets"])].view(_FORMATS[dtype][1]).reshape(states["shape"])
        token_ids = data[slice(*ids["data_offsets"])].view(np.int64).reshape(ids["shape"])
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {one_line(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise StoreError(f"{path.name} is not a hidden-state file: {type(error).__name__} {one_line(error)}") from None
    return SampleFile(bits, token_ids, dtype)


def check_file(path: Path, *, token_ids: Sequence[int], layers: int, hidden_size: int, dtype: str) -> None:
    """Raises StoreError where a file is not the hidden states of these tokens in `layers` slots of this dtype."""
    sample = read_file(path)
    if sample.dtype != dtype:
        raise StoreError(f"{path.name} holds {sample.dtype}, not {dtype}")
    if sample.states.shape != (len(token_ids), layers, hidden_size):
        raise StoreError(
            f"{path.name}: shape {list(sample.states.shape)} instead of {[len(token_ids), layers, hidden_size]}"
        )
    if not np.array_equal(sample.token_ids, np.asarray(token_ids, dtype=np.int64)):
        raise StoreError(f"{path.name}: token_ids differ from the dataset's")
    try:
        check_states(sample.states, dtype)
    except StoreError as error:
        raise StoreError(f"{path.name}: {error}") from None
