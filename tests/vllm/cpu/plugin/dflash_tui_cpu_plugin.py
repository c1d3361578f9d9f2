"""vLLM's connector of hidden states on a CPU: it copies through pinned memory and a CUDA stream, of which a CPU has neither.

Only the copy is replaced; slots, names, locks and the writing threads stay vLLM's own (0.32.0).
"""

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any


class Done:
    """Stands where a CUDA event stands: a plain copy is over when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def register() -> None:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as theirs

    def submit(self: Any, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        count = pending.token_ids.shape[0]
        states = theirs.extract_from_kv_cache(self._kv_cache, slots, count).clone()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        done = Done()
        writing = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = writing
        writing.add_done_callback(partial(self._on_write_done, pending.req_id))

    theirs.ExampleHiddenStatesConnector._submit_async_write = submit
