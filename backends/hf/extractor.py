"""One model on one device: packs in, hidden-state files out, with copies and writes overlapped with the next pack."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from backends.errors import JobError, one_line
from backends.fp8 import FLOAT8
from backends.hf import fp8
from backends.hf.attention import pack_arguments
from backends.hf.capture import Capture
from backends.hf.deltanet import PackedDeltaNets
from backends.hf.families import model_shape, read_config
from backends.hf.loading import load_model
from backends.hf.proof import prove
from backends.hsfile import Entry, StoreError, write_sample

# Host buffers: one being filled, one being written, one free.
_BUFFERS = 3
# Each file is on the disk before it counts, and a disk that takes long for one takes many at the same time.
_WRITERS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the dataset and its tokens."""

    row: int
    token_ids: Sequence[int]


@dataclass(slots=True)
class PackResult:
    """What became of a pack. bad: rows whose states failed the checks, with the reason. disk_error: None if all was written.

    float8_figures: what float8 did to each layer of this pack (`flattening.FIGURES`), None for files in the model's dtype.
    """

    entries: list[Entry] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    disk_error: OSError | None = None
    float8_figures: list[list[float]] | None = None


class Extractor:
    """Runs packs through a model and writes one file a sample.

    packing: "packs", or "one sample at a time" where the proof at start failed; `why_not` then says what it found.
    kernels: what computes the gated delta nets of the model, "" where it has none; fallback: why that is PyTorch although other
    kernels are here, else "".
    float8: files hold float8 with a scale a token, made on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_ids: Sequence[int],
        *,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        output: Path,
        float8: bool = False,
    ) -> None:
        self.output = output
        self.layer_ids = tuple(layer_ids)
        self.packing = "packs"
        self.why_not = ""
        self.kernels = self.fallback = ""
        self._model = model
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._float8 = float8
        self._device = device
        self._capture = Capture(model, layer_ids)
        self._deltanets = PackedDeltaNets(model, device, dtype)
        self._writers = ThreadPoolExecutor(_WRITERS, "writer")
        self._finishers = ThreadPoolExecutor(_BUFFERS, "finisher")
        self._host: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._host.put(None)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch leaves its streams untyped
        self._prove()

    @classmethod
    def open(
        cls, folder: Path, layer_ids: Sequence[int], *, dtype: str, device: str, output: Path, float8: bool = False
    ) -> Extractor:
        """Loads the model of a folder. Raises JobError; torch's errors where the device has no room."""
        shape = model_shape(read_config(folder), folder)
        kind, place = getattr(torch, dtype), torch.device(device)
        return cls(
            load_model(folder, kind, place, layer_ids),
            layer_ids,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            dtype=kind,
            device=place,
            output=output,
            float8=float8,
        )

    @torch.inference_mode()
    def states(self, samples: Sequence[Sequence[int]]) -> torch.Tensor:
        """Hidden states [T, L, H] on the device of samples laid end to end (or one by one where packs are not proven)."""
        for ids in samples:
            self._check_ids(ids)
        lengths = [len(ids) for ids in samples]
        target = torch.empty(
            sum(lengths), len(self.layer_ids), self._hidden_size, dtype=self._dtype, device=self._device
        )
        if self.packing == "packs":
            self._forward(samples, target)
        else:
            for ids, part in zip(samples, torch.split(target, lengths), strict=True):
                self._forward([ids], part)
        return target

    def _forward(self, samples: Sequence[Sequence[int]], target: torch.Tensor) -> None:
        flat = torch.tensor([token for ids in samples for token in ids], dtype=torch.int64)
        if self._device.type == "cuda":
            flat = flat.pin_memory()
        self._capture.target, self._capture.filled = target, 0
        try:
            self._model(
                input_ids=flat.to(self._device, non_blocking=True).unsqueeze(0),
                use_cache=False,
                **pack_arguments([len(ids) for ids in samples], self._device),
            )
        finally:
            self._capture.target = None
        if self._capture.filled != len(self.layer_ids):
            raise RuntimeError(f"{self._capture.filled} of {len(self.layer_ids)} layers were seen")

    def _check_ids(self, ids: Sequence[int]) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            raise JobError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {self._vocab_size}",
                "prepare the dataset with this model's tokenizer",
            )

    def _prove(self) -> None:
        """Asks whether samples of a pack see each other; from now on one sample at a time where they do."""
        try:
            self.why_not = prove(self.states, self._vocab_size, self._dtype)
            again = bool(self.why_not) and self._deltanets.use_pytorch(self.why_not)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Kernels that are compiled for each size may fail at this one alone.
            again = self._deltanets.use_pytorch(f"{type(error).__name__}: {one_line(error)}")
            if not again:
                raise
        if again:
            self.why_not = prove(self.states, self._vocab_size, self._dtype)
        if self.why_not:
            self.packing = "one sample at a time"
            self.why_not = "; ".join(filter(None, [self._deltanets.why_not, self.why_not]))
        self.kernels, self.fallback = self._deltanets.kernels, self._deltanets.fallback

    def run(self, samples: Sequence[Sample], finished: Callable[[PackResult | BaseException], None]) -> None:
        """Computes a pack and returns while it is copied and written; `finished` is called from a thread.

        Blocks while `_BUFFERS` packs are under way. Raises JobError for bad token ids and torch's errors of the forward.
        """
        host = self._host.get()
        try:
            states = self.states([sample.token_ids for sample in samples])
            if self._float8:
                states = fp8.packed(states)
            copied, host = self._to_host(states, host)
        except BaseException:
            self._host.put(host)
            raise
        future: Future[PackResult] = self._finishers.submit(self._finish, samples, copied, host, states)

        def tell(done: Future[PackResult]) -> None:
            finished(done.exception() or done.result())

        future.add_done_callback(tell)

    def _to_host(self, states: torch.Tensor, host: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
        """Starts the copy of a pack to pinned memory. Returns an event to wait for, and the host's buffer."""
        if self._copies is None:
            return None, host
        if host is None or host.numel() < states.numel():
            host = None  # the old buffer goes before a larger one is made
            host = torch.empty(states.numel(), dtype=states.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            host[: states.numel()].copy_(states.view(-1), non_blocking=True)
            # The allocator must not hand this memory to the next pack before the copy is over.
            states.record_stream(self._copies)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as its streams
            copied.record(self._copies)
        return copied, host

    def _finish(
        self, samples: Sequence[Sample], copied: Any, host: torch.Tensor | None, states: torch.Tensor
    ) -> PackResult:
        """Waits for the copy, then writes every sample of the pack."""
        try:
            if host is not None:
                copied.synchronize()
                states = host[: states.numel()].view(states.shape)
            result = PackResult()
            scales: Any = None
            if self._float8:
                tokens = sum(len(sample.token_ids) for sample in samples)
                bits, scales, result.float8_figures = fp8.unpacked(states.numpy(), tokens, len(self.layer_ids))
            else:
                wide = states.element_size() == 4
                bits = states.view(torch.int32 if wide else torch.int16).numpy()
                bits = bits.view(np.uint32 if wide else np.uint16)
            begin, jobs = 0, []
            for sample in samples:
                part = slice(begin, begin + len(sample.token_ids))
                own = None if scales is None else scales[part]
                jobs.append((sample.row, self._writers.submit(self._write, sample, bits[part], own)))
                begin = part.stop
            # All of them, whatever one raises: the buffer that they read is the next pack's.
            wait([job for _, job in jobs])
            for row, job in jobs:
                try:
                    result.entries.append(job.result())
                except StoreError as error:
                    result.bad.append((row, str(error)))
                except OSError as error:
                    result.disk_error = error
            return result
        finally:
            self._host.put(host)

    def _write(self, sample: Sample, bits: Any, scales: Any) -> Entry:
        return write_sample(
            self.output,
            sample.row,
            bits,
            np.asarray(sample.token_ids, dtype=np.int64),
            dtype=FLOAT8 if self._float8 else str(self._dtype).removeprefix("torch."),
            layers=len(self.layer_ids),
            hidden_size=self._hidden_size,
            scales=scales,
        )

    def close(self) -> None:
        """Waits for everything that is under way."""
        self._finishers.shutdown()
        self._writers.shutdown()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch had no room: on the GPU, or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
