"""The fields of the launch form: what stands before each, what its empty line says, and which of them a job has."""

from __future__ import annotations

from collections.abc import Mapping

from backends.spec import BACKENDS, DEVICES, DTYPES, FILE_DTYPES

VERBS = ("extract", "prepare", "verify", "parity", "compare")

# Of vLLM's server; they mean nothing to the other backend.
SERVER = ("vllm_python", "tensor_parallel", "concurrency", "extra_args")
# A field that is left empty takes the spec's default.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "extract": (
        *("model", "dataset", "output", "backend", "server_url", *SERVER),
        *("layers", "dtype", "file_dtype", "device", "first", "last"),
    ),
    "prepare": ("model", "inputs", "output", "max_tokens", "limit"),
    "verify": ("output", "recompute", "model", "dataset", "device"),
    "parity": ("reference", "output", "samples"),
    "compare": (
        *("model", "dataset", "output", "layers", "dtype", "device", "first", "samples", "together"),
        *SERVER,
    ),
}
WITH_GPUS = ("extract", "verify", "compare")

# Label and hint of every text field.
TEXTS: Mapping[str, tuple[str, str]] = {
    "model": ("model", "folder on the node, or org/name on the hub"),
    "dataset": ("dataset", "folder written by prepare"),
    "inputs": ("inputs", "JSONL files of conversations, blanks between them"),
    "reference": ("reference", "output folder that counts as right, as the one in bf16"),
    "output": ("output", "folder for what is written"),
    "vllm_python": ("vLLM Python", "the newest that setup made on the node"),
    "server_url": ("server URL", "none: servers are started; of one that runs already"),
    "tensor_parallel": ("tensor parallel", "1; so many GPUs make one server"),
    "concurrency": ("concurrency", "32; requests at a time to each server"),
    "extra_args": ("vLLM options", "none; given to vllm serve as they stand here"),
    "layers": ("layers", "dflash, speculators, or ids such as 2,10,18 (default dflash)"),
    "first": ("first sample", "0"),
    "last": ("last sample", "all; this one is not taken any more"),
    "max_tokens": ("max tokens", "8192; a longer row is truncated"),
    "limit": ("limit", "all conversations"),
    "recompute": ("recompute", "0; so many samples are computed anew"),
    "samples": ("samples", "all that both folders hold"),
    "name": ("name", "of the job; the output folder's name"),
    "python": ("python", "the node's default worker Python"),
}
_OTHERWISE: Mapping[tuple[str, str], str] = {
    ("verify", "model"): "the one that the output's manifest names",
    ("verify", "dataset"): "the one that the output's manifest names",
    ("compare", "samples"): "256; so many from the first one on, by both backends",
    ("compare", "output"): "folder for the report and both backends' files",
    ("compare", "tensor_parallel"): "1; so many GPUs make one vLLM server",
}
BESIDE = ("one after the other", "side by side")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "backend": BACKENDS,
    "dtype": DTYPES,
    "file_dtype": FILE_DTYPES,
    "device": DEVICES,
    "together": BESIDE,
}
CHOICE_LABELS = {"file_dtype": "files' dtype", "together": "backends run"}
# From the top of the form to its end.
ORDER = (
    *("model", "dataset", "inputs", "reference", "output", "backend", "layers", "dtype", "file_dtype", "device"),
    *("first", "last", "max_tokens", "limit", "recompute", "samples", "together", "server_url", *SERVER),
    *("name", "python"),
)


def fields_of(verb: str, backend: str = "") -> tuple[str, ...]:
    """The fields that a job of this verb has; of an extraction the server's only where the backend is vllm."""
    names = _FIELDS[verb]
    if verb == "extract" and backend != "vllm":
        return tuple(name for name in names if name not in SERVER and name != "server_url")
    return names


def hint(verb: str, name: str) -> str:
    """What stands in an empty text field."""
    return _OTHERWISE.get((verb, name), TEXTS[name][1])
