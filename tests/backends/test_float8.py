"""float8 files: made on the device, read by the trainer's own reader, and what a scale for all layers does to each is told."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extraction_jobs import InProcess, Job, check_whole
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from hs_connectors.transfer import HiddenStatesBackend
from safetensors.torch import load_file, save_file

from backends import flattening
from backends.errors import JobError
from backends.events import EventLog
from backends.fp8 import FLOAT8, LIMIT
from backends.hf.fp8 import packed, unpacked
from backends.hsfile import FLOAT8_VALUES, StoreError, bytes_per_token, check_file, read_states, write_sample
from backends.limits import limit
from backends.plan import plan
from backends.recompute import PlainForward
from backends.runner import extract
from backends.spec import ExtractSpec, SpecError, VerifySpec
from backends.store import read_manifest
from backends.verify import VerifyError, verify

LAYERS = [2, 3, 4, 5, 6, 8]


def spec(model: Path, dataset: Path, output: Path, **fields: Any) -> ExtractSpec:
    values = {"dtype": "bfloat16", "file_dtype": FLOAT8, "min_free_bytes": 0, **fields}
    return ExtractSpec(model=str(model), dataset=str(dataset), output=str(output), **values)


def run(made: ExtractSpec, events: EventLog | None = None) -> dict[str, Any]:
    return extract(made, events or EventLog(None), lambda: False, make_workers=InProcess)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], dataset: Path) -> Path:
    """float8 files of a model whose layers are of one size. Copy it before changing anything."""
    output = tmp_path_factory.mktemp("float8") / "calm"
    run(spec(models["qwen3"], dataset, output))
    return output


@pytest.fixture(scope="module")
def outlier_model(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """The same model, but for block 6: it adds a few million to one channel, which ids 7 and 8 carry on."""
    folder = tmp_path_factory.mktemp("models") / "outliers"
    shutil.copytree(models["qwen3"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.6.mlp.down_proj.weight"][3] *= 3e6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory, outlier_model: Path, dataset: Path) -> tuple[Path, list[str]]:
    """Its float8 files, and the warnings that came while they were written."""

    class Heard(EventLog):
        def emit(self, event: str, **fields: Any) -> None:
            if event == "warning":
                said.append(fields["message"])

    said: list[str] = []
    output = tmp_path_factory.mktemp("float8") / "outliers"
    run(spec(outlier_model, dataset, output), Heard(None))
    return output, said


# --- the format ---


def test_states_become_what_the_connector_for_vllm_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2500, 3, 32, generator=generator).to(torch.bfloat16)
    states[7] = 0
    states[11, 2, 5] = 3e4
    wanted, scales = quantize_tensor_to_fp8(states)
    bits, ours, _ = unpacked(packed(states).numpy(), 2500, 3)
    assert np.array_equal(bits, wanted.view(torch.uint8).numpy())
    assert np.array_equal(ours, scales.numpy())
    assert not FLOAT8_VALUES[bits[7]].any() and ours[7, 0, 0] > 0


def test_every_bit_pattern_is_read_as_torch_reads_it() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(theirs, FLOAT8_VALUES, equal_nan=True)


def test_the_trainers_fp8_backend_reads_our_files(calm: Path, dataset: Path, models: dict[str, Path]) -> None:
    reader = HiddenStatesBackend.registry["fp8"].from_train_args(
        argparse.Namespace(hidden_states_path=str(calm)), str(dataset)
    )
    forward = PlainForward(models["qwen3"])
    for row in (0, 23):
        sample = reader.get_cached(row)
        assert sample is not None and set(sample) == {"hidden_states", "token_ids"}
        states, token_ids = read_states(calm / f"hs_{row}.safetensors")
        assert sample["token_ids"].tolist() == token_ids.tolist()
        assert sample["hidden_states"].dtype is torch.bfloat16 and sample["hidden_states"].shape == states.shape
        # The reader multiplies in bfloat16: two more roundings, each by 2**-9 at most.
        assert torch.allclose(sample["hidden_states"].float(), torch.from_numpy(states), rtol=2**-7, atol=0)
        plain = forward.states(token_ids.tolist())
        for slot, layer_id in enumerate(LAYERS):
            error = (torch.from_numpy(states[:, slot]) - plain[layer_id]).norm() / plain[layer_id].norm()
            assert 0.01 < error < 0.035, "three bits of mantissa err by about 0.026"


def test_a_file_is_half_as_large_and_holds_one_scale_a_token(calm: Path) -> None:
    tensors = load_file(calm / "hs_0.safetensors")
    tokens = len(tensors["token_ids"])
    assert tensors["hidden_states"].dtype is torch.float8_e4m3fn and tensors["token_ids"].dtype is torch.int64
    assert tensors["hidden_states_scales"].dtype is torch.float32
    assert tensors["hidden_states"].shape == (tokens, 6, 64) and tensors["hidden_states_scales"].shape == (tokens, 1, 1)
    exact = tensors["hidden_states"].float() * tensors["hidden_states_scales"]
    assert np.array_equal(read_states(calm / "hs_0.safetensors")[0], exact.numpy())
    size = (calm / "hs_0.safetensors").stat().st_size
    assert 0 < size - tokens * bytes_per_token(6, 64, FLOAT8) < 400
    assert bytes_per_token(6, 4096, FLOAT8) == 6 * 4096 + 4 + 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_in_the_models_dtype_are_read_as_float32_without_loss(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    states = (torch.randn(9, 2, 32) * 100).to(kind)
    save_file({"hidden_states": states, "token_ids": torch.arange(9)}, tmp_path / "hs_0.safetensors")
    values, token_ids = read_states(tmp_path / "hs_0.safetensors")
    assert np.array_equal(values, states.float().numpy()) and token_ids.tolist() == list(range(9))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_found_behind_its_scale(value: float, tmp_path: Path) -> None:
    states = torch.randn(9, 2, 32)
    states[4, 1, 5] = value
    bits, scales, figures = unpacked(packed(states).numpy(), 9, 2)
    with pytest.raises(StoreError, match=r"the scale of token 4 is (nan|inf), not a finite number above 0"):
        write_sample(tmp_path, 0, bits, np.arange(9), dtype=FLOAT8, layers=2, hidden_size=32, scales=scales)
    assert np.isfinite(figures).all() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("hidden_states_scales", None, "holds float8_e4m3fn and no hidden_states_scales"),
        ("hidden_states_scales", lambda t: t[:-1], "has the shape"),
        ("hidden_states_scales", lambda t: t.squeeze(), "has the shape"),
        ("hidden_states_scales", lambda t: t.half(), "is F16, not F32"),
        ("hidden_states_scales", lambda t: t.index_fill(0, torch.tensor([2]), 0.0), "the scale of token 2 is 0.0"),
        ("hidden_states", lambda t: (t.view(torch.uint8) | 127).view(torch.float8_e4m3fn), "not finite"),
    ],
    ids=["no scales", "short", "flat", "half", "zero", "nan"],
)
def test_a_damaged_float8_file_is_named_with_what_is_wrong(
    calm: Path, tmp_path: Path, name: str, change: Any, words: str
) -> None:
    tensors = load_file(calm / "hs_3.safetensors")
    changed = {} if change is None else {name: change(tensors[name]).contiguous()}
    save_file({key: value for key, value in {**tensors, **changed}.items() if change or key != name}, tmp_path / "hs_3")
    with pytest.raises(StoreError, match=words) as caught:
        check_file(tmp_path / "hs_3", token_ids=tensors["token_ids"].tolist(), layers=6, hidden_size=64, dtype=FLOAT8)
    assert "hs_3" in str(caught.value)


# --- the job ---


def test_a_job_of_processes_writes_float8_and_a_second_run_goes_on(
    models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    fields = spec(models["qwen3"], dataset, tmp_path / "out", last=5).to_json()
    job = Job(tmp_path / "job", **fields)
    try:
        assert job.run() == 0, job.stderr
    finally:
        job.end()
    first = json.loads((tmp_path / "out" / "fp8.json").read_text())
    (finished,) = job.events("finished")
    assert finished["file_dtype"] == FLOAT8 and finished["flattened"] == [] == first["flattened"]
    assert finished["float8_error_by_layer"].keys() == first["layers"].keys() == {str(k) for k in LAYERS}
    result = run(spec(models["qwen3"], dataset, tmp_path / "out"))
    assert result["done"] == 24 == check_whole(tmp_path / "out", dataset)
    second = json.loads((tmp_path / "out" / "fp8.json").read_text())
    tokens = sum(entry.tokens for entry in read_manifest(tmp_path / "out").entries.values())
    assert first["tokens"] == finished["tokens"] < second["tokens"] == tokens


@pytest.mark.parametrize("there", [FLOAT8, "same"])
def test_a_folder_of_one_format_takes_no_files_of_the_other(
    there: str, models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    other = "same" if there == FLOAT8 else FLOAT8
    run(spec(models["qwen3"], dataset, tmp_path / "out", last=2, file_dtype=there))
    words = {FLOAT8: FLOAT8, "same": "bfloat16"}
    with pytest.raises(JobError, match=f"dtype of the files: {words[there]} there, {words[other]} here") as caught:
        run(spec(models["qwen3"], dataset, tmp_path / "out", last=4, file_dtype=other))
    assert caught.value.remedy == "give another output folder"
    answer = plan(spec(models["qwen3"], dataset, tmp_path / "out", last=4, file_dtype=other))
    assert not answer["ok"] and words[there] in answer["error"]
    assert len(list((tmp_path / "out").glob("hs_*"))) == 2


def test_a_folder_of_before_there_was_float8_is_gone_on_with(
    models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    made = spec(models["qwen3"], dataset, tmp_path / "out", last=2, file_dtype="same")
    run(made)
    manifest = tmp_path / "out" / "manifest.jsonl"
    header, *lines = manifest.read_text().splitlines()
    old = {name: value for name, value in json.loads(header).items() if name != "file_dtype"}
    manifest.write_text("\n".join([json.dumps(old), *lines]) + "\n")
    assert plan(made)["already_done"] == 2
    with pytest.raises(JobError, match="dtype of the files: bfloat16 there"):
        run(spec(models["qwen3"], dataset, tmp_path / "out"))


def test_a_files_dtype_that_is_none_is_one_line() -> None:
    with pytest.raises(SpecError, match="file_dtype must be one of same, float8_e4m3fn, not 'fp8'"):
        ExtractSpec(model="m", dataset="d", output="o", file_dtype="fp8")


# --- verify ---


def test_float8_files_are_recomputed_within_what_float8_explains(calm: Path) -> None:
    result = verify(VerifySpec(output=str(calm), recompute=4), EventLog(None), lambda: False)
    assert result["verified"] == 24 and result["file_dtype"] == FLOAT8
    for layer_id, error in result["worst_error_by_layer"].items():
        assert 0.02 < error < 0.05 < limit("bfloat16", int(layer_id), FLOAT8)


def test_a_wrong_layer_in_a_float8_file_is_found_by_recomputing(
    calm: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    output = Path(shutil.copytree(calm, tmp_path / "out"))
    forward = PlainForward(models["qwen3"])
    for path in output.glob("hs_*"):
        tensors = load_file(path)
        plain = forward.states(tensors["token_ids"].tolist())
        states, scales = quantize_tensor_to_fp8(torch.stack([plain[k] for k in (2, 3, 4, 5, 7, 8)], dim=1))
        save_file({**tensors, "hidden_states": states, "hidden_states_scales": scales}, path)
    lines = (output / "manifest.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines[1:]]
    sized = [json.dumps({**entry, "bytes": (output / entry["file"]).stat().st_size}) for entry in entries]
    (output / "manifest.jsonl").write_text("\n".join([lines[0], *sized]) + "\n")
    with pytest.raises(VerifyError, match="the slot of layer id 6 holds id 7"):
        verify(VerifySpec(output=str(output), recompute=1), EventLog(None), lambda: False)


def test_layers_that_float8_flattens_are_named_by_verify(outliers: tuple[Path, list[str]]) -> None:
    output, _ = outliers
    assert verify(VerifySpec(output=str(output)), EventLog(None), lambda: False)["verified"] == 24
    with pytest.raises(VerifyError) as caught:
        verify(VerifySpec(output=str(output), recompute=1), EventLog(None), lambda: False)
    message = caught.value.message
    assert "is what the model computes, but float8 flattens layer ids 2 (off by" in message
    assert all(f" {layer_id} (off by" in message for layer_id in (2, 3, 4, 5, 6)) and " 8 (off by" not in message
    assert "without fp8" in caught.value.remedy


# --- what plan knows ---


def test_an_extraction_that_flattens_layers_says_so_while_it_runs_and_the_next_plan_before(
    outliers: tuple[Path, list[str]], outlier_model: Path, dataset: Path
) -> None:
    output, said = outliers
    flat = [line for line in said if "flattens" in line]
    assert flat and all(f"{layer_id} (relative error" in flat[-1] for layer_id in (2, 3, 4, 5, 6))
    assert "Layer id 8 makes the scale of 100% of the tokens: extract without fp8" in flat[-1]
    kept = json.loads((output / "fp8.json").read_text())
    assert kept["flattened"] == [2, 3, 4, 5, 6] and kept["layers"]["2"]["lost_share"] > 0.05
    # Another folder beside it: nothing is lost yet.
    answer = plan(spec(outlier_model, dataset, output.parent / "next"))
    (warning,) = answer["warnings"]
    assert answer["ok"] and "float8 flattens layer ids 2 (relative error" in warning and "fp8.json" in warning
    assert answer["float8_worst_layer_id"] in (2, 3, 4, 5, 6) and answer["float8_worst_error"] > LIMIT
    # What is known of these layers says nothing of others, nor of another model, nor of other formats.
    other = plan(spec(outlier_model, dataset, output.parent / "next", layers=(2, 3, 8)))
    assert "not known yet" in other["warnings"][0] and "float8_worst_error" not in other
    assert plan(spec(outlier_model, dataset, output.parent / "next", file_dtype="same"))["warnings"] == []


def test_a_calm_model_is_planned_without_a_warning_once_it_was_measured(
    calm: Path, models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    before = plan(spec(models["qwen3"], dataset, tmp_path / "alone"))
    (warning,) = before["warnings"]
    assert "is not known yet" in warning and "dflash-tui parity" in warning and "--last 32" in warning
    assert (before["file_dtype"], before["dtype"]) == (FLOAT8, "bfloat16")
    assert before["bytes_per_token"] == 6 * 64 + 12
    assert before["bytes_total"] == before["tokens"] * before["bytes_per_token"]
    plain = plan(spec(models["qwen3"], dataset, tmp_path / "alone", file_dtype="same"))
    assert plain["bytes_per_token"] == 6 * 64 * 2 + 8
    assert before["memory_bytes_per_worker"] < plain["memory_bytes_per_worker"]
    after = plan(spec(models["qwen3"], dataset, calm.parent / "next"))
    assert after["warnings"] == [] and 0.02 < after["float8_worst_error"] < 0.035
    assert after["float8_measured_tokens"] == after["tokens"]


def test_what_is_no_measurement_is_not_taken_for_one(models: dict[str, Path], dataset: Path, tmp_path: Path) -> None:
    for number, text in enumerate(["", "{", "[]", '{"fp8": 2}', '{"fp8": 1, "tokens": "x"}', '{"parity": 1}']):
        folder = tmp_path / f"a{number}"
        folder.mkdir()
        (folder / "fp8.json").write_text(text)
        (folder / "parity.json").write_text(text)
        assert flattening.load(folder / "fp8.json") is None
    (warning,) = plan(spec(models["qwen3"], dataset, tmp_path / "new"))["warnings"]
    assert "not known yet" in warning
