"""The demo as one job: a tiny model, real conversations, extraction, verification. Loads no torch by itself."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.conversations import Conversation, Records
from backends.errors import Interrupted, JobError, one_line
from backends.events import EventLog
from backends.spec import DemoSpec, ExtractSpec, PrepareSpec, VerifySpec

DATA = Path(__file__).parent / "data"
INPUTS = ("gsm8k-test-220.jsonl", "mt-bench.jsonl")
# In the output folder: what it is, so that nothing else is ever written into or taken for a demo.
RECORD = "demo.json"
_RATES = ("samples_per_s", "tokens_per_s", "bytes_per_s")
# The tiny states are a few megabytes; the floor of a real extraction would refuse a laptop's last gigabyte.
_MIN_FREE_BYTES = 64 << 20


class StepEvents(EventLog):
    """What a step of a larger job may say: its beginning and its end are the larger job's to tell."""

    _KEPT = frozenset({"progress", "worker", "warning", "phase"})

    def __init__(self, events: EventLog, step: str) -> None:
        super().__init__(None)
        self._events = events
        self._step = step

    def emit(self, event: str, **fields: Any) -> None:
        if event not in self._KEPT:
            return
        if "phase" in fields:
            fields["phase"] = f"{self._step}: {fields['phase']}" if fields["phase"] else self._step
        self._events.emit(event, **fields)


def demo(spec: DemoSpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Runs the whole loop in `spec.output` and returns the fields of `finished`.

    What an interrupted demo of the same spec finished is not done again; the rates are those of the run that extracted.
    Raises JobError and Interrupted.
    """
    from backends.prepare import prepare
    from backends.runner import extract
    from backends.verify import verify

    began = time.monotonic()
    # A model this small is slower on several threads, and by a multiple where the cores are shared.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    output = Path(spec.output).absolute()
    model, data = output / "model", output / "data"
    inputs = tuple(str(DATA / name) for name in INPUTS)
    total = Records(inputs, spec.samples, spec.seed).samples
    rates = _open(output, spec)
    events.emit("started", verb="demo", total=total, already_done=0)
    if not model.is_dir():
        events.emit("phase", phase="building a tiny model")
        _build(spec, model, inputs)
    if should_stop():
        raise Interrupted("stopped after the model was built", 0, total)
    prepared = prepare(
        PrepareSpec(model=str(model), inputs=inputs, output=str(data), limit=spec.samples, shuffle_seed=spec.seed),
        StepEvents(events, "preparing"),
        should_stop,
    )
    extracted = extract(
        ExtractSpec(
            model=str(model),
            dataset=str(data),
            output=str(data / "hidden_states"),
            layers=spec.layers,
            dtype=spec.dtype,
            device=spec.device,
            gpus=spec.gpus,
            pack_tokens=spec.pack_tokens,
            min_free_bytes=_MIN_FREE_BYTES,
        ),
        StepEvents(events, "extracting"),
        should_stop,
    )
    if extracted.get("samples_per_s") is not None:
        rates = {name: extracted[name] for name in _RATES}
        _record(output, spec, rates)
    verified = verify(
        VerifySpec(
            output=extracted["output"],
            recompute=spec.recompute,
            device=spec.device,
            gpus=spec.gpus,
            seed=spec.seed,
        ),
        StepEvents(events, "verifying"),
        should_stop,
    )
    return {
        "done": verified["verified"],
        "total": prepared["samples"],
        "samples": prepared["samples"],
        "tokens": prepared["tokens"],
        **rates,
        "bytes": verified["bytes"],
        "verified": verified["verified"],
        "recomputed": verified["recomputed"],
        "recomputed_worst_error": verified["recomputed_worst_error"],
        "layer_ids": verified["layer_ids"],
        "output": extracted["output"],
        "model": str(model),
        "dataset": str(data),
        "manifest": extracted["manifest"],
        "elapsed_s": round(time.monotonic() - began, 3),
    }


def _open(output: Path, spec: DemoSpec) -> dict[str, Any]:
    """Makes the folder, or goes on with an earlier demo of the same spec; its rates. Raises JobError."""
    remedy = "delete it or give another output folder"
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
        made_of, rates = record["spec"], {name: record["rates"].get(name) for name in _RATES}
    except FileNotFoundError:
        if output.is_dir() and any(output.iterdir()):
            raise JobError(f"the output {output} exists and holds no demo", remedy) from None
        rates = dict.fromkeys(_RATES)
        _record(output, spec, rates)
        return rates
    except NotADirectoryError:
        raise JobError(f"the output {output} is a file", remedy) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"{output / RECORD} cannot be read: {one_line(error)}", remedy) from None
    if made_of != _made_of(spec):
        changed = [name for name, value in _made_of(spec).items() if made_of.get(name) != value]
        raise JobError(f"the output {output} holds another demo (differs in {', '.join(changed)})", remedy)
    return rates


def _made_of(spec: DemoSpec) -> dict[str, Any]:
    """The fields that what the folder holds depends on."""
    fields = spec.to_json()
    return {name: fields[name] for name in ("samples", "family", "blocks", "hidden", "layers", "dtype", "seed")}


def _record(output: Path, spec: DemoSpec, rates: dict[str, Any]) -> None:
    text = json.dumps({"spec": _made_of(spec), "rates": rates}, indent=2) + "\n"
    try:
        output.mkdir(parents=True, exist_ok=True)
        temporary = output / f".{RECORD}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output / RECORD)
    except OSError as error:
        raise _unwritable(output, error) from None


def _build(spec: DemoSpec, model: Path, inputs: tuple[str, ...]) -> None:
    """Builds beside its place and renames: a model folder that exists is whole."""
    from transformers.utils import logging

    from backends.demo.model import build_model

    logging.disable_progress_bar()
    texts = [
        str(message["content"])
        for conversation in Records(inputs)
        if isinstance(conversation, Conversation)
        for message in conversation.messages
    ]
    building = model.with_name(".model.building")
    try:
        shutil.rmtree(building, ignore_errors=True)
        build_model(building, texts, family=spec.family, layers=spec.blocks, hidden=spec.hidden, seed=spec.seed)
        building.rename(model)
    except OSError as error:
        raise _unwritable(model, error) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _unwritable(path: Path, error: OSError) -> JobError:
    reason = error.strerror or one_line(error)
    return JobError(f"{path} cannot be written: {reason}", "free space or give another output folder")
