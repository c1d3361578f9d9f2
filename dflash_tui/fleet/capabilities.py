"""The answer to `capabilities` in words: a line for each backend, as `doctor` tells what it looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_tui.fleet.checkup import in_order
from dflash_tui.fleet.facts import Check, CheckStatus, Checkup

_STATUSES = {True: CheckStatus.OK, False: CheckStatus.PROBLEM, None: CheckStatus.UNKNOWN}


def some_can(answer: Mapping[str, Any]) -> bool:
    """Whether a backend can, or may."""
    return answer["hf"]["ok"] is not False or any(one["ok"] is not False for one in answer["vllm"])


def verdicts(host: str, answer: Mapping[str, Any]) -> Checkup:
    """hf, every vLLM and every Python that does not answer, the worst first. `answer`: of a node, with `ok` true."""
    checks = [_check("hf", answer["hf"], _packages(answer["hf"].get("versions") or {}))]
    for one in answer["vllm"]:
        beside = f"{one['python']}, with {_packages({name: one.get(name) for name in ('torch', 'transformers')})}"
        checks.append(_check(f"vLLM {one['version']}", one, beside))
    if not answer["vllm"]:
        remedy = f"dflash-tui setup --host {host} --vllm 0.26.0, or name its Python with --vllm-python"
        checks.append(Check("vLLM", CheckStatus.WARNING, "none is found on this node", remedy))
    checks += [Check("vLLM", CheckStatus.PROBLEM, one["why"], one["remedy"]) for one in answer.get("unusable") or ()]
    return Checkup(host, in_order(checks))


def about(answer: Mapping[str, Any]) -> str:
    """What was asked: "qwen3 in bfloat16 on 2 GPUs of compute capability 9.0, tensor parallel 2"."""
    cards = sorted({".".join(map(str, card)) for card in answer["gpus"]})
    count = len(answer["gpus"])
    where = f"{count} GPU{'s' if count > 1 else ''} of compute capability {', '.join(cards)}" if count else "the CPU"
    parallel = f", tensor parallel {answer['tensor_parallel']}" if answer["tensor_parallel"] > 1 else ""
    return f"{answer['family'] or 'a model without model_type'} in {answer['dtype']} on {where}{parallel}"


def _packages(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version or 'not there'}" for name, version in versions.items())


def _check(name: str, one: Mapping[str, Any], where: str) -> Check:
    """The reason first, then what it takes and what is known of it, each sentence of its own."""
    parts = [one["why"]]
    if one.get("flags") and one["ok"] is not False:
        parts.append(f"options: {' '.join(one['flags'])}")
    if one.get("error_limit"):
        parts.append(
            f"off by at most {100 * one['error_limit']:.2g} % at the last layer, checked by verify --recompute"
        )
    parts += [f"warning: {line}" for line in one.get("warnings") or ()]
    parts.append(f"in {where}" if where else "")
    if one.get("sources"):
        parts.append(f"known from: {'; '.join(one['sources'])}")
    return Check(name, _STATUSES[one["ok"]], ". ".join(part for part in parts if part), one["remedy"])
