"""The options that a real `vllm serve` says it accepts: those that the backend gives are among them."""

from __future__ import annotations

from typing import Any

import pytest

from backends.plan import plan
from backends.questions import VllmOptionsSpec
from backends.vllm.command import ServeSpec, serve_command
from backends.vllm.table import FLAGS


@pytest.fixture(scope="module")
def answer(vllm_python: str) -> dict[str, Any]:
    return plan(VllmOptionsSpec(vllm_python, limit_s=1500))


def test_its_options_are_read_with_their_values_defaults_and_help(answer: dict[str, Any]) -> None:
    assert answer["ok"] and answer["version"].startswith("0.32.0"), answer
    options = {name: option for option in answer["options"] for name in option["names"]}
    assert answer["all"] == len(answer["options"]) > 250
    length = options["--max-model-len"]
    assert length["value"] == "MAX_MODEL_LEN" and length["default"] == "None" and length["section"] == "ModelConfig"
    assert options["--no-enable-prefix-caching"] is options["--enable-prefix-caching"]
    assert options["-tp"] is options["--tensor-parallel-size"]
    assert options["--dtype"]["value"].startswith("{auto,bfloat16")
    assert sum(bool(option["help"]) for option in answer["options"]) == answer["all"]


def test_everything_that_the_backend_gives_it_is_among_them(answer: dict[str, Any], vllm_python: str) -> None:
    names = {name for option in answer["options"] for name in option["names"]}
    spec = ServeSpec(vllm_python, answer["version"], "/model", "/states", (2, 4), 8000, 512)
    given = {word for word in serve_command(spec) if word.startswith("--")}
    of_the_table = {word for note in FLAGS for word in note.text.split() if word.startswith("--")}
    assert given | of_the_table <= names
