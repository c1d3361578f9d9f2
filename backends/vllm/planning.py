"""What `plan` says of an extraction by vLLM: which vLLM, whether it can, and the command. Starts no server and loads no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.environment import cuda_cards, cuda_of_driver
from backends.errors import JobError
from backends.fp8 import FLOAT8
from backends.spec import ExtractSpec
from backends.vllm.command import STATES, check_extra_args, command_for
from backends.vllm.compat import Verdict, can_extract, text_fields
from backends.vllm.found import Found, find_vllm
from backends.vllm.table import TOO_LONG_WAITS

if TYPE_CHECKING:
    from backends.vllm.other import OtherPlan

# The server writes there, on the disk of the output; what is finished is moved out.
STAGING = ".vllm"
ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# Beside a sample: the token that is asked for.
ANSWER_TOKENS = 1


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A vLLM of this node and what it can do with a model."""

    found: Found
    verdict: Verdict
    # A server of ours is started for the longest sample, if the model goes so far.
    most_tokens: int | None = None
    limited_by: str = ""

    def facts(self, spec: ExtractSpec, layer_ids: Sequence[int], longest: int) -> dict[str, Any]:
        """The plan's `vllm`: python, version, what is beside it, the verdict's fields and the command (null where it cannot).

        The command is that of the first server. Its port is 0 here: a free one is chosen when a server is started. Raises JobError for
        its arguments.
        """
        found, verdict = self.found, self.verdict
        check_extra_args(spec.extra_args, verdict.flags)
        command = None
        if verdict.ok is not False:
            command = command_for(
                spec,
                python=found.python,
                version=found.version,
                flags=verdict.flags,
                storage=Path(spec.output).absolute() / STAGING / "0" / STATES,
                layer_ids=layer_ids,
                port=0,
                max_model_len=longest + ANSWER_TOKENS,
            )
        beside = {"torch": found.torch, "cuda": found.cuda, "transformers": found.transformers}
        told = {**verdict.to_json(), "warnings": self._faults()}
        return {"python": found.python, "version": found.version, **beside, **told, "command": command}

    def problem(self) -> JobError | None:
        """Why the job cannot run: this vLLM is known to be unable."""
        return JobError(self.verdict.why, self.verdict.remedy) if self.verdict.ok is False else None

    def warnings(self, layer_ids: Sequence[int]) -> list[str]:
        """What is not known of this vLLM and the model, and its known faults, a line each."""
        verdict = self.verdict
        unknown = [f"{verdict.why}: {verdict.remedy}" if verdict.remedy else verdict.why] if verdict.ok is None else []
        return [*unknown, *self._faults()]

    def _faults(self) -> list[str]:
        """The known faults, but for what the job itself takes care of."""
        return [warning for warning in self.verdict.warnings if warning != TOO_LONG_WAITS]


def too_long(lengths: Sequence[int], rows: Iterable[int], most: int | None, why: str) -> JobError | None:
    """The error of the longest of these rows where a server does not take it: such a request may wait for ever."""
    row = max(rows, key=lengths.__getitem__, default=None)
    if most is None or row is None or lengths[row] + ANSWER_TOKENS <= most:
        return None
    return JobError(
        f"row {row} has {lengths[row]} tokens, too many for the vLLM server with the one of its answer: {why}",
        f"prepare the dataset with max_tokens {most - ANSWER_TOKENS}, or raise that limit",
    )


def plan_server(spec: ExtractSpec, config: Mapping[str, Any]) -> ServerPlan | OtherPlan:
    """Finds this node's vLLM and asks what it can do with the model of this config.json; or asks the server that runs already.

    Raises JobError.
    """
    if importlib.util.find_spec("httpx") is None:
        raise JobError(f"the Python {sys.executable} has no httpx, which speaks to vLLM", "install httpx into it")
    if spec.server_url:
        from backends.vllm.other import plan_other

        return plan_other(spec)
    if len(spec.gpus) % spec.tensor_parallel and spec.gpus:
        raise JobError(
            f"{len(spec.gpus)} GPUs were chosen, which are no whole groups of tensor_parallel {spec.tensor_parallel}",
            "choose a multiple of it",
        )
    found = find_vllm(spec.vllm_python)
    if spec.file_dtype == FLOAT8 and found.hs_connectors is None:
        raise JobError(
            f"the Python {found.python} has no hs-connectors, which writes float8 in vLLM",
            f"{found.python} -m pip install --no-deps hs-connectors==0.9.0, or files in the model's own dtype",
        )
    on_gpus = bool(spec.gpus) or spec.device == "cuda"
    cards = cuda_cards(spec.gpus) if on_gpus else ()
    if on_gpus and not cards:
        raise JobError("no CUDA device is visible on this machine", "choose device cpu, or a node with CUDA")
    verdict = can_extract(
        config,
        found.version,
        missing=found.missing,
        torch=found.torch,
        cuda=found.cuda,
        driver=cuda_of_driver(),
        gpus=cards,
        tensor_parallel=spec.tensor_parallel,
        dtype=spec.dtype,
    )
    return ServerPlan(found, verdict, *longest_of_model(config))


def longest_of_model(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """Tokens of the longest request that vLLM takes for a model, and why: it does not start for longer ones. None: not known.

    As vLLM derives it (`_get_and_verify_max_len`, source of 0.32.0). Where positions are scaled it depends on the version.
    """
    if os.environ.get(ALLOW_LONG, "").strip().lower() in ("1", "true"):
        return None, ""
    fields = text_fields(config)
    most = fields.get("max_position_embeddings")
    scaled = any("factor" in part for part in _rope_parts(fields))
    if scaled or isinstance(most, bool) or not isinstance(most, int):
        return None, ""
    # A model may say that it goes further.
    longer = fields.get("model_max_length")
    if isinstance(longer, int) and longer > most:
        return longer, f"the model's model_max_length is {longer} ({ALLOW_LONG}=1 in the job's environment lifts that)"
    return most, f"the model's max_position_embeddings is {most} ({ALLOW_LONG}=1 in the job's environment lifts that)"


def _rope_parts(fields: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The parameters of rotary embeddings, which may be given for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if isinstance(value, Mapping):
            yield value
            yield from (part for part in value.values() if isinstance(part, Mapping))
