"""What a job would do, and whether it can, answered before anything is loaded. Loads no torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import JobError
from backends.hf.families import ModelShape, model_shape, read_config
from backends.layers import layer_ids
from backends.spec import ExtractSpec, PrepareSpec, Spec, SpecError, VerifySpec

if TYPE_CHECKING:
    from backends.dataset import PreparedDataset

PACKAGES = ("numpy", "torch", "transformers", "datasets", "safetensors")
# Packed attention needs this Transformers' names for the boundaries, and this torch's grouped attention.
_OLDEST = {"transformers": (5, 16), "torch": (2, 6)}
_INSTALL = "install torch, transformers, datasets and safetensors into it, or name another Python for workers"
_TORCHVISION = "uninstall torchvision (nothing here needs it) or install the build that belongs to this torch"
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# torch with its libraries and a CUDA context.
_RUNTIME_BYTES = 1 << 30


def refusal(message: str, remedy: str) -> dict[str, Any]:
    """The answer of a plan that cannot be."""
    return {"ok": False, "error": message, "remedy": remedy or None, "warnings": []}


def plan(spec: Spec) -> dict[str, Any]:
    """Whether a job can run on this machine with this Python, and its facts. Never raises for what is the user's."""
    try:
        if isinstance(spec, ExtractSpec):
            return plan_extract(spec).answer()
        if isinstance(spec, PrepareSpec):
            facts, warnings = _plan_prepare(spec)
        elif isinstance(spec, VerifySpec):
            facts, warnings = _plan_verify(spec)
        else:
            require_packages()
            facts, warnings = {"versions": versions()}, torchvision_warnings()
    except JobError as error:
        return refusal(error.message, error.remedy)
    except SpecError as error:
        return refusal(str(error), "")
    return {"ok": True, "error": None, "remedy": None, "warnings": warnings, **facts}


# --- the Python and the device --------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Versions of this Python and of what it has installed, from their metadata alone."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def require_packages() -> None:
    """Raises JobError where this Python lacks a package or has one too old. Imports none of them."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise JobError(f"the Python {sys.executable} has no {name}", _INSTALL)
    for name, oldest in _OLDEST.items():
        version = versions()[name] or ""
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers and numbers < oldest:
            least = ".".join(map(str, oldest))
            raise JobError(
                f"the Python {sys.executable} has {name} {version}", f"install {name} {least} or later into it"
            )


def import_remedy(error: BaseException) -> tuple[str, str]:
    """What an import that failed means to the user, and what to do, one line each."""
    for cause in _causes(error):
        if "torchvision" in str(cause):
            return f"torchvision does not fit this torch in the Python {sys.executable} ({cause})", _TORCHVISION
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the Python {sys.executable} has no {error.name.partition('.')[0]}", _INSTALL
    return f"the Python {sys.executable} cannot import what the job needs: {error}", _INSTALL


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def torchvision_warnings() -> list[str]:
    """A torchvision built for another torch makes every model class of Transformers fail to import."""
    try:
        vision, torch = (importlib.metadata.version(name) for name in ("torchvision", "torch"))
    except importlib.metadata.PackageNotFoundError:
        return []
    if vision.partition("+")[2] == torch.partition("+")[2]:
        return []
    return [f"torchvision {vision} beside torch {torch} may keep every model from loading: {_TORCHVISION}"]


def device_of(spec: ExtractSpec | VerifySpec) -> str:
    """ "cuda" or "cpu". Raises JobError where CUDA is asked for and cannot be."""
    if spec.device == "cpu":
        if spec.gpus:
            raise JobError("device is cpu but GPUs were chosen", "leave one of the two out")
        return "cpu"
    if spec.device == "auto" and not spec.gpus:
        return "cpu"
    remedy = "choose device cpu, or a node and a Python with CUDA"
    if _torch_cuda() is None:
        raise JobError(f"the torch {versions()['torch']} of {sys.executable} was built without CUDA", remedy)
    if not cuda_devices():
        raise JobError("no CUDA device is visible on this machine", remedy)
    return "cuda"


def _torch_cuda() -> str | None:
    """CUDA's version that torch was built for, read from torch/version.py; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        text = Path(folder, "version.py").read_text(encoding="utf-8")
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        if match:
            return match.group(1)
    return None


def cuda_devices() -> int:
    """CUDA devices that the driver shows, asked of the driver itself; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return 0
    return number.value


# --- extract --------------------------------------------------------------------------------------------------------


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
    problem: JobError | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def workers(self) -> int:
        return max(len(self.spec.gpus), 1)

    @property
    def tokens(self) -> int:
        return sum(self.lengths[row] for row in self.rows)

    @property
    def memory_bytes_per_worker(self) -> int:
        """Weights, the activations of one block, and the states of the packs that are computed and copied."""
        spec, shape = self.spec, self.shape
        size = _DTYPE_BYTES[spec.dtype]
        pack = max(min(spec.pack_tokens, self.tokens), max((self.lengths[row] for row in self.rows), default=1))
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        block = pack * size * (4 * shape.hidden_size + 2 * heads + 3 * shape.intermediate_size)
        states = 4 * pack * len(self.layer_ids) * shape.hidden_size * size
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
            "bytes_per_token": self.bytes_per_token,
            "samples": len(self.rows),
            "tokens": self.tokens,
            "bytes_total": self.tokens * self.bytes_per_token,
            "already_done": self.already_done,
            "disk_free_bytes": self.disk_free_bytes,
            "samples_that_fit": self.samples_that_fit,
            "memory_bytes_per_worker": self.memory_bytes_per_worker,
            "workers": self.workers,
            "device": self.device,
            "packing": "packs",
            "versions": versions(),
        }


def plan_extract(spec: ExtractSpec) -> ExtractPlan:
    """Checks everything that can be known before a model is loaded. Raises JobError and SpecError.

    A disk without room for it all is the plan's `problem`, not raised, so that the answer still says what would fit.
    """
    if spec.backend != "hf":
        raise JobError(f"the {spec.backend} backend is not in this version", "use the backend hf")
    model = Path(spec.model)
    shape = model_shape(read_config(model), model)
    ids = layer_ids(spec.layers, shape.num_layers)
    require_packages()
    device = device_of(spec)
    # From here on numpy and datasets are needed, and now known to be there.
    from backends.dataset import PreparedDataset
    from backends.fingerprint import model_fingerprint
    from backends.hsfile import bytes_per_token
    from backends.store import free_bytes, listed_in

    fingerprint = model_fingerprint(model)
    dataset = PreparedDataset(spec.dataset)
    lengths = dataset.lengths()
    rows = _rows(spec, lengths)
    output = Path(spec.output)
    check_output(output)
    header = {
        "manifest": 1,
        "model": str(model.absolute()),
        "model_fingerprint": fingerprint,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "layer_ids": list(ids),
        "dtype": spec.dtype,
        "dataset": str(Path(spec.dataset).absolute()),
        "dataset_fingerprint": dataset.fingerprint,
        "dataset_rows": len(dataset),
        "backend": spec.backend,
        "created": round(time.time(), 3),
    }
    per_token = bytes_per_token(len(ids), shape.hidden_size, spec.dtype)
    listed = listed_in(output, header)
    todo = [row for row in rows if row not in listed]
    free = free_bytes(output)
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
    if fitting < len(todo):
        last = todo[fitting]
        fits = f"take fewer samples (last={last} fits)" if last > spec.first else "free some space"
        result.problem = JobError(
            f"{todo_bytes:,} bytes are to be written to {output}, and its disk has room for {room:,}"
            f" above the floor of {spec.min_free_bytes:,}",
            f"{fits}, choose fewer layers, or give a folder on another disk",
        )
    longest = max((lengths[row] for row in rows), default=0)
    if shape.max_positions and longest > shape.max_positions:
        result.warnings.append(
            f"the longest sample has {longest} tokens, the model was made for {shape.max_positions}"
            " (max_position_embeddings)"
        )
    return result


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


def check_output(output: Path) -> None:
    """Raises JobError where a folder cannot be made or written to; makes nothing."""
    folder = output
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    remedy = "mend its permissions or give another folder"
    if not folder.is_dir():
        raise JobError(f"the output folder {output} cannot be made: {folder} is not a folder", "give another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise JobError(f"the output folder {output} cannot be written: no permission in {folder}", remedy)


# --- prepare and verify ---------------------------------------------------------------------------------------------


def _plan_prepare(spec: PrepareSpec) -> tuple[dict[str, Any], list[str]]:
    model = Path(spec.model)
    config = model / "tokenizer_config.json"
    if not model.is_dir():
        raise JobError(f"the model {model} is not a folder", "give the folder that holds the tokenizer")
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise JobError(
            f"the model folder {model} has no tokenizer", "add tokenizer.json and tokenizer_config.json to it"
        )
    template = (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file()
    if not template and not (config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")):
        raise JobError(f"the tokenizer in {model} has no chat template", "use the model's chat (instruct) version")
    for name in spec.inputs:
        if not Path(name).is_file():
            raise JobError(f"the input {name} is not a file", "give JSONL files of conversations")
        if not os.access(name, os.R_OK):
            raise JobError(f"the input {name} cannot be read", "mend its permissions")
    check_output(Path(spec.output))
    require_packages()
    size = sum(Path(name).stat().st_size for name in spec.inputs)
    return {"inputs": len(spec.inputs), "input_bytes": size, "versions": versions()}, torchvision_warnings()


def _plan_verify(spec: VerifySpec) -> tuple[dict[str, Any], list[str]]:
    require_packages()
    from backends.store import StoreError, read_manifest

    try:
        manifest = read_manifest(Path(spec.output))
    except StoreError as error:
        raise JobError(str(error), "give the output folder of an extraction") from None
    facts: dict[str, Any] = {
        "samples": len(manifest.entries),
        "tokens": sum(entry.tokens for entry in manifest.entries.values()),
        "bytes_total": sum(entry.bytes for entry in manifest.entries.values()),
        "layer_ids": manifest.header["layer_ids"],
        "dtype": manifest.header["dtype"],
        "versions": versions(),
    }
    from backends.dataset import PreparedDataset

    PreparedDataset(spec.dataset or manifest.header["dataset"])
    warnings: list[str] = []
    if spec.recompute:
        read_config(Path(spec.model or manifest.header["model"]))
        facts["device"] = device_of(spec)
        warnings = torchvision_warnings()
    return facts, warnings
