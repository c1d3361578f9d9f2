"""What a job is: frozen, validated, JSON in and JSON out. Loads no torch.

Every spec refuses fields that it does not know and values that cannot be, with one line that names the field, the value
and the remedy (`SpecError`). What only the node can know (does the folder exist, is the layer in the model) is `plan`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Self

from backends.hf.families import FAMILIES as TABLE

DTYPES = ("bfloat16", "float16", "float32")
# "same": as the model's. What float8 files hold: `backends.fp8`.
FILE_DTYPES = ("same", "float8_e4m3fn")
BACKENDS = ("hf", "vllm")
PRESETS = ("dflash", "speculators")
FAMILIES = tuple(TABLE)
DEVICES = ("auto", "cuda", "cpu")


class SpecError(ValueError):
    """A spec that cannot be: one line, with the remedy in it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What the specs have in common: JSON in, JSON out."""

    verb: ClassVar[str]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The spec of a JSON object. Raises SpecError."""
        known = {field.name: field for field in fields(cls)}
        for name in data:
            if name not in known:
                raise SpecError(f"{cls.verb}: no field is called {name!r}; the fields are {', '.join(known)}")
        missing = [
            name
            for name, field in known.items()
            if name not in data and field.default is MISSING and field.default_factory is MISSING
        ]
        if missing:
            raise SpecError(f"{cls.verb}: {', '.join(missing)} must be given")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)

    @classmethod
    def loads(cls, text: str) -> Self:
        """The spec of a JSON text. Raises SpecError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise SpecError(f"{cls.verb}: the spec is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise SpecError(f"{cls.verb}: the spec must be a JSON object, not {type(data).__name__}")
        return cls.from_json(data)

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def need_text(spec: Spec, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, str) or not value:
            raise SpecError(f"{spec.verb}: {name} must be a text that is not empty, not {value!r}")


def need_whole(spec: Spec, name: str, least: int, *, optional: bool = False) -> None:
    value = getattr(spec, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{spec.verb}: {name} must be a whole number of at least {least}, not {value!r}")


def need_one_of(spec: Spec, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(spec, name)
    if value not in choices:
        raise SpecError(f"{spec.verb}: {name} must be one of {', '.join(choices)}, not {value!r}")


def _layers(spec: Spec) -> None:
    value: Any = getattr(spec, "layers")  # noqa: B009 - not every spec has layers
    if isinstance(value, str):
        need_one_of(spec, "layers", PRESETS)
    elif not isinstance(value, tuple):
        raise SpecError(f"{spec.verb}: layers must be a preset or a list of layer ids, not {value!r}")
    elif not value or any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in value):
        raise SpecError(f"{spec.verb}: layers must be a preset or layer ids from 0 on, not {list(value)!r}")
    elif list(value) != sorted(set(value)):
        raise SpecError(f"{spec.verb}: layers must rise and not repeat, not {list(value)!r}")


def _vllm(spec: ExtractSpec) -> None:
    """The fields of the vllm backend, which mean nothing to another."""
    if not isinstance(spec.vllm_python, str):
        raise SpecError(f"{spec.verb}: vllm_python must be a text, not {spec.vllm_python!r}")
    if not isinstance(spec.server_url, str):
        raise SpecError(f"{spec.verb}: server_url must be a text, not {spec.server_url!r}")
    if set(spec.server_url) & set("@?#"):  # not shown: a spec is kept in files, and so would a password be
        raise SpecError(
            f"{spec.verb}: server_url must be an address alone; a key is taken from VLLM_API_KEY of the console's environment"
        )
    for name in ("tensor_parallel", "concurrency", "stall_s"):
        need_whole(spec, name, 1)
    extra: Any = spec.extra_args
    if not isinstance(extra, tuple) or not all(isinstance(word, str) and word and "\0" not in word for word in extra):
        raise SpecError(f"{spec.verb}: extra_args must be a list of arguments that are not empty, not {extra!r}")
    given = ("vllm_python", "server_url", "tensor_parallel", "concurrency", "stall_s", "extra_args")
    names = [field.name for field in fields(spec) if field.name in given and getattr(spec, field.name) != field.default]
    if names and spec.backend != "vllm":
        words = f" ({' '.join(extra)})" if extra else ""
        raise SpecError(
            f"{spec.verb}: {', '.join(names)}{words} is of the backend vllm, and the backend is {spec.backend}"
        )


@dataclass(frozen=True, slots=True)
class ExtractSpec(Spec):
    """Hidden states of the samples [first, last) of a prepared dataset, one file a sample.

    model: folder with config.json and weights.
    dataset: folder written by `prepare` (Hugging Face `save_to_disk`).
    output: folder for `hs_<row>.safetensors` and the manifest.
    layers: a preset, or layer ids in the trainer's numbering (0 = embeddings, N = before the final norm).
    dtype: of the model, and of the files where `file_dtype` is "same".
    file_dtype: "float8_e4m3fn" halves the bytes of 16-bit states; the trainer reads it with `--hidden-states-backend fp8`.
    gpus: UUIDs, filled in by the node; empty means the CPU where `device` is not "cuda".
    pack_tokens: samples are packed to at most this many tokens (longer samples go alone).
    max_sample_tokens: a longer sample is refused before work starts.
    min_free_bytes: the job ends by itself before the disk has less than this left.
    vllm_python: the Python that vLLM is in; empty takes the newest environment of setup that has one.
    server_url: of a vLLM server that runs already and extracts these layers; none is started then.
    tensor_parallel: GPUs of one vLLM server. concurrency: requests at a time to each.
    stall_s: a server that finishes no sample for so many seconds is started anew.
    extra_args: for `vllm serve`, untouched.
    """

    verb: ClassVar[str] = "extract"

    model: str
    dataset: str
    output: str
    backend: str = "hf"
    layers: str | tuple[int, ...] = "dflash"
    dtype: str = "bfloat16"
    file_dtype: str = "same"
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    first: int = 0
    last: int | None = None
    pack_tokens: int = 16384
    max_sample_tokens: int = 32768
    min_free_bytes: int = 1 << 30
    worker_restarts: int = 3
    vllm_python: str = ""
    server_url: str = ""
    tensor_parallel: int = 1
    concurrency: int = 32
    stall_s: int = 300
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_text(self, "model", "dataset", "output")
        need_one_of(self, "backend", BACKENDS)
        need_one_of(self, "dtype", DTYPES)
        need_one_of(self, "file_dtype", FILE_DTYPES)
        need_one_of(self, "device", DEVICES)
        need_whole(self, "first", 0)
        need_whole(self, "last", self.first + 1, optional=True)
        need_whole(self, "pack_tokens", 1)
        need_whole(self, "max_sample_tokens", 1)
        need_whole(self, "min_free_bytes", 0)
        need_whole(self, "worker_restarts", 0)
        _vllm(self)
        _layers(self)

    @property
    def stored_dtype(self) -> str:
        """The dtype of the files, by its name in torch."""
        return self.dtype if self.file_dtype == "same" else self.file_dtype


@dataclass(frozen=True, slots=True)
class PrepareSpec(Spec):
    """The trainer's Arrow dataset from conversations, one row an assistant turn, with the loss mask.

    model: folder whose tokenizer and chat template are used.
    inputs: JSONL, JSON or Parquet files of conversations or of tokenised rows, folders of them, and `save_to_disk` folders.
    output: folder for the dataset.
    max_tokens: a longer row is truncated on the right, as the trainer does.
    limit: at most so many conversations (or tokenised rows) of the shuffled order, None for all.
    shuffle_seed: order of the conversations; None keeps the inputs' own.
    """

    verb: ClassVar[str] = "prepare"

    model: str
    inputs: tuple[str, ...]
    output: str
    max_tokens: int = 8192
    limit: int | None = None
    shuffle_seed: int | None = 0
    keep_messages: bool = True

    def __post_init__(self) -> None:
        need_text(self, "model", "output")
        inputs: Any = self.inputs
        if not isinstance(inputs, tuple) or not inputs or not all(isinstance(name, str) and name for name in inputs):
            raise SpecError(f"prepare: inputs must be a list with at least one file of conversations, not {inputs!r}")
        need_whole(self, "max_tokens", 2)
        need_whole(self, "limit", 1, optional=True)
        need_whole(self, "shuffle_seed", 0, optional=True)


@dataclass(frozen=True, slots=True)
class VerifySpec(Spec):
    """Every file of an output folder checked; `recompute` of them computed anew by the plainest float32 forward.

    model, dataset: None takes what the manifest names.
    seed: which samples are recomputed.
    """

    verb: ClassVar[str] = "verify"

    output: str
    recompute: int = 0
    model: str | None = None
    dataset: str | None = None
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        need_text(self, "output", *(name for name in ("model", "dataset") if getattr(self, name) is not None))
        need_one_of(self, "device", DEVICES)
        need_whole(self, "recompute", 0)
        need_whole(self, "seed", 0)


@dataclass(frozen=True, slots=True)
class ParitySpec(Spec):
    """Two output folders of one model, dataset and layers compared, layer by layer: bf16 with float8, one backend with another.

    reference: the folder whose states count as right; errors are relative to them.
    output: the folder that is judged; `parity.json` is written there.
    samples: so many of those that both hold (the longest, the others by chance); None for all.
    seed: which samples.
    """

    verb: ClassVar[str] = "parity"

    reference: str
    output: str
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        need_text(self, "reference", "output")
        need_whole(self, "samples", 1, optional=True)
        need_whole(self, "seed", 0)


@dataclass(frozen=True, slots=True)
class CompareSpec(Spec):
    """Both backends on the same samples: `<output>/hf`, `<output>/vllm`, and what came of it in `<output>/compare.json`.

    samples: so many rows from `first` on. together: both at a time, each on half of the GPUs; else one after the other on all.
    keep_files: the hidden states stay after their parity was looked at. The other fields are an extraction's.
    """

    verb: ClassVar[str] = "compare"

    model: str
    dataset: str
    output: str
    layers: str | tuple[int, ...] = "dflash"
    dtype: str = "bfloat16"
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    first: int = 0
    samples: int = 256
    together: bool = False
    keep_files: bool = False
    pack_tokens: int = 16384
    max_sample_tokens: int = 32768
    min_free_bytes: int = 1 << 30
    vllm_python: str = ""
    tensor_parallel: int = 1
    concurrency: int = 32
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_whole(self, "first", 0)
        need_whole(self, "samples", 1)
        self.side("vllm")

    def side(self, backend: str) -> ExtractSpec:
        """The extraction of one backend, on all the GPUs. Raises SpecError."""
        common = ("model", "dataset", "layers", "dtype", "device", "gpus", "first")
        limits = ("pack_tokens", "max_sample_tokens", "min_free_bytes")
        of_vllm = ("vllm_python", "tensor_parallel", "concurrency", "extra_args") if backend == "vllm" else ()
        need_text(self, "output")
        try:
            return ExtractSpec(
                output=f"{self.output}/{backend}",
                backend=backend,
                last=self.first + self.samples,
                **{name: getattr(self, name) for name in (*common, *limits, *of_vllm)},
            )
        except SpecError as error:  # of a field that is this spec's own
            raise SpecError(f"{self.verb}: {str(error).removeprefix(f'{ExtractSpec.verb}: ')}") from None


@dataclass(frozen=True, slots=True)
class ExportSpec(Spec):
    """An extraction in SpecForge's offline layout for DFlash: `rows_<a>-<b>/data_<row>.ckpt`, one file a sample.

    output: folder that an extraction wrote. to: folder for SpecForge's files; an earlier export of the same is gone on with.
    rows_per_folder: SpecForge's own is 2000.
    dataset: None takes what the manifest names; the loss masks are its.
    min_free_bytes: the job ends by itself before the disk of `to` has less than this left.
    """

    verb: ClassVar[str] = "export"

    output: str
    to: str
    rows_per_folder: int = 2000
    dataset: str | None = None
    min_free_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        need_text(self, "output", "to", *(("dataset",) if self.dataset is not None else ()))
        need_whole(self, "rows_per_folder", 1)
        need_whole(self, "min_free_bytes", 0)


@dataclass(frozen=True, slots=True)
class DemoSpec(Spec):
    """The whole loop on a tiny model: build it, prepare real conversations, extract, verify, recompute some.

    output: folder for the model, the dataset and the hidden states; an earlier demo's folder is gone on with.
    samples: at most so many of the demo's conversations.
    recompute: so many samples are computed anew.
    layers, blocks, hidden: of the tiny model; family: its architecture, a model_type of the table of families.
    gpus: UUIDs, filled in by the node; the demo runs on the CPU where there are none.
    """

    verb: ClassVar[str] = "demo"

    output: str
    samples: int = 250
    recompute: int = 8
    family: str = "qwen3"
    blocks: int = 8
    hidden: int = 64
    layers: str | tuple[int, ...] = "dflash"
    dtype: str = "float32"
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    pack_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        need_text(self, "output")
        need_whole(self, "samples", 1)
        need_whole(self, "recompute", 0)
        need_one_of(self, "family", FAMILIES)
        need_whole(self, "blocks", 6)
        need_whole(self, "hidden", 32)
        if self.hidden % 32:
            raise SpecError(f"demo: hidden must be a multiple of 32, not {self.hidden}")
        need_one_of(self, "dtype", DTYPES)
        need_one_of(self, "device", DEVICES)
        need_whole(self, "pack_tokens", 1)
        need_whole(self, "seed", 0)
        _layers(self)


SPECS: dict[str, type[Spec]] = {
    spec.verb: spec for spec in (ExtractSpec, PrepareSpec, VerifySpec, ParitySpec, CompareSpec, ExportSpec, DemoSpec)
}
