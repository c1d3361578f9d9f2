"""What an extraction would do: layers, bytes, memory, and whether the disk holds it. Loads no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.disk import free_bytes
from backends.environment import device_of, require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.fp8 import FLOAT8
from backends.hf.families import ModelShape, model_shape, read_config
from backends.hf.kernels import delta_net_bytes, expected_packing
from backends.hub import known_fingerprint, origin
from backends.layers import layer_ids
from backends.plan.download import Pending
from backends.plan.float8 import UNKNOWN, UNKNOWN_BY_VLLM, float8_known
from backends.plan.output import check_output
from backends.spec import ExtractSpec
from backends.vllm.planning import plan_server, too_long

if TYPE_CHECKING:
    from backends.dataset import PreparedDataset

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# torch with its libraries and a CUDA context.
_RUNTIME_BYTES = 1 << 30


@dataclass(slots=True)
class ExtractPlan:
    """What `extract` would do. lengths: tokens of every row; todo_bytes: what is still to be written."""

    spec: ExtractSpec
    shape: ModelShape
    layer_ids: tuple[int, ...]
    dataset: PreparedDataset
    lengths: list[int]
    rows: range
    device: str
    header: dict[str, Any]
    bytes_per_token: int
    already_done: int
    todo_bytes: int
    samples_that_fit: int
    disk_free_bytes: int
    packing: str = "packs"
    problem: JobError | None = None
    warnings: list[str] = field(default_factory=list)
    float8: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Processes that compute: one a GPU, or of vLLM one a server."""
        return max(len(self.spec.gpus) // self.spec.tensor_parallel, 1)

    @property
    def versions(self) -> dict[str, str | None]:
        """Of what computes the states: this Python's packages, or vLLM's and what is beside it."""
        if not self.vllm:
            return versions()
        return {
            "vllm": self.vllm["version"],
            **{name: self.vllm.get(name) for name in ("torch", "transformers", "cuda")},
        }

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max((self.lengths[row] for row in self.rows), default=0)

    @property
    def tokens(self) -> int:
        return sum(self.lengths[row] for row in self.rows)

    @property
    def memory_bytes_per_worker(self) -> int:
        """Weights, the activations of one block, and the states of the packs that are computed and copied."""
        spec, shape = self.spec, self.shape
        size = _DTYPE_BYTES[spec.dtype]
        pack = max(min(spec.pack_tokens, self.tokens), max((self.lengths[row] for row in self.rows), default=1))
        block = pack * size * shape.widest_block() + delta_net_bytes(shape, pack, self.device, spec.dtype)
        # Those of a pack that is computed, and of three that are copied.
        stored = 1 if spec.stored_dtype == FLOAT8 else size
        states = pack * len(self.layer_ids) * shape.hidden_size * (size + 3 * stored)
        return shape.parameters(max(self.layer_ids)) * size + block + states + _RUNTIME_BYTES

    def answer(self) -> dict[str, Any]:
        return {
            "ok": self.problem is None,
            "error": self.problem.message if self.problem else None,
            "remedy": self.problem.remedy if self.problem else None,
            "warnings": self.warnings,
            "layer_ids": list(self.layer_ids),
            "num_layers": self.shape.num_layers,
            "hidden_size": self.shape.hidden_size,
            "family": self.shape.family,
            "dtype": self.spec.dtype,
            "file_dtype": self.spec.stored_dtype,
            **self.float8,
            "bytes_per_token": self.bytes_per_token,
            "samples": len(self.rows),
            "tokens": self.tokens,
            "bytes_total": self.tokens * self.bytes_per_token,
            "already_done": self.already_done,
            "disk_free_bytes": self.disk_free_bytes,
            "samples_that_fit": self.samples_that_fit,
            "memory_bytes_per_worker": None if self.vllm else self.memory_bytes_per_worker,
            "workers": self.workers,
            "device": self.device,
            "packing": self.packing,
            **({"vllm": self.vllm} if self.vllm else {}),
            "versions": versions(),
        }


def plan_extract(spec: ExtractSpec, pending: Pending | None = None) -> ExtractPlan:
    """Checks everything that can be known before a model is loaded. Raises JobError and SpecError.

    A disk without room for it all is the plan's `problem`, not raised, so that the answer still says what would fit.
    pending: what is to be downloaded first; of a model that is, the folder has no weights yet.
    """
    model = Path(spec.model)
    config = read_config(model)
    server = plan_server(spec, config) if spec.backend == "vllm" else None
    try:
        shape = model_shape(config, model)
    except JobError as error:
        # What this vLLM cannot extract from is that backend's to refuse.
        raise ((server.problem() if server is not None else None) or error) from None
    ids = layer_ids(spec.layers, shape.num_layers)
    require_packages()
    device = device_of(spec) if server is None else _device_of_server(spec)
    # From here on numpy and datasets are needed, and now known to be there.
    from backends.dataset import PreparedDataset
    from backends.fingerprint import model_fingerprint
    from backends.hsfile import bytes_per_token
    from backends.store import listed_in

    pending = pending or Pending()
    output = Path(spec.output)
    fingerprint = known_fingerprint(output, model) if pending.model else model_fingerprint(model)
    dataset = PreparedDataset(spec.dataset)
    lengths = dataset.lengths()
    rows = _rows(spec, lengths)
    check_output(output)
    header = {
        "manifest": 1,
        "model": str(model.absolute()),
        "model_fingerprint": fingerprint,
        **origin(model),
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "layer_ids": list(ids),
        "dtype": spec.dtype,
        "file_dtype": spec.stored_dtype,
        "dataset": str(Path(spec.dataset).absolute()),
        "dataset_fingerprint": dataset.fingerprint,
        "dataset_rows": len(dataset),
        "backend": spec.backend,
        "created": round(time.time(), 3),
    }
    per_token = bytes_per_token(len(ids), shape.hidden_size, spec.stored_dtype)
    # Whether another commit has the same weights is known only once they are here: the job itself checks it.
    listed = {} if fingerprint is None else listed_in(output, header)
    todo = [row for row in rows if row not in listed]
    free = max(free_bytes(output) - pending.on_disk_of(output), 0)
    room, fitting, todo_bytes = max(free - spec.min_free_bytes, 0), 0, 0
    for row in todo:
        todo_bytes += lengths[row] * per_token
        fitting += todo_bytes <= room
    result = ExtractPlan(
        spec=spec,
        shape=shape,
        layer_ids=ids,
        dataset=dataset,
        lengths=lengths,
        rows=rows,
        device=device,
        header=header,
        bytes_per_token=per_token,
        already_done=len(rows) - len(todo),
        todo_bytes=todo_bytes,
        samples_that_fit=len(rows) - len(todo) + fitting,
        disk_free_bytes=free,
        warnings=torchvision_warnings(),
    )
    longest = result.longest
    if server is None:
        result.packing, slow = expected_packing(shape, device, spec.dtype)
        result.warnings += slow
    else:
        result.packing = "the server's own batches"
        result.vllm = server.facts(spec, ids, longest)
        result.warnings += server.warnings(ids)
    if ids[-1] != shape.num_layers:
        result.warnings.append(
            f"the trainer takes its targets from layer id {shape.num_layers}, the last one, which is not among the layers"
        )
    if fitting < len(todo):
        last = todo[fitting]
        fits = f"take fewer samples (last={last} fits)" if last > spec.first else "free some space"
        result.problem = JobError(
            f"{todo_bytes:,} bytes are to be written to {output}, and its disk has room for {room:,}"
            f" above the floor of {spec.min_free_bytes:,}",
            f"{fits}, choose fewer layers, or give a folder on another disk",
        )
    if spec.stored_dtype == FLOAT8:
        known = float8_known(output, header)
        unknown = UNKNOWN if server is None else UNKNOWN_BY_VLLM
        warning = unknown if known is None else known.warning()
        result.warnings += [warning] if warning else []
        result.float8 = known.facts() if known else {}
    if dataset.format != "torch":
        result.warnings.append(
            f"the rows of {dataset.path} are not saved as torch's tensors, and the trainer stops at others: set _format_type to"
            ' "torch" in its state.json (the hidden states stay good), or prepare it again'
        )
    if shape.max_positions and longest > shape.max_positions:
        result.warnings.append(
            f"the longest sample has {longest} tokens, the model was made for {shape.max_positions}"
            " (max_position_embeddings)"
        )
    if server is not None:
        long = too_long(lengths, todo, server.most_tokens, server.limited_by)
        result.problem = server.problem() or long or result.problem
    return result


def _device_of_server(spec: ExtractSpec) -> str:
    """ "server" where one runs already: what it computes on is its own."""
    if spec.server_url:
        return "server"
    return "cuda" if spec.gpus or spec.device == "cuda" else "cpu"


def _rows(spec: ExtractSpec, lengths: list[int]) -> range:
    if spec.first >= len(lengths):
        raise JobError(f"first is {spec.first}, but the dataset has {len(lengths)} samples", "choose a smaller first")
    if spec.last is not None and spec.last > len(lengths):
        raise JobError(
            f"last is {spec.last}, but the dataset has {len(lengths)} samples", f"leave it out or give {len(lengths)}"
        )
    rows = range(spec.first, len(lengths) if spec.last is None else spec.last)
    over = [row for row in rows if lengths[row] > spec.max_sample_tokens]
    if over:
        more = f", and {len(over) - 1} more are too long" if len(over) > 1 else ""
        raise JobError(
            f"row {over[0]} has {lengths[over[0]]} tokens, more than max_sample_tokens={spec.max_sample_tokens}{more}",
            f"prepare the dataset with max_tokens={spec.max_sample_tokens}, or raise max_sample_tokens",
        )
    return rows
