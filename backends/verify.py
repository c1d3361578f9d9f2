"""Is what an output folder holds what the model computes? Every file checked, some computed anew. Loads no torch by itself.

Writes nothing: neither the folder nor its files change.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from backends.dataset import PreparedDataset
from backends.environment import device_of
from backends.errors import Interrupted, JobError, one_line
from backends.events import EventLog
from backends.fingerprint import model_fingerprint
from backends.flattening import REMEDY as FLATTENED_REMEDY
from backends.progress import Progress
from backends.spec import VerifySpec
from backends.store import Entry, Manifest, StoreError, check_sample, file_dtype, read_manifest

# Bad files that are named one by one; beyond that only their number grows.
_NAMED = 20
# Files in flight to each reading thread.
_AHEAD = 4


class VerifyError(JobError):
    """A folder that cannot be verified, or whose files are not what they claim to be."""


def verify(spec: VerifySpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Checks every listed file, recomputes `spec.recompute` of them, and returns the fields of `finished`.

    Raises VerifyError naming the first bad file (after all of them were looked at), JobError, and Interrupted.
    """
    began = time.monotonic()
    output = Path(spec.output)
    manifest = _manifest(output)
    header = manifest.header
    dataset = _dataset(spec, header)
    model, device = _model(spec, header)
    total = len(manifest.entries)
    events.emit("started", verb="verify", total=total, already_done=0)
    progress = Progress(events, total=total)
    progress.phase = "checking files"
    bad: list[str] = []
    for entry, fault in _faults(output, manifest, dataset):
        if should_stop():
            raise Interrupted(f"stopped after {progress.done} of {total} files", progress.done, total)
        if fault is None:
            progress.add(samples=1, tokens=entry.tokens, nbytes=entry.bytes)
        else:
            progress.skipped += 1
            bad.append(fault)
            if len(bad) <= _NAMED:
                events.emit("warning", message=fault)
        progress.tell()
    progress.tell(now=True)
    unlisted, leftover = _others(output, manifest)
    for names, what in ((unlisted, "not listed in the manifest"), (leftover, "left over from a killed writer")):
        if names:
            events.emit("warning", message=f"{len(names)} files are {what}, such as {names[0]}")
    if bad:
        others = f" and {len(bad) - 1} more of {total}" if len(bad) > 1 else f", 1 of {total}"
        raise VerifyError(
            f"{bad[0]}{others}", "delete what is bad and run the same extraction again: it makes only those anew"
        )
    checks = _recompute(spec, manifest, events, should_stop, model, device)
    return {
        "done": total,
        "total": total,
        "tokens": progress.tokens,
        "bytes": progress.bytes,
        "elapsed_s": round(time.monotonic() - began, 3),
        "verified": total,
        "not_extracted": len(dataset) - total,
        "unlisted": len(unlisted),
        "leftover": len(leftover),
        "layer_ids": header["layer_ids"],
        "file_dtype": file_dtype(header),
        "output": spec.output,
        **checks,
    }


def choose(entries: Sequence[Entry], count: int, seed: int) -> list[int]:
    """The rows to recompute: the longest sample and `count` - 1 others, by chance; the same seed chooses the same."""
    if not entries or not count:
        return []
    longest = min(entries, key=lambda entry: (-entry.tokens, entry.row)).row
    rest = sorted(entry.row for entry in entries if entry.row != longest)
    return [longest, *random.Random(seed).sample(rest, min(count - 1, len(rest)))]


def _manifest(output: Path) -> Manifest:
    remedy = "give the folder that `extract` wrote"
    try:
        manifest = read_manifest(output)
    except StoreError as error:
        raise VerifyError(str(error), remedy) from None
    missing = [
        name for name in ("layer_ids", "hidden_size", "dtype", "dataset", "model") if name not in manifest.header
    ]
    if missing:
        raise VerifyError(f"the manifest of {output} does not say its {', '.join(missing)}", remedy)
    if not manifest.entries:
        raise VerifyError(f"the manifest of {output} lists no sample: there is nothing to verify", "extract first")
    return manifest


def _dataset(spec: VerifySpec, header: dict[str, Any]) -> PreparedDataset:
    dataset = PreparedDataset(spec.dataset or header["dataset"])
    expected = header.get("dataset_fingerprint")
    if expected is not None and dataset.fingerprint != expected:
        raise VerifyError(
            f"the dataset {dataset.path} is not the one that was extracted (its content differs)",
            "name the right one with `dataset`, or extract from this one into another folder",
        )
    return dataset


def _faults(output: Path, manifest: Manifest, dataset: PreparedDataset) -> Iterator[tuple[Entry, str | None]]:
    """Each listed sample in order with what is wrong with its file, read by a few threads ahead of the caller."""
    header = manifest.header
    threads = min(8, os.cpu_count() or 1)

    def fault(entry: Entry, token_ids: list[int]) -> str | None:
        path = output / entry.file
        if entry.file != f"hs_{entry.row}.safetensors":
            return f"the manifest lists row {entry.row} as {entry.file}"
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"{entry.file} is listed and cannot be read: {error.strerror or one_line(error)}"
        if size != entry.bytes or entry.tokens != len(token_ids):
            return f"{entry.file} has {size} bytes for {len(token_ids)} tokens; the manifest says {entry.bytes} for {entry.tokens}"
        try:
            check_sample(header, path, token_ids)
        except StoreError as error:
            return one_line(error)
        return None

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        waiting: list[tuple[Entry, Future[str | None]]] = []
        try:
            for row in sorted(manifest.entries):
                entry = manifest.entries[row]
                if not 0 <= row < len(dataset):
                    yield entry, f"{entry.file} is listed, and the dataset has no row {row}"
                    continue
                waiting.append((entry, pool.submit(fault, entry, dataset.row(row)[0])))
                if len(waiting) >= threads * _AHEAD:
                    first, answer = waiting.pop(0)
                    yield first, answer.result()
            while waiting:
                first, answer = waiting.pop(0)
                yield first, answer.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _others(output: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Names in the folder that the manifest does not list: hidden-state files, and a writer's temporary ones."""
    listed = {entry.file for entry in manifest.entries.values()}
    names = sorted(path.name for path in output.iterdir())
    unlisted = [name for name in names if name.startswith("hs_") and name not in listed]
    return unlisted, [name for name in names if name.startswith(".tmp-")]


def _model(spec: VerifySpec, header: dict[str, Any]) -> tuple[Path, str]:
    """The model to recompute with and its device, both checked before the files are read. Raises JobError."""
    model = Path(spec.model or header["model"])
    if not spec.recompute:
        return model, "cpu"
    if not (model / "config.json").is_file():
        raise VerifyError(
            f"the model {model} has no config.json", "name its folder with `model`, or verify without recomputing"
        )
    expected = header.get("model_fingerprint")
    if expected is not None and model_fingerprint(model) != expected:
        raise VerifyError(
            f"the model {model} is not the one that was extracted (its weights or config.json differ)",
            "name the right one with `model`, or extract with this one into another folder",
        )
    return model, device_of(spec)


def _recompute(
    spec: VerifySpec,
    manifest: Manifest,
    events: EventLog,
    should_stop: Callable[[], bool],
    model: Path,
    device: str,
) -> dict[str, Any]:
    rows = choose(list(manifest.entries.values()), spec.recompute, spec.seed)
    if not rows:
        return {"recomputed": 0, "recomputed_worst_error": None, "worst_row": None, "worst_error_by_layer": {}}
    events.emit("phase", phase="loading the model in float32")
    from backends.recompute import PlainForward, SlotCheck, describe, flattened, summary

    forward = PlainForward(model, device)
    layer_ids = manifest.header["layer_ids"]
    if max(layer_ids) > forward.num_layers:
        raise VerifyError(
            f"the model {forward.model} has {forward.num_layers} blocks and no layer id {max(layer_ids)}",
            "name the model that was extracted with `model`",
        )
    checks: dict[int, list[SlotCheck]] = {}
    for row in rows:
        if should_stop():
            raise Interrupted(
                f"stopped after {len(checks)} of {len(rows)} were recomputed",
                len(manifest.entries),
                len(manifest.entries),
            )
        events.emit("phase", phase=f"recomputing {len(checks) + 1} of {len(rows)}")
        entry = manifest.entries[row]
        checks[row] = forward.check(Path(spec.output) / entry.file, layer_ids)
        fault = describe(checks[row], manifest.header["dtype"], file_dtype(manifest.header))
        if fault is not None:
            raise VerifyError(
                f"{entry.file} is not what the model computes: {fault}",
                "delete it and extract again; if it comes back the same, the model is not the one that was extracted",
            )
        flat = flattened(checks[row])
        if flat is not None:
            raise VerifyError(f"{entry.file} is what the model computes, but {flat}", FLATTENED_REMEDY)
    return summary(checks)
