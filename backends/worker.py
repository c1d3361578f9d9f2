"""One extraction worker: packs in on stdin, results out on stdout, JSON lines both ways. Started by `workers`.

in:  {"op": "start", "spec": {...}, "layer_ids": [...], "device": "cuda" or "cpu", "gpu": UUID or null}, once;
     {"op": "pack", "id": n, "rows": [...]}; {"op": "end"}.
out: phase {phase}; ready {device, packing, why_not, fallback}; done {id, entries: [[row, file, tokens, bytes]], bad: [[row, why]],
     float8: [[`flattening.FIGURES`] a layer] or null};
     oom {id, message}; disk {id, entries, message}; refused {message, remedy, status}; crash {message, starting}; ended.

When stdin closes the runner is gone, and so is the worker at once: what it was writing has a temporary name.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import JobError, one_line
from backends.fp8 import FLOAT8
from backends.spec import ExtractSpec

if TYPE_CHECKING:
    from backends.dataset import PreparedDataset
    from backends.hf.extractor import Extractor

ORPHANED, CRASHED = 4, 5


def _orphaned() -> None:
    os._exit(ORPHANED)


class Answers:
    """Writes JSON lines to the runner; from any thread. orphaned: called where the runner is gone."""

    def __init__(self, fd: int, orphaned: Callable[[], None] = _orphaned) -> None:
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._lock = threading.Lock()
        self._orphaned = orphaned

    def send(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                view = memoryview(line)
                while view:
                    view = view[self._file.write(view) :]
        except BrokenPipeError:
            self._orphaned()


def worker_main() -> int:
    """Runs one worker. Returns an exit status, or ends the process itself."""
    # The runner decides when to stop; ctrl+c in a terminal reaches every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print: the pipe to the runner moves away, and stdout becomes the log.
    answers = Answers(os.dup(1))
    os.dup2(2, 1)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True, name="orders").start()
    starting = True
    try:
        dataset, extractor = _start(orders.get(), answers)
        starting = False
        _work(orders, answers, dataset, extractor)
        return 0
    except JobError as error:
        answers.send("refused", message=error.message, remedy=error.remedy, status=error.status)
    except Exception as error:
        traceback.print_exc()
        # Transformers raises ImportError, or RuntimeError from inside torchvision, when it cannot import a model class.
        if starting and (isinstance(error, ImportError) or "torchvision" in str(error)):
            from backends.environment import import_remedy

            message, remedy = import_remedy(error)
            answers.send("refused", message=message, remedy=remedy, status=JobError.status)
        else:
            answers.send("crash", message=f"{type(error).__name__}: {one_line(error)}", starting=starting)
    return CRASHED


def _read_orders(orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        try:
            orders.put(json.loads(line))
        except ValueError:
            break  # half a line: the runner was killed while it wrote
    os._exit(ORPHANED)


def _start(order: dict[str, Any], answers: Answers) -> tuple[PreparedDataset, Extractor]:
    """Loads what the first order names, and answers `ready`."""
    answers.send("phase", phase="importing torch")
    import torch

    from backends.dataset import PreparedDataset
    from backends.hf.extractor import Extractor, is_out_of_memory

    spec = ExtractSpec.from_json(order["spec"])
    if order["device"] == "cuda":
        _check_gpu(order["gpu"])
    answers.send("phase", phase="loading the model")
    try:
        extractor = Extractor.open(
            Path(spec.model),
            order["layer_ids"],
            dtype=spec.dtype,
            device=order["device"],
            output=Path(spec.output),
            float8=spec.stored_dtype == FLOAT8,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise JobError(
            f"the model does not fit into the memory of {order['gpu'] or order['device']}: {one_line(error)}",
            "choose a device with more memory, or free it",
        ) from error
    name = torch.cuda.get_device_name(0) if order["device"] == "cuda" else "cpu"
    if extractor.kernels:
        print(f"gated delta nets by {extractor.kernels}", flush=True)
    answers.send(
        "ready", device=name, packing=extractor.packing, why_not=extractor.why_not, fallback=extractor.fallback
    )
    return PreparedDataset(spec.dataset), extractor


def _check_gpu(wanted: str | None) -> None:
    """Raises JobError where the device that this process sees is not the one that was asked for."""
    import torch

    if not torch.cuda.is_available():
        raise JobError(
            f"torch sees no CUDA device (asked for {wanted or 'any'})", "check the GPU's UUID and the node's driver"
        )
    found = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    if wanted and wanted.startswith("GPU-") and found is not None and f"GPU-{found}" != wanted:
        raise JobError(f"this worker got GPU-{found} instead of {wanted}", "check the GPU's UUID")


def _work(
    orders: queue.SimpleQueue[dict[str, Any]], answers: Answers, dataset: PreparedDataset, extractor: Extractor
) -> None:
    from backends.hf.extractor import PackResult, Sample, is_out_of_memory

    def teller(number: int) -> Any:
        def tell(result: PackResult | BaseException) -> None:
            if isinstance(result, BaseException):
                # An error of the device shows up when the copy is waited for; the device is not to be trusted after it.
                answers.send("crash", message=f"{type(result).__name__}: {one_line(result)}", starting=False)
                os._exit(CRASHED)
            entries = [[entry.row, entry.file, entry.tokens, entry.bytes] for entry in result.entries]
            if result.disk_error is not None:
                answers.send("disk", id=number, entries=entries, message=one_line(result.disk_error))
            else:
                bad = [list(item) for item in result.bad]
                answers.send("done", id=number, entries=entries, bad=bad, float8=result.float8_figures)

        return tell

    while (order := orders.get())["op"] == "pack":
        samples = [Sample(row, dataset.row(row)[0]) for row in order["rows"]]
        try:
            extractor.run(samples, teller(order["id"]))
        except JobError as error:
            raise JobError(f"rows {samples[0].row} to {samples[-1].row}: {error.message}", error.remedy) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = one_line(error)
        else:
            continue
        # Outside the handler: its traceback keeps the pack's tensors alive.
        _free_memory()
        answers.send("oom", id=order["id"], message=message)
    extractor.close()


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
