"""The seam between the runner and whatever computes packs: here processes of one machine. Loads no torch.

Another engine (actors of a cluster, say) is another class with the methods of `Workers`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

# One pack computed, one waiting behind it; on a GPU one more is being copied and written.
IN_FLIGHT = {"cpu": 2, "cuda": 3}
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """A pack for a worker. id: the runner's number; rows: of the dataset."""

    id: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What a worker said (see `worker`), or `lost` from this side: fields `works` (not answered), `pid`, `detail`."""

    worker: int
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those of its affinity, or fewer where its container has a quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota ("max"), or an older cgroup
        return cores


class Workers(Protocol):
    """What the runner needs of its workers. Only the runner's thread calls it."""

    @property
    def count(self) -> int: ...

    def start(self, worker: int) -> int:
        """Starts a worker, or starts it again. Returns its pid, 0 where it has none."""

    def room(self) -> bool:
        """Whether a worker that is ready takes one more pack."""

    def submit(self, work: Work) -> None:
        """Hands a pack to the ready worker with the fewest. Raises RuntimeError without room."""

    def in_flight(self) -> int:
        """Packs handed out and not answered."""

    def results(self, timeout_s: float) -> list[Message]:
        """What was said since the last call; waits for the first message."""

    def close(self, *, at_once: bool = False) -> None:
        """Ends all workers and waits until they are gone; `at_once` without letting them finish."""


class _Process:
    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self.ready = False
        self.works: dict[int, Work] = {}
        self.detail = ""
        self.reader: threading.Thread | None = None

    def send(self, order: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order, separators=(",", ":")).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: `lost` is on its way, and its packs are made again


class LocalWorkers:
    """Workers as processes of this machine, one a group of GPUs, or one on the CPU.

    order: the worker's first message but for what is its own. groups: UUIDs of each, or none. most: works in flight for each.
    keep_open: file descriptors that workers inherit, so that the lock on the output folder lasts until the last of them is gone.
    """

    # What the worker's process is asked to be (`backends.__main__`).
    verb: ClassVar[str] = "worker"

    def __init__(
        self, order: Mapping[str, Any], groups: Sequence[Sequence[str]], *, most: int, keep_open: Sequence[int] = ()
    ) -> None:
        self._order = dict(order)
        self._groups: list[list[str]] = [list(group) for group in groups] or [[]]
        self._keep_open = tuple(keep_open)
        self._most = most
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._processes: dict[int, _Process] = {}

    @property
    def count(self) -> int:
        return len(self._groups)

    def _environment(self, gpus: list[str]) -> dict[str, str]:
        """What a worker's environment has beside ours."""
        # torch's threads: each worker gets its share of the cores.
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // self.count))
        visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        return {"OMP_NUM_THREADS": threads, **visible}

    def _first_order(self, worker: int) -> dict[str, Any]:
        """What a worker's first message has of its own."""
        return {"gpu": next(iter(self._groups[worker]), None)}

    def start(self, worker: int) -> int:
        process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("__main__.py")), self.verb],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._environment(self._groups[worker])},
            pass_fds=self._keep_open,
        )
        started = _Process(worker, process)
        self._processes[worker] = started
        started.reader = threading.Thread(target=self._listen, args=(started,), daemon=True, name=f"worker-{worker}")
        started.reader.start()
        started.send({"op": "start", **self._order, **self._first_order(worker)})
        return process.pid

    def _listen(self, worker: _Process) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            try:
                fields = json.loads(line)
                event = fields.pop("event")
            except (ValueError, KeyError, AttributeError, TypeError):
                continue  # the half line of a worker that was killed
            self._said.put(Message(worker.number, event, fields))
        status = worker.process.wait()
        self._said.put(Message(worker.number, "gone", {"pid": worker.process.pid, "status": status}))

    def room(self) -> bool:
        return any(worker.ready and len(worker.works) < self._most for worker in self._processes.values())

    def submit(self, work: Work) -> None:
        ready = [worker for worker in self._processes.values() if worker.ready and len(worker.works) < self._most]
        if not ready:
            raise RuntimeError("no worker has room")
        worker = min(ready, key=lambda candidate: len(candidate.works))
        worker.works[work.id] = work
        worker.send(self._order_of(work))

    def _order_of(self, work: Work) -> dict[str, Any]:
        return {"op": "pack", "id": work.id, "rows": work.rows}

    def in_flight(self) -> int:
        return sum(len(worker.works) for worker in self._processes.values())

    def results(self, timeout_s: float) -> list[Message]:
        messages: list[Message] = []
        deadline = time.monotonic() + timeout_s
        while True:
            left = 0.0 if messages else max(deadline - time.monotonic(), 0.0)
            try:
                said = self._said.get(timeout=left) if left else self._said.get_nowait()
            except queue.Empty:
                return messages
            understood = self._understand(said)
            if understood is not None:
                messages.append(understood)

    def _understand(self, message: Message) -> Message | None:
        """Keeps count of what is in flight; turns a worker's end into `lost`."""
        worker = self._processes.get(message.worker)
        if worker is None:
            return None
        if message.event == "ready":
            worker.ready = True
        elif message.event in ("done", "oom", "disk"):
            worker.works.pop(message.fields["id"], None)
        elif message.event in ("crash", "refused"):
            worker.detail = message.fields["message"]
        elif message.event == "gone":
            if message.fields["pid"] != worker.process.pid:
                return None
            status = message.fields["status"]
            del self._processes[message.worker]
            self._release(worker)
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            return Message(
                message.worker,
                "lost",
                {
                    "works": list(worker.works.values()),
                    "pid": worker.process.pid,
                    "detail": worker.detail or how,
                },
            )
        return message

    def _release(self, worker: _Process) -> None:
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # what it did not read any more

    def _end_at_once(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()

    def close(self, *, at_once: bool = False) -> None:
        for worker in self._processes.values():
            if at_once or not worker.ready:
                self._end_at_once(worker.process)
            else:
                worker.send({"op": "end"})
        for worker in self._processes.values():
            try:
                worker.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            if worker.reader is not None:
                worker.reader.join()
            self._release(worker)
        self._processes.clear()
