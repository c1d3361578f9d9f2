"""`plan` with the backend vllm: the node's vLLM is found without importing it, and the answer carries what it can do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_environments import environment, python_of

from backends.errors import JobError
from backends.plan import plan
from backends.spec import ExtractSpec, SpecError
from backends.vllm.found import environments, find_vllm, look
from backends.vllm.planning import longest_of_model

NO_CACHE = "--no-enable-prefix-caching"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole environments and one that setup never finished."""
    root = tmp_path_factory.mktemp("data")
    environment(root, "0.20.1")
    environment(root, "0.26.0")
    environment(root, "0.32.0", whole=False)
    return root


@pytest.fixture
def home(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(data))
    return data


@pytest.fixture
def fields(models: dict[str, Path], dataset: Path, tmp_path: Path) -> dict[str, Any]:
    out = str(tmp_path / "out")
    return {
        "model": str(models["qwen3"]),
        "dataset": str(dataset),
        "output": out,
        "min_free_bytes": 0,
        "backend": "vllm",
    }


def planned(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = plan(ExtractSpec.from_json({**fields, **more}))
    assert json.loads(json.dumps(answer)) == answer
    return answer


def test_the_newest_whole_environment_is_taken_and_nothing_is_imported(home: Path) -> None:
    assert environments() == [python_of(home, "0.26.0"), python_of(home, "0.20.1")]
    found = find_vllm()
    assert (found.python, found.version) == (python_of(home, "0.26.0"), "0.26.0")
    assert (found.torch, found.cuda, found.transformers, found.hs_connectors) == ("2.11.0", "13.0", "5.14.1", None)
    assert find_vllm(python_of(home, "0.20.1")).version == "0.20.1"


def test_a_python_without_vllm_or_none_at_all_is_told_with_what_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    odd = tmp_path / "odd"
    odd.write_text("#!/bin/sh\nprintf '\\377 is no text\\n' >&2\nexit 1\n")
    odd.chmod(0o755)
    assert look(sys.executable) is None
    for python, told in (
        ("", "no vLLM is on this node"),
        (sys.executable, "has no vllm"),
        ("/nowhere/python", r"/nowhere/python \(--vllm-python\) is not on this node"),
        ("~no-such-user/bin/python", r"~no-such-user/bin/python \(--vllm-python\) is not on this node"),
        (str(odd), "does not run: \ufffd is no text"),
        (shutil.which("true") or "true", "does not run"),
    ):
        with pytest.raises(JobError, match=told) as refusal:
            find_vllm(python)
        assert "setup --vllm" in refusal.value.remedy


def test_the_plan_carries_the_verdict_and_the_command(home: Path, fields: dict[str, Any]) -> None:
    answer = planned(fields, extra_args=["--enforce-eager"], layers=[2, 4, 8])
    assert (answer["ok"], answer["error"], answer["remedy"]) == (True, None, None)
    assert (answer["workers"], answer["packing"], answer["device"]) == (1, "the server's own batches", "cpu")
    # What is not known is said before hours are spent.
    assert any("was not tried" in line or "pinned memory" in line for line in answer["warnings"])
    vllm = answer["vllm"]
    # These tests have no GPU.
    assert (vllm["version"], vllm["ok"], vllm["tried"]) == ("0.26.0", None, False)
    assert "pinned memory" in vllm["why"]
    assert vllm["flags"] == [NO_CACHE]
    command = vllm["command"]
    assert command[:5] == [python_of(home, "0.26.0"), "-m", "vllm.entrypoints.cli.main", "serve", fields["model"]]
    assert command[-3:] == ["--disable-uvicorn-access-log", NO_CACHE, "--enforce-eager"]
    extra = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra == {"shared_storage_path": fields["output"] + "/.vllm/0/states", "allow_custom_save_path": True}
    assert '"eagle_aux_hidden_state_layer_ids":[2,4,8]' in command[command.index("--speculative-config") + 1]
    from backends.dataset import PreparedDataset

    longest = max(PreparedDataset(fields["dataset"]).lengths())
    assert command[command.index("--max-model-len") + 1] == str(longest + 1)
    assert answer["samples"] > 0
    assert answer["memory_bytes_per_worker"] is None
    # Of what the job itself takes care of nobody is warned.
    assert not any("waits for ever" in line for line in answer["warnings"])


def test_a_sample_that_fills_the_models_positions_is_refused_before_a_server_dies_of_it(
    home: Path, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.dataset import PreparedDataset

    longest = max(PreparedDataset(fields["dataset"]).lengths())
    model = Path(shutil.copytree(fields["model"], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())

    def answer(**changed: Any) -> dict[str, Any]:
        (model / "config.json").write_text(json.dumps({**config, **changed}))
        return planned(fields, model=str(model))

    assert answer(max_position_embeddings=longest + 1)["ok"]
    full = answer(max_position_embeddings=longest)
    assert not full["ok"]
    assert f"has {longest} tokens, too many for the vLLM server with the one of its answer" in full["error"]
    assert f"max_position_embeddings is {longest}" in full["error"]
    assert f"max_tokens {longest - 1}" in full["remedy"]
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert answer(max_position_embeddings=longest)["ok"]


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 100}}, 100),
        ({"max_position_embeddings": 100, "model_max_length": 200}, 200),
        ({"max_position_embeddings": 100, "model_max_length": 50}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 100, "rope_parameters": {"full_attention": {"factor": 8.0}}}, None),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
)
def test_how_long_a_sample_vllm_takes_is_known_where_no_positions_are_scaled(
    config: dict[str, Any], most: int | None
) -> None:
    assert longest_of_model(config)[0] == most


def test_a_hybrid_is_refused_by_the_old_version_with_its_reason_and_no_command(
    home: Path, fields: dict[str, Any], models: dict[str, Path]
) -> None:
    model = str(models["qwen3_5"])
    answer = planned(fields, model=model, vllm_python=python_of(home, "0.20.1"))
    assert answer["ok"] is False
    assert answer["error"].startswith("vLLM 0.20.1 cannot extract from qwen3_5")
    assert answer["remedy"] == "use the backend hf"
    assert answer["vllm"]["ok"] is False
    assert answer["vllm"]["command"] is None
    newer = planned(fields, model=model)
    assert (newer["ok"], newer["error"]) == (True, None)
    assert newer["vllm"]["flags"] == [NO_CACHE, "--language-model-only"]


def test_a_vllm_without_torch_is_refused_before_a_server_dies_of_it(home: Path, fields: dict[str, Any]) -> None:
    python = environment(home / "lacks", "0.26.0")
    shutil.rmtree(next(python.parent.parent.glob("lib/python*/site-packages/torch")))
    answer = planned(fields, vllm_python=str(python))
    assert answer["ok"] is False
    assert answer["error"] == "torch is not beside this vLLM, which cannot be imported so"
    assert "setup --vllm 0.26.0" in answer["remedy"]


def test_a_family_that_hf_does_not_know_is_refused_in_vllms_words(
    home: Path, fields: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["qwen3"], tmp_path / "t5")
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    text = json.dumps({**config, "model_type": "t5", "is_encoder_decoder": True})
    (tmp_path / "t5" / "config.json").write_text(text)
    assert "an encoder and a decoder" in planned(fields, model=str(tmp_path / "t5"))["error"]


def test_arguments_and_groups_that_cannot_be_are_refused_by_the_plan(home: Path, fields: dict[str, Any]) -> None:
    assert "--port is the backend's own" in planned(fields, extra_args=["--port", "1"])["error"]
    said = planned(fields, tensor_parallel=2, gpus=["GPU-1", "GPU-2", "GPU-3"])["error"]
    assert said == "3 GPUs were chosen, which are no whole groups of tensor_parallel 2"
    assert "does not divide the model's" in planned(fields, tensor_parallel=7)["error"]
    assert "has no hs-connectors" in planned(fields, file_dtype="float8_e4m3fn")["error"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"extra_args": ("--enforce-eager",)}, r"extra_args \(--enforce-eager\) is of the backend vllm"),
        ({"tensor_parallel": 2}, "tensor_parallel is of the backend vllm"),
        ({"vllm_python": "/p"}, "vllm_python is of the backend vllm"),
        ({"backend": "vllm", "tensor_parallel": 0}, "tensor_parallel must be a whole number of at least 1"),
        ({"backend": "vllm", "extra_args": ("",)}, "extra_args must be a list of arguments"),
        ({"backend": "vllm", "vllm_python": 3}, "vllm_python must be a text"),
    ],
)
def test_fields_of_the_backend_are_checked_and_mean_nothing_to_another(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        ExtractSpec(model="/m", dataset="/d", output="/o", **fields)
