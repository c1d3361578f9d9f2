"""The command line of a vLLM server that extracts hidden states. Pure: it starts nothing and reads nothing.

Ids of layers are vLLM's own, which are the trainer's too (`backends.layers`). Options that the connector does not know in a
version are refused rather than dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import JobError
from backends.fp8 import FLOAT8
from backends.spec import ExtractSpec
from backends.vllm.compat import version_of
from backends.vllm.table import NEWEST_READ

HOST = "127.0.0.1"
# Within a server's folder: where it writes.
STATES = "states"
CONNECTOR = "ExampleHiddenStatesConnector"
# hs-connectors, beside vLLM in its Python; it builds on the connector's writing thread, which came with 0.22.0.
FP8_CONNECTOR, FP8_MODULE = "FP8HiddenStatesConnector", "hs_connectors.fp8_hidden_states_connector"
_FP8_FROM = (0, 22)
# The first version whose connector knows allow_custom_save_path (source of 0.21.0 to 0.24.0).
_SAVE_PATH_FROM = (0, 24)

# What the backend decides: its files would not be what the manifest says, or it would not find the server.
_OURS = {
    "--model": "the model of the spec",
    "--speculative-config": "which layers are extracted",
    "--kv-transfer-config": "where the states are written",
    "--dtype": "dtype of the spec",
    "--tensor-parallel-size": "tensor_parallel of the spec",
    "--host": "the server is spoken to on this machine alone",
    "--port": "a free port is chosen",
    "--max-model-len": "that of the longest sample",
    "--enable-prefix-caching": "states would be shorter than their samples",
    "--no-enable-prefix-caching": "always set",
    "--data-parallel-size": "the backend starts a server for each group of GPUs itself",
    "--pipeline-parallel-size": "the backend's groups are of tensor parallel alone",
    "--served-model-name": "requests name the model by its folder",
    "--api-key": "each server gets a key of its own",
    "--ssl-keyfile": "the backend speaks plain HTTP on this machine",
    "--ssl-certfile": "the backend speaks plain HTTP on this machine",
    "--uds": "the server is spoken to by its port",
    "--config": "options in a file cannot be told from those that the backend sets",
}
# Their short names (source of 0.20.1 to 0.33.0).
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
}


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """What a server of ours is to do.

    python: of vLLM; version: its vLLM's. model: folder. storage: folder for the files, absolute. layer_ids: as `backends.layers`.
    max_model_len: tokens of the longest request, its answer included. file_dtype: "same", or float8_e4m3fn through hs-connectors.
    flags: what `compat` says is needed. extra_args: the user's own, untouched and last, so that one of `flags` yields to them.
    custom_save_path: requests may name the file that is written.
    """

    python: str
    version: str
    model: str
    storage: str
    layer_ids: tuple[int, ...]
    port: int
    max_model_len: int
    dtype: str = "bfloat16"
    file_dtype: str = "same"
    tensor_parallel: int = 1
    flags: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    custom_save_path: bool = False


def quiet_flags(version: str) -> tuple[str, ...]:
    """Leaves out a line of the log for each sample; the option is in every release that was looked at (0.17.0 to 0.33.0)."""
    return ("--disable-uvicorn-access-log",) if (version_of(version) or (0,)) <= NEWEST_READ else ()


def takes_paths(version: str) -> bool:
    """Whether requests may name the file that a server of this version writes."""
    return (version_of(version) or (0,)) >= _SAVE_PATH_FROM


def serve_command(spec: ServeSpec) -> list[str]:
    """The arguments of the server's process, the first its program. Raises JobError for what the version or the backend refuses.

    `vllm serve` is run as a module of its Python, for the script beside that Python may be another's; a module sees the folder
    that it is started in, so that must be an empty one.
    """
    check_extra_args(spec.extra_args, spec.flags)
    version = version_of(spec.version) or (0,)
    if spec.file_dtype == FLOAT8 and version < _FP8_FROM:
        raise JobError(
            f"vLLM {spec.version} cannot write float8: hs-connectors builds on the connector of 0.22.0",
            "use vLLM 0.22.0 or later, or files in the model's own dtype",
        )
    return [
        spec.python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        spec.model,
        "--host",
        HOST,
        "--port",
        str(spec.port),
        "--dtype",
        spec.dtype,
        "--max-model-len",
        str(spec.max_model_len),
        "--tensor-parallel-size",
        str(spec.tensor_parallel),
        "--speculative-config",
        _compact(speculative_config(spec.layer_ids)),
        "--kv-transfer-config",
        _compact(transfer_config(spec, version)),
        *spec.flags,
        *spec.extra_args,
    ]


def command_for(
    spec: ExtractSpec,
    *,
    python: str,
    version: str,
    flags: Sequence[str],
    storage: Path,
    layer_ids: Sequence[int],
    port: int,
    max_model_len: int,
) -> list[str]:
    """The command of one server of an extraction, as the job runs it and `plan` shows it. Raises JobError, as `serve_command`."""
    return serve_command(
        ServeSpec(
            python=python,
            version=version,
            model=str(Path(spec.model).absolute()),
            storage=str(storage),
            layer_ids=tuple(layer_ids),
            port=port,
            max_model_len=max_model_len,
            dtype=spec.dtype,
            file_dtype=spec.file_dtype,
            tensor_parallel=spec.tensor_parallel,
            flags=(*quiet_flags(version), *flags),
            extra_args=spec.extra_args,
            custom_save_path=takes_paths(version),
        )
    )


def speculative_config(layer_ids: Sequence[int]) -> dict[str, Any]:
    """The method that computes no draft and keeps the states of these layers."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }


def transfer_config(spec: ServeSpec, version: tuple[int, ...]) -> dict[str, Any]:
    """The connector that writes the files, with the options that this version knows. Raises JobError for one that it does not."""
    extra: dict[str, Any] = {"shared_storage_path": spec.storage}
    if spec.custom_save_path:
        if version < _SAVE_PATH_FROM:
            raise JobError(f"vLLM {spec.version} has no allow_custom_save_path", "use vLLM 0.24.0 or later")
        extra["allow_custom_save_path"] = True
    float8 = spec.file_dtype == FLOAT8
    module = {"kv_connector_module_path": FP8_MODULE} if float8 else {}
    return {
        "kv_connector": FP8_CONNECTOR if float8 else CONNECTOR,
        **module,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


def check_extra_args(extra_args: Sequence[str], flags: Sequence[str] = ()) -> None:
    """Raises JobError for an argument of the user's that would undo what the backend sets; all others are vLLM's to judge.

    flags: those that the version needs; a `--no-…` among them must stand, the others yield.
    """
    first = next(iter(extra_args), "-")
    if not first.startswith("-"):
        raise JobError(
            f"the argument {first!r} for vLLM is no option, and the model is named already",
            "give options alone after --",
        )
    needed = {
        flag.replace("--no-", "--", 1): "without it the states would be wrong" for flag in flags if "--no-" in flag
    }
    reasons = {
        **{name: f"{flag} is needed, {why}" for name, why in needed.items() for flag in [f"--no-{name[2:]}"]},
        **_OURS,
    }
    for word in extra_args:
        name = _option(word)
        # An unambiguous beginning of a name would do for argparse.
        found = next((ours for ours in reasons if name and ours.startswith(name)), None)
        if found is not None:
            raise JobError(
                f"the argument {word.partition('=')[0]} is the backend's own: {reasons[found]}", "leave it out"
            )


def _option(word: str) -> str:
    """The long name of the option that a word is, with dashes; "" where it is none.

    vLLM takes underscores for dashes, `--name.key value` for a key of a JSON option, and `--name=value`.
    """
    name = word.partition("=")[0].partition(".")[0]
    if not name.startswith("--"):
        return _SHORT.get(name, "")
    return name.replace("_", "-") if len(name) > 2 else ""


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
