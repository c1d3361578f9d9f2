"""The vllm backend's workers: a process for each server, which starts it, feeds it and ends it (`serving`). Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends import credentials
from backends.plan.extract import ExtractPlan
from backends.store import Store
from backends.vllm.feeding import AHEAD
from backends.vllm.filing import sweep
from backends.vllm.log import PHASES
from backends.vllm.planning import ANSWER_TOKENS, STAGING
from backends.vllm.server import CANNOT_BE_KILLED, START_IN
from backends.vllm.session import end_session, sessions_in
from backends.workers import LocalWorkers, Message, Work

# A server that outlived its client has nobody left to wait for.
_GRACE_S = 3.0


def _order_of_phase(phase: str) -> int:
    names = [name for name, _ in PHASES]
    return names.index(phase) if phase in names else len(names)


class ServerWorkers(LocalWorkers):
    """One server a group of `tensor_parallel` GPUs, or one on the CPU, or the one that runs already."""

    verb = "vllm-worker"

    def __init__(self, plan: ExtractPlan, store: Store) -> None:
        spec = plan.spec
        size = spec.tensor_parallel
        groups = [list(spec.gpus[first : first + size]) for first in range(0, len(spec.gpus), size)]
        # Absolute: a server is started in another folder.
        self._staging = store.output.absolute() / STAGING
        sweep(self._staging)
        order = {
            "spec": spec.to_json(),
            "header": store.header,
            "vllm": {name: plan.vllm.get(name) for name in ("python", "version", "flags")},
            "max_model_len": plan.longest + ANSWER_TOKENS,
            "bytes_per_token": plan.bytes_per_token,
            "packing": plan.packing,
            "key": credentials.vllm_api_key() if spec.server_url else "",
        }
        super().__init__(order, groups, most=spec.concurrency + AHEAD, keep_open=[store.lock_fd])
        self._dataset = plan.dataset
        self._servers: dict[int, int] = {}
        self._starts = [0] * self.count
        self._phases: dict[int, str] = {}

    def _environment(self, gpus: list[str]) -> dict[str, str]:
        return {}

    def _first_order(self, worker: int) -> dict[str, Any]:
        self._starts[worker] += 1
        self._phases.pop(worker, None)
        return {"gpus": self._groups[worker], "folder": str(self._folder(worker)), "again": self._starts[worker] > 1}

    def _order_of(self, work: Work) -> dict[str, Any]:
        (row,) = work.rows
        return {"op": "sample", "id": work.id, "row": row, "token_ids": self._dataset.row(row)[0]}

    def _folder(self, worker: int) -> Path:
        return self._staging / str(worker)

    def _understand(self, message: Message) -> Message | None:
        if message.event == "warning":
            return message  # also of a worker that is gone: they come last
        if message.event == "server":
            self._servers[message.worker] = message.fields["pid"]
            return message
        if message.event == "phase":
            # Of several servers that start, the one that is furthest behind is waited for.
            self._phases[message.worker] = message.fields["phase"]
            if any(process.ready for process in self._processes.values()):
                return None
            slowest = min(self._phases.values(), key=_order_of_phase)
            return Message(message.worker, "phase", {"phase": slowest})
        understood = super()._understand(message)
        if understood is not None and understood.event == "lost":
            self._clear(message.worker)
        return understood

    def _clear(self, worker: int) -> None:
        """Nothing of a worker's server is left: no process where the worker itself was killed, no file."""
        folder = self._folder(worker)
        # One that was killed may have started a server and not told of it.
        for server in sessions_in(folder / START_IN, self._servers.pop(worker, 0)):
            if not end_session(server, grace_s=_GRACE_S):
                print(CANNOT_BE_KILLED.format(server), flush=True)
        sweep(folder)

    def _end_at_once(self, process: Any) -> None:
        process.terminate()

    def close(self, *, at_once: bool = False) -> None:
        super().close(at_once=at_once)
        for worker in range(self.count):
            self._clear(worker)
        sweep(self._staging)
