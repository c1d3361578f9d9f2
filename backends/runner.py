"""Samples -> packs -> workers -> manifest. Handles stop, lost workers and a disk that fills. Loads no torch.

The runner alone writes the manifest and the events. A sample counts as done when its file has its final name and its line
stands in the manifest, both on the disk; every other state of a sample is "to be made".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from backends.errors import Interrupted, JobError, WorkerError, one_line
from backends.events import EventLog
from backends.flattening import REMEDY, Watch
from backends.fp8 import FLOAT8
from backends.packing import Pack, pack_samples
from backends.plan.extract import ExtractPlan, plan_extract
from backends.progress import Progress
from backends.spec import ExtractSpec
from backends.store import MANIFEST, Entry, Store, StoreError, check_sample, unwritable
from backends.vllm.planning import too_long
from backends.workers import IN_FLIGHT, LocalWorkers, Message, Work, Workers

_POLL_S = 0.1
# Of so many samples at most, the states may fail their checks before the job is given up: more is not an accident.
_SKIP_SHARE = 0.01
# Skipped rows that `finished` names one by one.
_NAMED = 100
# A worker gets so many packs at least, unless they become smaller than a GPU needs to be busy.
_PACKS_EACH = 8
_SMALL_PACK_TOKENS = 2048
_CPU_PACK_TOKENS = 2048

MakeWorkers = Callable[[ExtractPlan, Store], Workers]


def local_workers(plan: ExtractPlan, store: Store) -> Workers:
    """One process a GPU, or one on the CPU; of the backend vllm one a server."""
    if plan.spec.backend == "vllm":
        from backends.vllm.workers import ServerWorkers

        return ServerWorkers(plan, store)
    order = {"spec": plan.spec.to_json(), "layer_ids": list(plan.layer_ids), "device": plan.device}
    groups = [[gpu] for gpu in plan.spec.gpus]
    return LocalWorkers(order, groups, most=IN_FLIGHT[plan.device], keep_open=[store.lock_fd])


def extract(
    spec: ExtractSpec,
    events: EventLog,
    should_stop: Callable[[], bool],
    *,
    make_workers: MakeWorkers = local_workers,
) -> dict[str, Any]:
    """Writes the hidden states of a dataset's samples; goes on where an earlier run stopped.

    Returns the fields of the `finished` event. Raises JobError, SpecError and Interrupted; whatever it raises, what the
    manifest lists is whole and nothing else counts as done.
    """
    events.emit("phase", phase="checking")
    plan = plan_extract(spec)
    if plan.problem is not None:
        raise plan.problem
    store = Store.open(Path(spec.output), plan.header)
    try:
        return _Run(plan, store, events, should_stop, make_workers).run()
    finally:
        store.close()


def _server_versions(vllm: Mapping[str, Any]) -> dict[str, Any]:
    """Of the plan's vLLM, which has a Python and a torch of its own."""
    if not vllm.get("version"):
        return {}
    beside = {"torch of vllm": vllm.get("torch"), "transformers of vllm": vllm.get("transformers")}
    return {"versions": {"vllm": vllm["version"], **beside}}


class _Run:
    def __init__(
        self,
        plan: ExtractPlan,
        store: Store,
        events: EventLog,
        should_stop: Callable[[], bool],
        make_workers: MakeWorkers,
    ) -> None:
        self.plan = plan
        self.store = store
        self.events = events
        self.should_stop = should_stop
        self.make_workers = make_workers
        self.restarts = 0
        self.started: set[int] = set()
        self.next_id = 0
        # Rows of the packs in flight: the disk has their bytes promised, not yet written.
        self.flying: dict[int, tuple[int, ...]] = {}
        self.waiting: deque[tuple[int, ...]] = deque()
        self.skipped: dict[int, str] = {}
        self.packing = "packs" if plan.spec.backend == "hf" else plan.packing
        self.fell_back = False
        # What vLLM writes in float8 it alone has seen in full.
        float8 = plan.spec.stored_dtype == FLOAT8 and plan.spec.backend == "hf"
        self.float8 = Watch(store.output, store.header, events) if float8 else None

    def run(self) -> dict[str, Any]:
        plan, rows = self.plan, self.plan.rows
        adopted = self._whole([row for row in self.store.stray if row in rows])
        self._list(adopted)
        todo = [row for row in rows if row not in self.store.listed]
        done = len(rows) - len(todo)
        self.waiting.extend(pack.rows for pack in self._pack(todo))
        self.progress = Progress(self.events, total=len(rows), already_done=done)
        self.events.emit(
            "started",
            verb="extract",
            total=len(rows),
            already_done=done,
            layer_ids=list(plan.layer_ids),
            hidden_size=plan.shape.hidden_size,
            bytes_per_token=plan.bytes_per_token,
            workers=plan.workers,
            **_server_versions(plan.vllm),
        )
        for warning in plan.warnings:
            self.events.emit("warning", message=warning)
        if todo:
            self._compute()
        self.progress.tell(now=True)
        return self._outcome()

    def _outcome(self) -> dict[str, Any]:
        progress = self.progress
        told: dict[str, Any] = {}
        if self.skipped:
            row, why = next(iter(self.skipped.items()))
            message = (
                f"{len(self.skipped)} of {progress.total} samples have no file, row {row} first ({why}): leave these rows out"
                " of training, where a missing file is an error"
            )
            self.events.emit("warning", message=message)
            told = {"message": message, "skipped_rows": sorted(self.skipped)[:_NAMED]}
        if self.float8 is not None:
            told |= self.float8.outcome()
        return {
            "verb": "extract",
            "done": progress.done,
            "total": progress.total,
            "skipped": progress.skipped,
            "tokens": progress.tokens,
            "bytes": progress.bytes,
            "elapsed_s": round(progress.elapsed_s, 3),
            **progress.rates(),
            "layer_ids": list(self.plan.layer_ids),
            "file_dtype": self.plan.spec.stored_dtype,
            "packing": self.packing,
            "restarts": self.restarts,
            "versions": self.plan.versions,
            "output": str(self.store.output),
            "manifest": str(self.store.output / MANIFEST),
            **told,
        }

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        self.workers = self.make_workers(self.plan, self.store)
        self._phase("starting the workers")
        clean = False
        try:
            for worker in range(min(self.workers.count, len(self.waiting))):
                self._start(worker)
            self._loop()
            clean = True
        except Interrupted:
            clean = True
            raise
        finally:
            # A worker that is asked to end writes what it has; after an error nobody waits for that.
            self.workers.close(at_once=not clean)
            for message in self.workers.results(0.0):
                if message.event == "warning":
                    self._hear(message)
            if self.float8 is not None:
                self.float8.keep()
            for worker in self.started:
                self.events.emit("worker", worker=worker, state="ended")

    def _loop(self) -> None:
        while True:
            stopping = self.should_stop()
            full = None if stopping else self._feed()
            flying = self.workers.in_flight()
            if not flying and not self.waiting:
                return
            if not flying and stopping:
                done, total = self.progress.done, self.progress.total
                self.progress.tell(now=True)
                raise Interrupted(f"stopped on request with {done} of {total} samples done", done, total)
            if not flying and full is not None:
                raise full
            if stopping or full is not None:
                self._phase("finishing what is in flight")
            messages = self.workers.results(_POLL_S)
            # All that is written by now is listed in one go: a commit waits for the disk, and every GPU for a commit.
            written = [entry for message in messages for entry in message.fields.get("entries", ())]
            if written:
                self._commit([Entry(*entry) for entry in written])
            for message in messages:
                self._hear(message)
            self.progress.tell()

    def _feed(self) -> JobError | None:
        """Hands out packs while there is room; an error where the disk has no room for the next one."""
        while self.waiting and self.workers.room():
            rows = self.waiting[0]
            size = self._size(rows)
            free, floor = self.store.free_bytes(), self.plan.spec.min_free_bytes
            if free - sum(map(self._size, self.flying.values())) - size < floor:
                return JobError(
                    f"the disk of {self.store.output} has {free:,} bytes left, too few for the next {size:,}"
                    f" above the floor of {floor:,} ({self.progress.done} of {self.progress.total} samples are done)",
                    "free some space and run it again: it goes on where it stopped",
                )
            self.waiting.popleft()
            self.flying[self.next_id] = rows
            self.workers.submit(Work(self.next_id, rows))
            self.next_id += 1
        return None

    def _hear(self, message: Message) -> None:
        event, fields = message.event, message.fields
        if event == "phase":
            self._phase(fields["phase"])
        elif event == "ready":
            self._ready(message)
        elif event == "server":
            self.events.emit("worker", worker=message.worker, state="starting", **fields)
        elif event == "warning":
            self.events.emit("warning", message=fields["message"])
        elif event in ("done", "disk"):
            rows = self.flying.pop(fields["id"], ())
            if event == "disk":
                raise unwritable(self.store.output, OSError(fields["message"]))
            if self.float8 is not None and fields.get("float8"):
                self.float8.take(sum(self.plan.lengths[row] for row in rows), fields["float8"])
            self._skip(fields["bad"])
        elif event == "oom":
            self._split(self.flying.pop(fields["id"]), fields["message"])
        elif event == "refused":
            raise (JobError if fields["status"] == JobError.status else WorkerError)(
                fields["message"], fields["remedy"]
            )
        elif event == "crash" and fields["starting"]:
            raise WorkerError(f"a worker could not start: {fields['message']}", "the traceback is in the log")
        elif event == "lost":
            self._lost(message)

    def _start(self, worker: int) -> None:
        pid = self.workers.start(worker)
        self.started.add(worker)
        self.events.emit("worker", worker=worker, state="starting", device=self._device(worker), pid=pid)

    def _device(self, worker: int) -> str:
        """The GPUs that a worker is given, or what there is in their place."""
        size = self.plan.spec.tensor_parallel
        return ", ".join(self.plan.spec.gpus[worker * size : (worker + 1) * size]) or self.plan.device

    def _ready(self, message: Message) -> None:
        fields = message.fields
        if self.next_id == 0:
            self.progress.begin()
        rows = (row for rows in self.waiting for row in rows)
        long = too_long(self.plan.lengths, rows, fields.get("most_tokens"), fields.get("limited_by", ""))
        if long is not None:
            raise long
        self._phase("extracting")
        self.events.emit(
            "worker", worker=message.worker, state="ready", device=fields["device"], pid=fields.get("pid") or None
        )
        if fields["packing"] != self.packing:
            self.packing = fields["packing"]
            self.events.emit("warning", message=f"{fields['packing']}: {fields['why_not']}")
        if fields["fallback"] and not self.fell_back:
            self.fell_back = True
            self.events.emit("warning", message=f"gated delta nets by PyTorch, which is slower: {fields['fallback']}")

    # --- what became of packs ---------------------------------------------------------------------------------------

    def _list(self, entries: list[Entry]) -> None:
        try:
            self.store.commit(entries)
        except OSError as error:
            raise unwritable(self.store.output, error) from None

    def _commit(self, entries: list[Entry]) -> None:
        """Lists what this run made."""
        self._list(entries)
        tokens = sum(entry.tokens for entry in entries)
        self.progress.add(samples=len(entries), tokens=tokens, nbytes=sum(entry.bytes for entry in entries))

    def _skip(self, bad: list[list[Any]]) -> None:
        for row, why in bad:
            self.skipped[row] = why
            self.progress.skipped = len(self.skipped)
            if len(self.skipped) > _SKIP_SHARE * self.progress.total:
                raise JobError(
                    f"row {row}: {why} ({len(self.skipped)} of {self.progress.total} samples so)", self._remedy()
                )
            self.events.emit("warning", message=f"row {row} is skipped: {why}")

    def _remedy(self) -> str:
        """What to do about states that fail their checks."""
        dtype = "check that the model computes well in this dtype: bfloat16 or float32 do not overflow as float16 does"
        if self.plan.spec.backend == "vllm":
            dtype = f"use another vLLM or the backend hf, for a vLLM may extract wrongly from a model; else {dtype}"
        return f"{REMEDY}; else {dtype}" if self.plan.spec.stored_dtype == FLOAT8 else dtype

    def _split(self, rows: tuple[int, ...], why: str) -> None:
        """A pack that does not fit into memory comes again in halves."""
        tokens = sum(self.plan.lengths[row] for row in rows)
        if len(rows) == 1:
            raise JobError(
                f"row {rows[0]} ({tokens} tokens) does not fit into memory: {why}",
                "choose a device with more memory, or prepare the dataset with smaller max_tokens",
            )
        self.events.emit("warning", message=f"a pack of {tokens} tokens does not fit into memory and is split: {why}")
        middle = len(rows) // 2
        self.waiting.extendleft((rows[middle:], rows[:middle]))

    def _lost(self, message: Message) -> None:
        fields = message.fields
        self.events.emit("worker", worker=message.worker, state="lost", pid=fields["pid"], detail=fields["detail"])
        self.started.discard(message.worker)
        self.store.sweep(fields["pid"])
        for work in reversed(fields["works"]):
            self.flying.pop(work.id, None)
            whole = self._whole(work.rows)
            self._commit(whole)
            left = tuple(row for row in work.rows if row not in self.store.listed)
            if left:
                self.waiting.appendleft(left)
        if self.should_stop():
            return
        self.restarts += 1
        if self.restarts > self.plan.spec.worker_restarts:
            raise WorkerError(
                f"worker {message.worker} was lost ({fields['detail']}) after"
                f" {self.plan.spec.worker_restarts} restarts",
                "see the log, then run it again: it goes on where it stopped",
            )
        if self.waiting:
            self._start(message.worker)

    def _whole(self, rows: Iterable[int]) -> list[Entry]:
        """Entries for those rows whose file has its final name, is not listed yet, and is found whole."""
        plan, entries = self.plan, []
        for row in rows:
            path = self.store.path(row)
            if row in self.store.listed or not path.exists():
                continue
            ids = plan.dataset.row(row)[0]
            try:
                check_sample(plan.header, path, ids)
            except StoreError as error:
                self.events.emit("warning", message=f"{one_line(error)}; it is made again")
            else:
                entries.append(Entry(row, path.name, len(ids), path.stat().st_size))
        return entries

    def _pack(self, rows: list[int]) -> list[Pack]:
        """Packs of at most `pack_tokens`; smaller ones where that keeps all workers busy, or costs nothing (a CPU)."""
        lengths, spec = self.plan.lengths, self.plan.spec
        if spec.backend == "vllm":
            return [Pack((row,), (lengths[row],)) for row in rows]
        share = sum(lengths[row] for row in rows) // (self.plan.workers * _PACKS_EACH)
        most = _CPU_PACK_TOKENS if self.plan.device == "cpu" else spec.pack_tokens
        limit = min(spec.pack_tokens, most, max(share, _SMALL_PACK_TOKENS))
        return pack_samples(((row, lengths[row]) for row in rows), limit)

    def _size(self, rows: Iterable[int]) -> int:
        """Bytes that these samples take on the disk."""
        return sum(self.plan.lengths[row] for row in rows) * self.plan.bytes_per_token

    def _phase(self, phase: str) -> None:
        if phase != self.progress.phase:
            self.progress.phase = phase
            self.events.emit("phase", phase=phase)
