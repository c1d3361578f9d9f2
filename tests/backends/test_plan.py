"""`plan` answers what a job would do, or why it cannot, in one line each, before anything is loaded."""

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
from extraction_jobs import MAIN, Job, make_dataset

from backends.environment import import_remedy
from backends.hsfile import bytes_per_token
from backends.plan import plan
from backends.spec import ExtractSpec, PrepareSpec, VerifySpec


@pytest.fixture
def extract_spec(models: dict[str, Path], dataset: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(models["qwen3"]),
        "dataset": str(dataset),
        "output": str(tmp_path / "out"),
        "min_free_bytes": 0,
    }


def planned(spec: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = plan(ExtractSpec.from_json({**spec, **fields}))
    assert json.loads(json.dumps(answer)) == answer
    return answer


def refused(answer: dict[str, Any]) -> str:
    """The error and the remedy, each one line."""
    assert answer["ok"] is False
    assert answer["error"]
    assert "\n" not in answer["error"]
    return f"{answer['error']} | {answer['remedy']}"


def with_config(model: Path, folder: Path, **fields: Any) -> str:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return str(folder)


def test_the_facts_of_an_extraction(extract_spec: dict[str, Any], dataset: Path) -> None:
    from backends.dataset import PreparedDataset

    lengths = PreparedDataset(dataset).lengths()
    answer = planned(extract_spec)
    assert answer["ok"] is True
    assert answer["error"] is answer["remedy"] is None
    facts = {name: answer[name] for name in ("layer_ids", "num_layers", "hidden_size", "family", "dtype", "device")}
    assert facts == {
        "layer_ids": [2, 3, 4, 5, 6, 8],
        "num_layers": 8,
        "hidden_size": 64,
        "family": "Qwen3",
        "dtype": "bfloat16",
        "device": "cpu",
    }
    assert answer["samples"] == answer["samples_that_fit"] == len(lengths)
    assert answer["tokens"] == sum(lengths)
    assert answer["bytes_per_token"] == 6 * 64 * 2 + 8
    assert answer["bytes_total"] == sum(lengths) * answer["bytes_per_token"]
    assert (answer["already_done"], answer["workers"], answer["packing"]) == (0, 1, "packs")
    assert answer["versions"]["torch"]
    assert answer["disk_free_bytes"] > 0
    part = planned(extract_spec, first=2, last=5, layers=[0, 8], dtype="float32")
    assert (part["samples"], part["tokens"], part["bytes_per_token"]) == (3, sum(lengths[2:5]), 2 * 64 * 4 + 8)


def test_bytes_per_token_are_those_of_a_real_model() -> None:
    assert bytes_per_token(6, 4096, "bfloat16") == 49_152 + 8


def test_planning_changes_nothing_on_the_disk(extract_spec: dict[str, Any], tmp_path: Path) -> None:
    planned(extract_spec)
    assert not (tmp_path / "out").exists()


def test_refusals_of_the_model(extract_spec: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(planned(extract_spec, model=str(tmp_path / "empty")))
    assert "is not a folder" in refused(planned(extract_spec, model=str(tmp_path / "nothing")))
    other = with_config(models["qwen3"], tmp_path / "mamba", model_type="mamba2")
    said = refused(planned(extract_spec, model=other))
    assert "'mamba2'" in said
    assert "qwen3, qwen2" in said
    kinds = ["sliding_attention"] * 8
    torn_windows = with_config(models["qwen3"], tmp_path / "windows", layer_types=kinds, use_sliding_window=False)
    assert "use_sliding_window is off" in refused(planned(extract_spec, model=torn_windows))
    chunked = with_config(models["qwen3"], tmp_path / "chunked", layer_types=["chunked_attention"] * 8)
    assert "kind chunked_attention" in refused(planned(extract_spec, model=chunked))
    capped = with_config(models["gemma3_text"], tmp_path / "capped", attn_logit_softcapping=50.0)
    assert "attn_logit_softcapping" in refused(planned(extract_spec, model=capped))
    both_ways = with_config(models["gemma3_text"], tmp_path / "both_ways", use_bidirectional_attention=True)
    assert "use_bidirectional_attention is True" in refused(planned(extract_spec, model=both_ways))
    fp8 = with_config(models["llama"], tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    assert "quantized (fp8)" in refused(planned(extract_spec, model=fp8))
    rope = with_config(models["llama"], tmp_path / "rope", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "'dynamic'" in refused(planned(extract_spec, model=rope))
    # The older name overrules the newer one in Transformers, so both must be fixed.
    both = with_config(
        models["llama"],
        tmp_path / "both",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_scaling={"type": "longrope"},
    )
    assert "'longrope' (rope_scaling)" in refused(planned(extract_spec, model=both))
    unknown = with_config(models["llama"], tmp_path / "unknown", rope_parameters={"rope_type": "hyperbolic"})
    assert "use a model with rope type default, linear" in refused(planned(extract_spec, model=unknown))
    torn = with_config(models["llama"], tmp_path / "torn", hidden_size=None)
    assert "hidden_size is None" in refused(planned(extract_spec, model=torn))
    (tmp_path / "rope" / "model.safetensors").unlink()
    bare = with_config(tmp_path / "rope", tmp_path / "bare", rope_parameters={"rope_type": "default"})
    assert "has no weights" in refused(planned(extract_spec, model=bare))
    (tmp_path / "empty" / "config.json").write_text("{not json")
    assert "config.json cannot be read" in refused(planned(extract_spec, model=str(tmp_path / "empty")))


def test_refusals_of_layers_backend_and_device(extract_spec: dict[str, Any]) -> None:
    assert "id 9 is not in a model of 8 blocks" in refused(planned(extract_spec, layers=[2, 9]))
    import torch

    if not torch.cuda.is_available():
        assert "CUDA" in refused(planned(extract_spec, device="cuda"))
    assert "device is cpu but GPUs were chosen" in refused(planned(extract_spec, device="cpu", gpus=["GPU-1"]))


def test_refusals_of_the_dataset(extract_spec: dict[str, Any], tmp_path: Path) -> None:
    assert "is not a folder" in refused(planned(extract_spec, dataset=str(tmp_path / "nothing")))
    long = make_dataset(tmp_path / "long", [10, 300, 20, 400])
    said = refused(planned(extract_spec, dataset=str(long), max_sample_tokens=256))
    assert "row 1 has 300 tokens, more than max_sample_tokens=256, and 1 more are too long" in said
    assert "max_tokens=256" in said
    assert planned(extract_spec, dataset=str(long), max_sample_tokens=256, last=1)["ok"] is True
    assert "first is 9, but the dataset has 4 samples" in refused(planned(extract_spec, dataset=str(long), first=9))
    assert "last is 9, but the dataset has 4 samples" in refused(planned(extract_spec, dataset=str(long), last=9))


def test_refusals_of_the_output_folder(extract_spec: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(planned(extract_spec, output=str(tmp_path / "file")))
    assert "is not a folder" in refused(planned(extract_spec, output=str(tmp_path / "file" / "out")))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "hs_3.safetensors").write_bytes(b"x")
    assert "no manifest.jsonl" in refused(planned(extract_spec, output=str(tmp_path / "foreign")))


def test_a_disk_without_room_is_refused_and_says_how_many_samples_fit(extract_spec: dict[str, Any]) -> None:
    free = planned(extract_spec)["disk_free_bytes"]
    answer = planned(extract_spec, min_free_bytes=free * 2)
    assert "its disk has room for 0" in refused(answer)
    assert answer["samples_that_fit"] == 0
    assert answer["samples"] > 0


def test_more_positions_than_the_model_was_made_for_are_a_warning(
    extract_spec: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    short = with_config(models["qwen3"], tmp_path / "short", max_position_embeddings=8)
    answer = planned(extract_spec, model=short)
    assert answer["ok"] is True
    assert "max_position_embeddings" in answer["warnings"][-1]


def test_a_dataset_that_the_trainer_would_stop_at_is_a_warning(
    extract_spec: dict[str, Any], dataset: Path, tmp_path: Path
) -> None:
    plain = Path(shutil.copytree(dataset, tmp_path / "plain"))
    state = json.loads((plain / "state.json").read_text())
    (plain / "state.json").write_text(json.dumps({**state, "_format_type": None}))
    assert not any("trainer stops" in line for line in planned(extract_spec)["warnings"])
    assert any(
        "the trainer stops at others: set" in line for line in planned(extract_spec, dataset=str(plain))["warnings"]
    )


def test_layers_without_the_last_one_are_a_warning_since_the_trainer_needs_it(extract_spec: dict[str, Any]) -> None:
    assert any("layer id 8, the last one" in line for line in planned(extract_spec, layers=[2, 5])["warnings"])
    assert not any("the last one" in line for line in planned(extract_spec, layers=[2, 8])["warnings"])


def test_a_folder_of_another_extraction_is_refused_and_the_same_one_is_counted(
    extract_spec: dict[str, Any], tmp_path: Path, models: dict[str, Path]
) -> None:
    job = Job(tmp_path / "job", **extract_spec, last=3)
    assert job.run() == 0, job.stderr
    written = {"dtype": "float32"}
    assert planned(extract_spec, **written)["already_done"] == 3
    assert "dtype: float32 there, bfloat16 here" in refused(planned(extract_spec))
    assert "layers: " in refused(planned(extract_spec, **written, layers=[2, 8]))
    said = refused(planned(extract_spec, **written, model=str(models["llama"])))
    assert "model: " in said
    assert "give another output folder" in said
    moved = shutil.copytree(models["qwen3"], tmp_path / "moved")
    assert planned(extract_spec, **written, model=str(moved))["already_done"] == 3
    answer = plan(VerifySpec(output=str(tmp_path / "out"), recompute=1))
    assert (answer["ok"], answer["samples"]) == (True, 3)


def test_plans_of_prepare_and_verify(
    models: dict[str, Path], tmp_path: Path, conversation_files: tuple[str, str]
) -> None:
    good = {"model": str(models["qwen3"]), "inputs": conversation_files, "output": str(tmp_path / "data")}
    assert plan(PrepareSpec(**good))["ok"] is True
    assert "does not exist" in refused(plan(PrepareSpec(**{**good, "inputs": (str(tmp_path / "none"),)})))
    (tmp_path / "bare").mkdir()
    assert "has no tokenizer" in refused(plan(PrepareSpec(**{**good, "model": str(tmp_path / "bare")})))
    mute = shutil.copytree(models["qwen3"], tmp_path / "mute", ignore=shutil.ignore_patterns("chat_template*"))
    assert "has no chat template" in refused(plan(PrepareSpec(**{**good, "model": str(mute)})))
    assert "has no manifest.jsonl" in refused(plan(VerifySpec(output=str(tmp_path / "bare"))))


def ask(text: str, python: str = sys.executable, **env: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [python, str(MAIN), "plan", "-"],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=240,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_command_answers_one_object_and_exits_0_also_for_a_refusal(extract_spec: dict[str, Any]) -> None:
    status, answer, _ = ask(json.dumps({"verb": "extract", "spec": extract_spec}))
    assert (status, answer["ok"], answer["family"]) == (0, True, "Qwen3")
    for text, says in [
        ("", "not JSON"),
        ("[]", "plan: give one JSON object"),
        ('{"verb": "dance", "spec": {}}', "no verb is called 'dance'"),
        ('{"verb": "extract", "spec": {"modle": "x"}}', "no field is called 'modle'"),
        ('{"verb": "extract", "spec": {}}', "model, dataset, output must be given"),
    ]:
        status, answer, stderr = ask(text)
        assert status == 0
        assert says in refused(answer)
        assert "Traceback" not in stderr


def test_planning_loads_no_torch(extract_spec: dict[str, Any]) -> None:
    code = (
        "import sys, json; sys.path.append(sys.argv[1]); from backends.plan import plan; from backends.spec import ExtractSpec\n"
        "assert plan(ExtractSpec.loads(sys.argv[2]))['ok']; import backends.runner; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(MAIN.parent.parent), json.dumps(extract_spec)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "False\n", done.stderr


def test_a_python_without_torch_is_refused_by_plan_and_fails_a_job_with_one_line(
    extract_spec: dict[str, Any], tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    status, answer, stderr = ask(json.dumps({"verb": "extract", "spec": extract_spec}), python)
    assert status == 0
    assert f"the Python {python} has no numpy | install torch" in refused(answer)
    assert stderr == ""
    job = Job(tmp_path / "job", **extract_spec)
    assert job.run(python=python) == 2
    assert f"the Python {python} has no numpy" in job.events()[-1]["message"]
    assert job.events()[-1]["event"] == "failed"


def test_a_torchvision_of_another_torch_is_named(extract_spec: dict[str, Any], tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "torchvision").mkdir(parents=True)
    (site / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    # Transformers looks for torchvision only beside Pillow.
    (site / "PIL").mkdir()
    (site / "PIL" / "__init__.py").write_text("")
    (site / "PIL" / "Image.py").write_text("class Image: ...\nclass Resampling: ...\n")
    (site / "PIL" / "ImageOps.py").write_text("")
    info = site / "torchvision-0.28.0+cu000.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0+cu000\n")
    status, answer, _ = ask(json.dumps({"verb": "extract", "spec": extract_spec}), PYTHONPATH=str(site))
    assert (status, answer["ok"]) == (0, True)
    assert any("torchvision 0.28.0+cu000 beside torch" in warning for warning in answer["warnings"])
    job = Job(tmp_path / "job", **extract_spec)
    assert job.run(PYTHONPATH=str(site)) == 2, job.stderr
    last = job.events()[-1]
    assert last["event"] == "failed"
    assert "torchvision does not fit this torch" in last["message"]
    assert "uninstall torchvision" in last["remedy"]


def test_what_a_failed_import_means() -> None:
    message, remedy = import_remedy(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert message == f"the Python {sys.executable} has no torch"
    assert "another Python" in remedy
    outer = ModuleNotFoundError("Could not import module 'Qwen3Model'", name="transformers")
    outer.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert "torchvision" in import_remedy(outer)[0]
