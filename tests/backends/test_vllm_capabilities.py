"""The questions that start nothing: what every vLLM of a node and hf can do with a model, and the options of `vllm serve`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from vllm_environments import environment, installed, python_of

import backends.plan.questions as questions
from backends.__main__ import read_spec
from backends.plan import plan
from backends.questions import CapabilitiesSpec, VllmOptionsSpec
from backends.spec import ExtractSpec, SpecError
from backends.vllm.options import parse

MAIN = Path(questions.__file__).parents[1] / "__main__.py"
H200 = (9, 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three whole environments: one too old for hybrids, one that is tried, one whose Python is gone."""
    root = tmp_path_factory.mktemp("data")
    environment(root, "0.20.1")
    environment(root, "0.26.0")
    broken = environment(root, "0.32.0")
    broken.unlink()
    broken.write_text("#!/bin/sh\necho its disk is gone >&2\nexit 3\n")
    broken.chmod(0o755)
    return root


@pytest.fixture
def node(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with those, and one H200 of which only the driver's word is made up."""
    monkeypatch.setenv("XDG_DATA_HOME", str(data))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(questions, "cards_by_uuid", lambda: {"GPU-1": H200})
    monkeypatch.setattr(questions, "cuda_of_driver", lambda: (13, 0))
    return data


def config(folder: Path, **fields: Any) -> str:
    """A folder that has nothing but a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


DENSE = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HYBRID = {"model_type": "qwen3_5", "text_config": {**DENSE, "model_type": "qwen3_5_text"}}


def asked(model: str, **fields: Any) -> dict[str, Any]:
    answer = plan(CapabilitiesSpec.from_json({"model": model, **fields}))
    assert json.loads(json.dumps(answer)) == answer
    return answer


def test_a_dense_model_goes_with_both_versions_and_the_one_that_hangs_together_with_the_card(
    node: Path, tmp_path: Path
) -> None:
    answer = asked(config(tmp_path / "dense", **DENSE))
    assert (answer["ok"], answer["family"], answer["gpus"], answer["driver_cuda"]) == (True, "qwen3", [[9, 0]], [13, 0])
    assert [(one["version"], one["ok"], one["tried"]) for one in answer["vllm"]] == [
        ("0.26.0", True, True),
        ("0.20.1", True, True),
    ]
    assert answer["vllm"][0]["python"] == python_of(node, "0.26.0")
    assert answer["vllm"][0]["torch"] == "2.11.0" and answer["vllm"][0]["cuda"] == "13.0"
    (broken,) = answer["unusable"]
    assert broken["python"] == python_of(node, "0.32.0")
    assert "its disk is gone" in broken["why"] and broken["remedy"]


def test_a_hybrid_is_for_the_newer_version_and_the_older_says_which(node: Path, tmp_path: Path) -> None:
    newer, older = asked(config(tmp_path / "hybrid", **HYBRID))["vllm"]
    assert (newer["version"], newer["ok"]) == ("0.26.0", True)
    assert "--language-model-only" in newer["flags"] and "triton" in newer["flags"]
    assert (older["version"], older["ok"], older["instead"]) == ("0.20.1", False, "0.26.0")
    assert "hybrid KV cache manager" in older["why"] and "0.26.0" in older["remedy"] and older["sources"]


def test_a_vllm_whose_python_lacks_torch_is_no_choice(node: Path, tmp_path: Path) -> None:
    python = tmp_path / "lacks" / "bin" / "python"
    venv.create(python.parent.parent, symlinks=True)
    installed(python, "vllm", "0.26.0")
    installed(python, "transformers", "5.14.1")
    answer = asked(config(tmp_path / "model", **DENSE), vllm_pythons=(str(python),))
    found = next(one for one in answer["vllm"] if one["python"] == str(python))
    assert found["ok"] is False and found["missing"] == ["torch"]
    assert found["why"] == "torch is not beside this vLLM, which cannot be imported so"
    assert all(one["missing"] == [] for one in answer["vllm"] if one is not found)


def test_hf_says_how_it_computes_the_model_and_how_far_off_it_may_be(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "cards_by_uuid", dict)
    model = config(tmp_path / "dense", **DENSE)
    exact, rounded = asked(model, dtype="float32")["hf"], asked(model)["hf"]
    assert exact["ok"] and exact["packing"] == "packs" and "Qwen3 is known, 8 blocks; on the CPU" in exact["why"]
    assert exact["error_limit"] == 1e-5 < rounded["error_limit"]
    assert set(exact["versions"]) == {"python", "torch", "transformers", "flash-linear-attention"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mamba9"}, "'mamba9'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized (fp8)"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_every_launch_refuses_is_no_for_vllm_too_with_the_same_reason(
    node: Path, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    model = config(tmp_path / "other", **{**DENSE, **fields})
    answer = asked(model)
    assert answer["ok"]
    assert answer["hf"]["ok"] is False and named in answer["hf"]["why"] and answer["hf"]["remedy"]
    assert {one["ok"] for one in answer["vllm"]} == {False}
    assert {one["why"] for one in answer["vllm"]} == {f"extract refuses it: {answer['hf']['why']}"}
    of_vllm = {"backend": "vllm", "device": "cpu", "vllm_python": python_of(node, "0.26.0")}
    extraction = plan(ExtractSpec(model, "/no/dataset", str(tmp_path / "out"), **of_vllm))
    assert (extraction["ok"], extraction["error"]) == (False, answer["hf"]["why"])


def test_a_vllm_that_is_named_is_judged_once_and_beside_those_of_setup(node: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "own", "0.16.0")
    named = [str(python), str(python), "/nowhere/python"]
    answer = asked(config(tmp_path / "dense", **DENSE), vllm_pythons=named)
    assert [one["version"] for one in answer["vllm"]] == ["0.26.0", "0.20.1", "0.16.0"]
    assert answer["vllm"][2]["ok"] is False and "extract_hidden_states" in answer["vllm"][2]["why"]
    assert [one["python"] for one in answer["unusable"]] == ["/nowhere/python", python_of(node, "0.32.0")]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"gpus": ["3"]}, "there is no GPU 3: this node has 1"),
        ({"gpus": ["GPU-9"]}, "there is no GPU GPU-9"),
        ({"tensor_parallel": 2}, "tensor_parallel 2 takes so many GPUs, and there are 1"),
        ({"model": "/nowhere/model"}, "the model /nowhere/model is not a folder"),
    ],
)
def test_what_cannot_be_asked_is_one_line_with_a_remedy(
    node: Path, tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    answer = asked(**{"model": config(tmp_path / "dense", **DENSE), **fields})
    assert (answer["ok"], answer["error"]) == (False, answer["error"]) and told in answer["error"]
    assert answer["remedy"]


def test_cards_are_chosen_by_index_or_uuid(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "cards_by_uuid", lambda: {"GPU-1": (7, 0), "GPU-2": H200})
    model = config(tmp_path / "dense", **DENSE)
    assert asked(model)["gpus"] == [[7, 0], [9, 0]]
    assert {one["ok"] for one in asked(model)["vllm"]} == {False}  # the older card cannot bfloat16
    for name in ("1", "GPU-2"):
        answer = asked(model, gpus=[name])
        assert answer["gpus"] == [[9, 0]] and answer["vllm"][0]["ok"] is True


@pytest.mark.parametrize(
    ("spec", "fields", "told"),
    [
        (CapabilitiesSpec, {"model": ""}, "model must be a text that is not empty"),
        (CapabilitiesSpec, {"model": "/m", "dtype": "int3"}, "dtype must be one of"),
        (CapabilitiesSpec, {"model": "/m", "tensor_parallel": 0}, "tensor_parallel must be a whole number"),
        (CapabilitiesSpec, {"model": "/m", "gpus": ("",)}, "gpus must be a list"),
        (CapabilitiesSpec, {"model": "/m", "device": "cpu", "gpus": ("0",)}, "leave one of the two out"),
        (VllmOptionsSpec, {"words": ("",)}, "words must be a list"),
        (VllmOptionsSpec, {"limit_s": 0}, "limit_s must be a whole number"),
        (VllmOptionsSpec, {"vllm_python": 3}, "vllm_python must be a text"),
    ],
)
def test_a_question_that_cannot_be_is_refused_in_one_line(spec: Any, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        spec(**fields)


def test_the_question_goes_through_plan_loads_no_torch_and_is_no_job(node: Path, tmp_path: Path) -> None:
    model = config(tmp_path / "dense", **DENSE)
    trap = tmp_path / "trap"
    for name in ("torch", "transformers", "vllm"):
        (trap / name).mkdir(parents=True)
        (trap / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    request = json.dumps({"verb": "capabilities", "spec": {"model": model, "dtype": "float32"}})
    done = subprocess.run(
        [sys.executable, str(MAIN), "plan", "-"],
        input=request,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(trap)},
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["ok"] and [one["version"] for one in answer["vllm"]], answer
    job = subprocess.run(
        [sys.executable, str(MAIN), "capabilities", "-"], input="{}", capture_output=True, text=True, check=False
    )
    assert job.returncode == 2 and "usage" in job.stderr
    assert isinstance(read_spec("vllm-options", "{}"), VllmOptionsSpec)


def test_a_name_that_the_hub_does_not_give_is_one_line(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    answer = asked("nobody/nothing")
    assert answer["ok"] is False and "nobody/nothing" in answer["error"] and "\n" not in answer["error"]


HELP = """\
INFO 11-30 01:20:49 [__init__.py:1] noise of a start
usage: vllm serve [model_tag] [options]

positional arguments:
  model_tag             The model tag (default: None)

options:
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many API servers. Defaults to 1. (default: None)
  --headless            Run in headless mode. (default: False)
  -h, --help            show this help message and exit

CacheConfig:
  Configuration for the KV cache.

  --block-size {1,8,16}, --bs {1,8,16}
                        Size of a block (default: 16)
  --enable-prefix-caching, --no-enable-prefix-caching
                        Whether to enable prefix caching:
                        - "yes": always.
                        - "no": never. (default: True)
  --undocumented X

When passing JSON CLI arguments, the following are equivalent:
   --json-arg '{"key1": "value1"}'
   --json-arg.key1 value1
"""


def test_the_help_is_read_into_names_values_defaults_and_a_line() -> None:
    options = {option.names[0]: option for option in parse(HELP)}
    assert list(options) == [
        "--api-server-count", "--headless", "--help", "--block-size", "--enable-prefix-caching", "--undocumented",
    ]  # fmt: skip
    servers = options["--api-server-count"]
    assert servers.names == ("--api-server-count", "-asc") and servers.value == "API_SERVER_COUNT"
    assert (servers.help, servers.default, servers.section) == ("How many API servers.", "None", "options")
    assert options["--block-size"].value == "{1,8,16}" and options["--block-size"].default == "16"
    caching = options["--enable-prefix-caching"]
    assert caching.names == ("--enable-prefix-caching", "--no-enable-prefix-caching")
    assert (caching.help, caching.default, caching.section) == (
        "Whether to enable prefix caching:",
        "True",
        "CacheConfig",
    )
    assert options["--undocumented"].help == "" and options["--undocumented"].default is None
    assert options["--headless"].value == "" and options["--help"].names == ("--help", "-h")
    assert [name for name, option in options.items() if option.has(("PREFIX_caching",))] == ["--enable-prefix-caching"]
    assert [name for name, option in options.items() if option.has(("mode", "run"))] == ["--headless"]


def serving(python: Path, script: str) -> str:
    """A vllm in that environment whose command line does what the script says."""
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    folder = site / "vllm"
    (folder / "__init__.py").write_text("")
    for name in ("entrypoints", "entrypoints/cli"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    (folder / "entrypoints" / "cli" / "main.py").write_text(script)
    return str(python)


def test_the_options_are_asked_in_an_empty_folder_and_filtered(tmp_path: Path) -> None:
    told = f"import os, sys\nassert sys.argv[1:] == ['serve', '--help=all'] and not os.listdir()\nprint({HELP!r})\n"
    python = serving(environment(tmp_path, "0.26.0"), told)
    answer = plan(VllmOptionsSpec(python, ("prefix",)))
    assert answer["ok"], answer
    assert (answer["python"], answer["version"], answer["all"]) == (python, "0.26.0", 6)
    (option,) = answer["options"]
    assert option["names"] == ["--enable-prefix-caching", "--no-enable-prefix-caching"]


@pytest.mark.parametrize(
    ("script", "limit_s", "told"),
    [
        (
            "raise RuntimeError('Failed to infer device type')",
            60,
            "status 1: RuntimeError: Failed to infer device type",
        ),
        ("print('usage: nothing')", 60, "status 0: usage: nothing"),
        ("import time; time.sleep(600)", 1, "did not say its options within 1 s"),
    ],
)
def test_a_vllm_that_does_not_answer_is_told_in_its_own_words(
    tmp_path: Path, script: str, limit_s: int, told: str
) -> None:
    python = serving(environment(tmp_path, "0.26.0"), script)
    answer = plan(VllmOptionsSpec(python, (), limit_s))
    assert answer["ok"] is False and told in answer["error"] and answer["remedy"]


def test_a_python_without_vllm_has_no_options(tmp_path: Path) -> None:
    python = environment(tmp_path, "0.26.0")
    shutil.rmtree(next(python.parent.parent.glob("lib/python*/site-packages/vllm-*")))
    installed(python, "other", "1")
    assert "has no vllm" in plan(VllmOptionsSpec(str(python)))["error"]
