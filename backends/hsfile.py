"""One hidden-state file: `hs_<row>.safetensors`, as the speculators trainer (0.9.0) reads it. Loads no torch.

It holds `hidden_states` [T, L, H] in the model's dtype and `token_ids` [T] int64; where the states are float8_e4m3fn also
`hidden_states_scales` [T, 1, 1] float32, and the states are value * scale (`fp8`). Its bytes are checked *before* it gets
that name, so whatever has the name is whole. Without torch the states are raw bits: `read_states` makes float32 of them.
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
from backends.fp8 import FLOAT8

TMP_PREFIX = ".tmp-"

# dtype of torch: (name in safetensors, raw integer of the same size, bits that are all set only in inf and NaN)
_FORMATS: dict[str, tuple[str, type[np.unsignedinteger[Any]], int]] = {
    "bfloat16": ("BF16", np.uint16, 0x7F80),
    "float16": ("F16", np.uint16, 0x7C00),
    "float32": ("F32", np.uint32, 0x7F800000),
    # It has no infinity, and one NaN.
    FLOAT8: ("F8_E4M3", np.uint8, 0x7F),
}
SCALES = "hidden_states_scales"
_LARGEST_HEADER = 1 << 20
_BLOCK_TOKENS = 64


def _float8_values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 bit patterns; two are NaN, none is infinite."""
    patterns = np.arange(256)
    exponent, mantissa = (patterns >> 3) & 15, patterns & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(patterns & 127) == 127] = np.nan
    return np.where(patterns & 128, -size, size).astype(np.float32)


FLOAT8_VALUES = _float8_values()

Bits = npt.NDArray[np.unsignedinteger[Any]]
Scales = npt.NDArray[np.float32]


class StoreError(Exception):
    """A hidden-state file or a manifest that is not what it must be: one line."""


class StatesError(StoreError):
    """A whole file whose values cannot be a model's states."""


class MisfitError(StoreError):
    """A whole file of another shape or dtype than it must be. shape: of its `hidden_states`; dtype: torch's name."""

    def __init__(self, message: str, sample: SampleFile) -> None:
        super().__init__(message)
        self.shape: tuple[int, ...] = tuple(sample.states.shape)
        self.dtype = sample.dtype


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
    """What a file holds. states: raw bits [T, L, H]; token_ids: [T] int64; dtype: torch's name; scales: [T, 1, 1] of float8."""

    states: Bits
    token_ids: npt.NDArray[np.int64]
    dtype: str
    scales: Scales | None = None

    def values(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        """The states of the tokens [begin, end) as float32 [T, L, H], exactly what is stored; float8 is dequantised."""
        bits = self.states[begin:end]
        if self.scales is not None:
            values: npt.NDArray[np.float32] = np.take(FLOAT8_VALUES, bits)
            values *= self.scales[begin:end]
            return values
        if self.dtype == "bfloat16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return bits.view(np.float16 if self.dtype == "float16" else np.float32).astype(np.float32)


def file_name(row: int) -> str:
    return f"hs_{row}.safetensors"


def bytes_per_token(layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one token on the disk, its id included; the file's header is not counted."""
    scale = 4 if dtype == FLOAT8 else 0
    return layers * hidden_size * np.dtype(_FORMATS[dtype][1]).itemsize + scale + 8


def check_states(states: Bits, dtype: str) -> None:
    """Raises StatesError where a value is not finite, a slot is all zero or two neighbouring slots are identical.

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
            raise StatesError(f"slot {slot} of token {begin + token} holds a value that is not finite")
        nonzero |= largest.any(axis=0)
        if not differs.all():
            differs |= (block[:, 1:] != block[:, :-1]).any(axis=(0, 2))
    if not nonzero.all():
        why = " in float8: another slot's values are too large beside its own" if dtype == FLOAT8 else ""
        raise StatesError(f"slot {int(np.argmin(nonzero))} is all zero{why}")
    if not differs.all():
        slot = int(np.argmin(differs))
        raise StatesError(f"slots {slot} and {slot + 1} are identical")


def check_scales(scales: Scales | None, tokens: int) -> None:
    """Raises StatesError where there is not one finite scale above 0 a token."""
    if scales is None or scales.shape != (tokens, 1, 1):
        shape = None if scales is None else list(scales.shape)
        raise StatesError(f"{SCALES} has the shape {shape} instead of {[tokens, 1, 1]}")
    bad = ~(np.isfinite(scales) & (scales > 0))
    if bad.any():
        token = int(np.argmax(bad))
        raise StatesError(f"the scale of token {token} is {float(scales[token, 0, 0])}, not a finite number above 0")


def write_sample(
    folder: Path,
    row: int,
    states: Bits,
    token_ids: npt.NDArray[np.int64],
    *,
    dtype: str,
    layers: int,
    hidden_size: int,
    scales: Scales | None = None,
) -> Entry:
    """Writes one validated file: a temporary name, fsync, rename. Raises StoreError and OSError (a full disk).

    states: raw bits [T, L, H] of `dtype`, in C order; token_ids: [T]; scales: [T, 1, 1], for float8 only.
    """
    if states.shape != (len(token_ids), layers, hidden_size) or not len(token_ids):
        raise StoreError(f"shape {list(states.shape)} instead of {[len(token_ids), layers, hidden_size]}")
    if dtype == FLOAT8:
        check_scales(scales, len(token_ids))
    check_states(states, dtype)
    parts: dict[str, tuple[str, npt.NDArray[Any]]] = {
        "hidden_states": (_FORMATS[dtype][0], np.ascontiguousarray(states)),
        "token_ids": ("I64", np.ascontiguousarray(token_ids, dtype=np.int64)),
    }
    if scales is not None:
        # The widest first, so that every tensor stands where its values may be read in place.
        parts = {
            "token_ids": parts["token_ids"],
            SCALES: ("F32", np.ascontiguousarray(scales, dtype=np.float32)),
            "hidden_states": parts["hidden_states"],
        }
    described: dict[str, Any] = {}
    end = 0
    for name, (kind, array) in parts.items():
        described[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    name = file_name(row)
    temporary = folder / f"{TMP_PREFIX}{os.getpid()}-{threading.get_ident()}-{next(_numbers)}-{name}"
    # Written by hand, not by safetensors: its writer copies every tensor into Python bytes first, under the GIL.
    try:
        with temporary.open("wb", buffering=0) as file:
            write_all(file.fileno(), memoryview(struct.pack("<Q", len(header)) + header))
            for _, array in parts.values():
                write_all(file.fileno(), memoryview(array.data).cast("B"))
            os.fsync(file.fileno())
        temporary.replace(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Entry(row, name, len(token_ids), 8 + len(header) + end)


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
                f"{path.name} holds {states['dtype']} and {ids['dtype']}, not one of {', '.join(_FORMATS)} and I64"
            )
        bits = data[slice(*states["data_offsets"])].view(_FORMATS[dtype][1]).reshape(states["shape"])
        token_ids = data[slice(*ids["data_offsets"])].view(np.int64).reshape(ids["shape"])
        scales = _scales(path, data, tensors) if dtype == FLOAT8 else None
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {one_line(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise StoreError(f"{path.name} is not a hidden-state file: {type(error).__name__} {one_line(error)}") from None
    return SampleFile(bits, token_ids, dtype, scales)


def _scales(path: Path, data: npt.NDArray[np.uint8], tensors: dict[str, Any]) -> Scales:
    if SCALES not in tensors:
        raise StoreError(f"{path.name} holds {FLOAT8} and no {SCALES}")
    found = tensors[SCALES]
    if found["dtype"] != "F32":
        raise StoreError(f"{path.name}: {SCALES} is {found['dtype']}, not F32")
    values: Scales = data[slice(*found["data_offsets"])].view(np.float32).reshape(found["shape"])
    return values


def read_states(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The hidden states of a file as float32 [T, L, H], float8 dequantised, and its token ids [T]. Raises StoreError.

    bfloat16 and float16 become float32 without loss. For long samples read by parts: `read_file(path).values(begin, end)`.
    """
    sample = read_file(path)
    if sample.states.ndim != 3:
        raise StoreError(f"{path.name}: hidden_states has the shape {list(sample.states.shape)}, not [T, L, H]")
    if sample.dtype == FLOAT8:
        try:
            check_scales(sample.scales, len(sample.states))
        except StoreError as error:
            raise StoreError(f"{path.name}: {error}") from None
    return sample.values(), np.array(sample.token_ids)


def check_file(path: Path, *, token_ids: Sequence[int], layers: int, hidden_size: int, dtype: str) -> None:
    """Raises StoreError where a file is not the hidden states of these tokens in `layers` slots of this dtype."""
    sample = read_file(path)
    if sample.dtype != dtype:
        raise MisfitError(f"{path.name} holds {sample.dtype}, not {dtype}", sample)
    if sample.states.shape != (len(token_ids), layers, hidden_size):
        raise MisfitError(
            f"{path.name}: shape {list(sample.states.shape)} instead of {[len(token_ids), layers, hidden_size]}",
            sample,
        )
    if not np.array_equal(sample.token_ids, np.asarray(token_ids, dtype=np.int64)):
        raise StoreError(f"{path.name}: token_ids differ from the dataset's")
    try:
        if dtype == FLOAT8:
            check_scales(sample.scales, len(token_ids))
        check_states(sample.states, dtype)
    except StatesError as error:
        raise StatesError(f"{path.name}: {error}") from None
