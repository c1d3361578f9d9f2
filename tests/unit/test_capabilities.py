"""The answer about a model in words: a line a backend, the worst first, and whether any can."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_tui.fleet.capabilities import about, some_can, verdicts
from dflash_tui.fleet.facts import CheckStatus


def backend(ok: bool | None, **fields: Any) -> dict[str, Any]:
    return {"ok": ok, "why": "the reason", "remedy": "" if ok else "the remedy", "warnings": [], **fields}


def vllm(ok: bool | None, version: str = "0.26.0", **fields: Any) -> dict[str, Any]:
    beside = {"python": "/v/bin/python", "version": version, "torch": "2.11.0", "transformers": None}
    return backend(ok, **beside, flags=["--a", "b"], sources=["its source"], **fields)


def answer(hf: bool | None, *vllms: dict[str, Any], **fields: Any) -> dict[str, Any]:
    asked = {"family": "qwen3", "dtype": "bfloat16", "gpus": [], "tensor_parallel": 1}
    return {**asked, "hf": backend(hf, error_limit=0.15), "vllm": list(vllms), "unusable": [], **fields}


def test_the_worst_stands_first_with_its_remedy_and_its_sources() -> None:
    lines = verdicts("gpu-1", answer(True, vllm(True), vllm(False, "0.20.1"), vllm(None, "0.40.0"))).checks
    assert [(line.name, line.status) for line in lines] == [
        ("vLLM 0.20.1", CheckStatus.PROBLEM),
        ("vLLM 0.40.0", CheckStatus.UNKNOWN),
        ("hf", CheckStatus.OK),
        ("vLLM 0.26.0", CheckStatus.OK),
    ]
    assert lines[0].remedy == "the remedy" and "options" not in lines[0].found and "its source" in lines[0].found
    assert "options: --a b" in lines[3].found and "torch 2.11.0, transformers not there" in lines[3].found
    assert "off by at most 15 %" in lines[2].found


def test_a_node_without_vllm_is_told_how_to_make_one_and_a_broken_one_is_a_problem() -> None:
    broken = {"python": "/p", "why": "/p does not run", "remedy": "make it again"}
    lines = verdicts("gpu-1", answer(True, unusable=[broken])).checks
    assert (lines[0].status, lines[0].found, lines[0].remedy) == (
        CheckStatus.PROBLEM,
        "/p does not run",
        "make it again",
    )
    assert lines[1].status is CheckStatus.WARNING and "setup --host gpu-1 --vllm" in lines[1].remedy


@pytest.mark.parametrize(
    ("hf", "vllms", "can"),
    [
        (True, (), True),
        (False, (), False),
        (False, (False,), False),
        (False, (False, None), True),
        (None, (False,), True),
    ],
)
def test_one_backend_that_may_is_enough(hf: bool | None, vllms: tuple[bool | None, ...], can: bool) -> None:
    assert some_can(answer(hf, *map(vllm, vllms))) is can


def test_what_was_asked_is_one_line() -> None:
    assert about(answer(True)) == "qwen3 in bfloat16 on the CPU"
    cards = answer(True, gpus=[[9, 0], [9, 0]], tensor_parallel=2)
    assert about(cards) == "qwen3 in bfloat16 on 2 GPUs of compute capability 9.0, tensor parallel 2"
    assert about(answer(True, family=None)).startswith("a model without model_type")
