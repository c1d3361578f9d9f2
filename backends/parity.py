"""Are two output folders of one model, dataset and layers the same? Layer by layer, file by file. Loads no torch.

For every layer: the relative error |b - a| / |a| over all tokens together and its mean over tokens each by itself, the
cosine (mean, worst), the largest difference of one value as a share of the largest value (`worst_of_largest`, which is shown and
not judged: one value of the longest tail), and the sample that is worst. A layer is good where the larger of the two errors stays within what
the dtypes of both sides explain (`limits.pair_limit`). Only `parity.json` is written, into the folder that is judged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.flattening import write_json
from backends.fp8 import FLOAT8
from backends.hsfile import Entry, SampleFile, StoreError, read_file
from backends.limits import pair_limit
from backends.progress import Progress
from backends.spec import ParitySpec
from backends.store import Manifest, file_dtype, read_manifest, unwritable
from backends.verify import choose

FILE = "parity.json"
VERSION = 1

# Header fields in which the two folders must agree, and how to say them.
_BOUND = {
    "model_fingerprint": "models",
    "dataset_fingerprint": "datasets",
    "layer_ids": "layer ids",
    "hidden_size": "hidden sizes",
}
# Values of one side that are made float32 at a time, in each thread.
_CHUNK_VALUES = 4 << 20
# Tokens of a file on which it is looked whether a slot holds another layer.
_CROSS_TOKENS = 64
# So much nearer must another layer be for a slot to be that layer's.
_CLEARLY = 1.1
_AHEAD = 2
# A layer that is off and has so many of its values lost to 0 is flattened, not computed otherwise.
_LOST = 0.05

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two folders that may be compared. rows: those that both hold and that are compared, rising."""

    reference: Path
    output: Path
    first: Manifest
    second: Manifest
    rows: list[int]

    @property
    def layer_ids(self) -> list[int]:
        return list(self.second.header["layer_ids"])

    @property
    def dtypes(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(dtype, dtype of the files) of the reference and of the output."""
        first, second = self.first.header, self.second.header
        return (first["dtype"], file_dtype(first)), (second["dtype"], file_dtype(second))

    @property
    def tokens(self) -> int:
        return sum(self.second.entries[row].tokens for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(manifest.entries[row].bytes for manifest in (self.first, self.second) for row in self.rows)

    def limit(self, layer_id: int) -> float:
        return pair_limit(*self.dtypes, layer_id)


def open_pair(spec: ParitySpec) -> Pair:
    """The two folders of a spec. Raises JobError, in one line, where they cannot be compared."""
    reference, output = Path(spec.reference), Path(spec.output)
    if reference.resolve() == output.resolve():
        raise JobError(f"{output} would be compared with itself", "give two output folders")
    first, second = _manifest(reference), _manifest(output)
    for name, word in _BOUND.items():
        before, now = first.header.get(name), second.header.get(name)
        if before != now or now is None:
            shown = name.removesuffix("_fingerprint")
            there, here = first.header.get(shown), second.header.get(shown)
            more = " (their contents differ)" if shown != name else ""
            raise JobError(
                f"the two folders hold different {word}: {there} in {reference}, {here} in {output}{more}",
                "compare two extractions of one model, dataset and layers",
            )
    common = [first.entries[row] for row in sorted(first.entries.keys() & second.entries.keys())]
    if not common:
        raise JobError(f"{reference} and {output} have no sample in common", "extract the same samples into both")
    rows = choose(common, len(common) if spec.samples is None else spec.samples, spec.seed)
    return Pair(reference, output, first, second, sorted(rows))


def _manifest(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except StoreError as error:
        raise JobError(str(error), "give the folders that two extractions wrote") from None
    missing = [name for name in ("dtype", "layer_ids", "hidden_size") if name not in manifest.header]
    if missing:
        raise JobError(f"the manifest of {folder} does not say its {', '.join(missing)}", "extract anew")
    return manifest


def parity(spec: ParitySpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Compares the folders, writes `parity.json`, and returns the fields of `finished`; a bad verdict is a result.

    Raises JobError naming the file that cannot be compared, and Interrupted.
    """
    began = time.monotonic()
    pair = open_pair(spec)
    total = len(pair.rows)
    events.emit("started", verb="parity", total=total, already_done=0, layer_ids=pair.layer_ids)
    progress = Progress(events, total=total)
    progress.phase = "comparing"
    sums = Sums.zero(len(pair.layer_ids))
    worst = [(-1.0, -1)] * len(pair.layer_ids)
    for row, found, nbytes in _compared(pair):
        sums = sums + found
        worst = [max(old, (error, row)) for old, error in zip(worst, found.errors().tolist(), strict=True)]
        progress.add(samples=1, tokens=found.tokens, nbytes=nbytes)
        progress.tell()
        if should_stop() and progress.done < total:
            raise Interrupted(f"stopped after {progress.done} of {total} samples", progress.done, total)
    progress.tell(now=True)
    result = _verdict(pair, sums, worst)
    report = pair.output / FILE
    bound = {name: pair.second.header[name] for name in _BOUND}
    try:
        write_json(report, {"parity": VERSION, "created": round(time.time(), 3), **bound, **result})
    except OSError as error:
        raise unwritable(pair.output, error) from None
    for reason in result["reasons"]:
        events.emit("warning", message=reason)
    return {
        "done": total,
        "total": total,
        "bytes": progress.bytes,
        "elapsed_s": round(time.monotonic() - began, 3),
        "report": str(report),
        **result,
    }


@dataclass(frozen=True, slots=True)
class Sums:
    """What was seen of some tokens, by slot [L]. nearest: in how many files slot i is nearest to the reference's j, [L, L].

    error, size: |b - a|^2 and |a|^2 summed; by_token: |b - a| / |a| summed; cosine: summed; lost: values that only the
    reference has; worst_cosine: the smallest; apart, largest: the largest |b - a| and |a| of one value.
    """

    tokens: int
    error: Array
    size: Array
    by_token: Array
    cosine: Array
    lost: Array
    worst_cosine: Array
    apart: Array
    largest: Array
    nearest: Array

    @classmethod
    def zero(cls, slots: int) -> Sums:
        nothing = np.zeros(slots)
        return cls(
            0, nothing, nothing, nothing, nothing, nothing, np.ones(slots), nothing, nothing, np.zeros((slots, slots))
        )

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.tokens + other.tokens,
            self.error + other.error,
            self.size + other.size,
            self.by_token + other.by_token,
            self.cosine + other.cosine,
            self.lost + other.lost,
            np.minimum(self.worst_cosine, other.worst_cosine),
            np.maximum(self.apart, other.apart),
            np.maximum(self.largest, other.largest),
            self.nearest + other.nearest,
        )

    def together(self) -> Array:
        return np.sqrt(self.error / np.maximum(self.size, 1e-60))

    def errors(self) -> Array:
        """The larger of the relative error over all tokens together and its mean over tokens each by itself."""
        return np.maximum(self.together(), self.by_token / max(self.tokens, 1))

    def held(self) -> list[int]:
        """For each slot of the output, the reference's slot that it holds: another than its own only in most of the files."""
        best = self.nearest.argmax(1)
        most = self.nearest.max(1) * 2 > self.nearest.sum(1)
        held: list[int] = np.where(most, best, np.arange(len(best))).tolist()
        return held


def compare(reference: SampleFile, output: SampleFile) -> Sums:
    """Two files of the same tokens, by parts, in float32; what is summed is summed in float64."""
    tokens, slots, hidden = output.states.shape
    found = Sums.zero(slots)
    step = max(1, _CHUNK_VALUES // (slots * hidden))
    float8 = FLOAT8 in (reference.dtype, output.dtype)
    for begin in range(0, tokens, step):
        a, b = reference.values(begin, begin + step), output.values(begin, begin + step)
        lost = np.count_nonzero((a != 0) & (b == 0), axis=(0, 2)).astype(float) if float8 else np.zeros(slots)
        nearest = _nearest(a[:_CROSS_TOKENS], b[:_CROSS_TOKENS]) if begin == 0 else np.zeros((slots, slots))
        dot, size, ours = (_squares(x, y) for x, y in ((a, b), (a, a), (b, b)))
        largest = _largest(a)
        b -= a
        error = _squares(b, b)
        both = np.sqrt(size * ours)
        cosine = np.where(both > 0, np.clip(dot / np.maximum(both, 1e-60), -1, 1), (size == ours).astype(float))
        found += Sums(
            len(a),
            error.sum(0),
            size.sum(0),
            (np.sqrt(error) / np.maximum(np.sqrt(size), 1e-30)).sum(0),
            cosine.sum(0),
            lost,
            cosine.min(0),
            _largest(b),
            largest,
            nearest,
        )
    return found


def _largest(x: npt.NDArray[np.float32]) -> Array:
    """The largest absolute value of each slot, [L]."""
    found: Array = np.maximum(x.max((0, 2)), -x.min((0, 2))).astype(np.float64)
    return found


def _squares(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> Array:
    """The dot product of each token's slots, [t, L]."""
    found: Array = np.einsum("tlh,tlh->tl", x, y).astype(np.float64)
    return found


def _nearest(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Array:
    """1 at [i, j] where b's slot i is nearest to a's slot j, by |b_i - a_j| / |a_j| over all tokens; [L, L].

    Its own slot wins where no other is clearly nearer: values that layers share make two of them alike.
    """
    flat_a, flat_b = (x.transpose(1, 0, 2).reshape(x.shape[1], -1) for x in (a, b))
    ours, theirs = (np.einsum("lk,lk->l", x, x).astype(np.float64) for x in (flat_b, flat_a))
    dots = (flat_b @ flat_a.T).astype(np.float64)
    errors = np.sqrt(np.maximum(ours[:, None] - 2 * dots + theirs, 0) / np.maximum(theirs, 1e-60))
    np.fill_diagonal(errors, errors.diagonal() / _CLEARLY)
    found: Array = np.eye(len(errors))[errors.argmin(1)]
    return found


def _compared(pair: Pair) -> Iterator[tuple[int, Sums, int]]:
    """Each row with its sums and the bytes that were read, in order; a few files are under way at a time."""
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="parity") as pool:
        waiting: list[tuple[int, Future[tuple[Sums, int]]]] = []
        try:
            for row in pair.rows:
                waiting.append((row, pool.submit(_row, pair, row)))
                if len(waiting) >= threads * _AHEAD:
                    first, answer = waiting.pop(0)
                    yield first, *answer.result()
            while waiting:
                first, answer = waiting.pop(0)
                yield first, *answer.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _row(pair: Pair, row: int) -> tuple[Sums, int]:
    entries = pair.first.entries[row], pair.second.entries[row]
    a = _file(pair.reference, pair.first, entries[0])
    b = _file(pair.output, pair.second, entries[1])
    if not np.array_equal(a.token_ids, b.token_ids):
        raise JobError(
            f"{entries[1].file} holds other tokens in {pair.output} than in {pair.reference}",
            "`dflash-tui verify` tells which of the two is damaged",
        )
    found = compare(a, b)
    if not (np.isfinite(found.error).all() and np.isfinite(found.size).all()):
        raise JobError(
            f"{entries[1].file} holds a value that is not finite, in {pair.output} or in {pair.reference}",
            "`dflash-tui verify` tells which",
        )
    return found, entries[0].bytes + entries[1].bytes


def _file(folder: Path, manifest: Manifest, entry: Entry) -> SampleFile:
    header = manifest.header
    try:
        found = read_file(folder / entry.file)
    except StoreError as error:
        raise JobError(f"{folder}: {error}", "`dflash-tui verify` finds every damaged file") from None
    shape = (entry.tokens, len(header["layer_ids"]), header["hidden_size"])
    if found.states.shape != shape or found.token_ids.shape != shape[:1] or found.dtype != file_dtype(header):
        raise JobError(
            f"{folder / entry.file} holds {found.dtype} {list(found.states.shape)}, and its manifest says"
            f" {file_dtype(header)} {list(shape)}",
            "`dflash-tui verify` finds every damaged file",
        )
    return found


def _verdict(pair: Pair, sums: Sums, worst: list[tuple[float, int]]) -> dict[str, Any]:
    """The table by layer, the verdict, and why it is bad."""
    layers: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    values = max(sums.tokens * pair.second.header["hidden_size"], 1)
    held = sums.held()
    figures = zip(sums.together(), sums.by_token / sums.tokens, sums.errors(), sums.cosine / sums.tokens, strict=True)
    for slot, (together, by_token, error, cosine) in enumerate(figures):
        layer_id, limit = pair.layer_ids[slot], pair.limit(pair.layer_ids[slot])
        good = bool(error <= limit) and held[slot] == slot
        lost = sums.lost[slot] / values
        layers[str(layer_id)] = {
            "relative_error": _round(together),
            "relative_error_by_token": _round(by_token),
            "cosine": _round(cosine),
            "worst_cosine": _round(sums.worst_cosine[slot]),
            "worst_of_largest": _round(abs(sums.apart[slot]) / max(sums.largest[slot], 1e-60)),
            "worst_row": worst[slot][1],
            "worst_row_error": _round(worst[slot][0]),
            "lost_share": _round(lost),
            "limit": _round(limit),
            "good": good,
        }
        if good:
            continue
        if error <= limit or (held[slot] != slot and lost < _LOST):
            why = f"its states are nearer to the reference's layer id {pair.layer_ids[held[slot]]}"
        elif lost >= _LOST:
            why = f"float8 flattens it: {lost:.0%} of its values became 0"
        else:
            why = f"row {worst[slot][1]} is worst ({worst[slot][0]:.2g})"
        reasons.append(f"layer id {layer_id} is off by {error:.2g}, limit {limit:.2g}: {why}")
    sides = [
        {
            "dtype": manifest.header["dtype"],
            "file_dtype": file_dtype(manifest.header),
            "backend": manifest.header.get("backend"),
        }
        for manifest in (pair.first, pair.second)
    ]
    return {
        "verb": "parity",
        "verdict": "bad" if reasons else "good",
        "reasons": reasons,
        "samples": len(pair.rows),
        "tokens": sums.tokens,
        "layer_ids": pair.layer_ids,
        "layers": layers,
        "reference": str(pair.reference),
        "reference_format": sides[0],
        "output": str(pair.output),
        "output_format": sides[1],
    }


def _round(value: Any) -> float:
    """Six significant digits."""
    return float(f"{float(value):.6g}")
