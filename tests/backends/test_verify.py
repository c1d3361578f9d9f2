from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extraction_jobs import InProcess
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backends.dataset import DatasetError, PreparedDataset
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.recompute import PlainForward, compare, limit
from backends.runner import extract
from backends.spec import ExtractSpec, VerifySpec
from backends.store import read_manifest
from backends.verify import VerifyError, choose, verify

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _verify(output: Path, events: EventLog | None = None, **fields: Any) -> dict[str, Any]:
    return verify(VerifySpec(output=str(output), **fields), events or EventLog(None), lambda: False)


def _rewrite(path: Path, change: Change) -> None:
    """Replaces what a file holds; with no padding the safetensors library writes the same size for the same shapes."""
    save_file(change(load_file(path)), path)
    manifest = path.parent / "manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text("utf-8").splitlines()]
    for line in lines[1:]:
        if line["file"] == path.name:
            line["bytes"] = path.stat().st_size
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def _states(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: {**tensors, "hidden_states": change(tensors["hidden_states"]).contiguous()}


@pytest.fixture
def states(extraction: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(extraction, tmp_path / "hidden_states"))


# --- what is right passes ---


def test_every_file_of_a_sound_folder_is_verified_and_some_are_recomputed(extraction: Path, events: Any) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in extraction.iterdir()}
    result = _verify(extraction, events, recompute=5, seed=3)
    assert result["verified"] == result["total"] == result["done"] == 24
    assert result["recomputed"] == 5 and 0 < result["recomputed_worst_error"] <= 1e-5
    assert result["worst_row"] in range(24)
    assert result["layer_ids"] == [2, 3, 4, 5, 6, 8]
    assert list(result["worst_error_by_layer"]) == ["2", "3", "4", "5", "6", "8"]
    assert (result["unlisted"], result["leftover"], result["not_extracted"]) == (0, 0, 0)
    assert events.of("warning") == []
    assert events.of("progress")[-1]["done"] == 24
    assert {path.name: path.stat().st_mtime_ns for path in extraction.iterdir()} == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_states_pass_within_their_limit_and_not_within_that_of_float32(
    dtype: str, models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    spec = ExtractSpec(
        model=str(models["llama"]),
        dataset=str(dataset),
        output=str(tmp_path / "out"),
        dtype=dtype,
        last=6,
        min_free_bytes=0,
    )
    extract(spec, EventLog(None), lambda: False, make_workers=InProcess)
    result = _verify(tmp_path / "out", recompute=3)
    assert result["verified"] == 6 and result["not_extracted"] == 18
    assert result["recomputed_worst_error"] > 1e-5
    for layer_id, error in result["worst_error_by_layer"].items():
        assert error <= limit(dtype, int(layer_id)) * 0.7


def test_the_longest_sample_is_always_recomputed_and_the_seed_decides_on_the_others(extraction: Path) -> None:
    entries = list(read_manifest(extraction).entries.values())
    longest = max(entries, key=lambda entry: entry.tokens).row
    chosen = choose(entries, 4, seed=1)
    assert chosen[0] == longest and len(set(chosen)) == 4
    assert choose(entries, 4, seed=1) == chosen != choose(entries, 4, seed=2)
    assert sorted(choose(entries, 99, seed=0)) == list(range(24))
    assert choose(entries, 0, seed=0) == []


# --- what is wrong does not ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_states(lambda s: s.index_fill(0, torch.tensor([3]), float("nan"))), "not finite"),
        (_states(lambda s: s.index_fill(1, torch.tensor([2]), 0.0)), "slot 2 is all zero"),
        (_states(lambda s: s[:, [0, 0, 2, 3, 4, 5]]), "slots 0 and 1 are identical"),
        (_states(lambda s: s[:-1]), "shape"),
        (_states(lambda s: s[:, :5]), "shape"),
        (_states(lambda s: s.reshape(s.shape[0], -1)), "shape"),
        (_states(lambda s: s.to(torch.bfloat16)), "bfloat16, not float32"),
        (lambda tensors: {**tensors, "token_ids": tensors["token_ids"].flip(0)}, "token_ids differ"),
        (lambda tensors: {"hidden_states": tensors["hidden_states"]}, "token_ids"),
    ],
    ids=["nan", "zero slot", "same slots", "short", "slot missing", "flat", "dtype", "other tokens", "no tokens"],
)
def test_a_file_that_holds_the_wrong_thing_is_named_with_what_is_wrong(
    states: Path, change: Change, words: str
) -> None:
    _rewrite(states / "hs_7.safetensors", change)
    with pytest.raises(VerifyError, match=words) as caught:
        _verify(states)
    assert "hs_7.safetensors" in caught.value.message and "1 of 24" in caught.value.message
    assert "delete" in caught.value.remedy


def test_a_missing_a_torn_and_a_grown_file_are_all_found_in_one_pass(states: Path, events: Any) -> None:
    (states / "hs_3.safetensors").unlink()
    os.truncate(states / "hs_5.safetensors", 5000)
    with (states / "hs_9.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(VerifyError, match=r"hs_3\.safetensors is listed .* and 2 more of 24"):
        _verify(states, events)
    assert [event["message"].split()[0] for event in events.of("warning")] == [
        f"hs_{row}.safetensors" for row in (3, 5, 9)
    ]


def test_what_is_deleted_after_a_failed_verify_is_made_again_by_the_same_extraction(
    states: Path, models: dict[str, Path], dataset: Path
) -> None:
    os.truncate(states / "hs_5.safetensors", 5000)
    with pytest.raises(VerifyError):
        _verify(states)
    (states / "hs_5.safetensors").unlink()
    spec = ExtractSpec(
        model=str(models["qwen3"]), dataset=str(dataset), output=str(states), dtype="float32", min_free_bytes=0
    )
    extract(spec, EventLog(None), lambda: False, make_workers=InProcess)
    assert _verify(states, recompute=24)["verified"] == 24


def test_files_that_nobody_listed_are_told_and_not_counted(states: Path, events: Any) -> None:
    shutil.copy(states / "hs_1.safetensors", states / "hs_99.safetensors")
    (states / ".tmp-1-2-3-hs_4.safetensors").write_bytes(b"half")
    result = _verify(states, events)
    assert result["verified"] == 24 and result["unlisted"] == 1 and result["leftover"] == 1
    assert [event["message"] for event in events.of("warning")] == [
        "1 files are not listed in the manifest, such as hs_99.safetensors",
        "1 files are left over from a killed writer, such as .tmp-1-2-3-hs_4.safetensors",
    ]


@pytest.mark.parametrize("slot", range(6))
def test_a_slot_of_the_neighbouring_layer_is_found_by_recomputing(
    states: Path, models: dict[str, Path], slot: int
) -> None:
    entries = list(read_manifest(states).entries.values())
    (row,) = choose(entries, 1, 0)
    layer_ids = (2, 3, 4, 5, 6, 8)
    forward = PlainForward(models["qwen3"])

    def shifted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = forward.states(tensors["token_ids"].tolist())
        tensors["hidden_states"][:, slot] = plain[layer_ids[slot] - 1]
        return tensors

    _rewrite(states / f"hs_{row}.safetensors", shifted)
    # Nothing but the numbers themselves can tell.
    assert _verify(states)["verified"] == 24
    words = f"the slot of layer id {layer_ids[slot]} holds id {layer_ids[slot] - 1} "
    with pytest.raises(VerifyError, match=rf"hs_{row}\.safetensors is not what the model computes: {words}"):
        _verify(states, recompute=1)


def test_a_last_slot_after_the_final_norm_is_found_by_recomputing(states: Path, models: dict[str, Path]) -> None:
    entries = list(read_manifest(states).entries.values())
    (row,) = choose(entries, 1, 0)
    norm = AutoModelForCausalLM.from_pretrained(models["qwen3"]).model.norm

    def post_norm(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            tensors["hidden_states"][:, -1] = norm(tensors["hidden_states"][:, -1])
        return tensors

    _rewrite(states / f"hs_{row}.safetensors", post_norm)
    with pytest.raises(
        VerifyError, match=f"hs_{row}.safetensors is not what the model computes: the slot of layer id 8"
    ):
        _verify(states, recompute=1)


def test_states_that_saw_the_neighbouring_sample_are_found_by_recomputing(
    states: Path, models: dict[str, Path]
) -> None:
    entries = list(read_manifest(states).entries.values())
    (row,) = choose(entries, 1, 0)
    forward = PlainForward(models["qwen3"])
    before = load_file(states / "hs_0.safetensors")["token_ids"].tolist()

    def leaked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = tensors["token_ids"].tolist()
        plain = [state[len(before) :] for state in forward.states(before + own)]
        return {**tensors, "hidden_states": torch.stack([plain[k] for k in (2, 3, 4, 5, 6, 8)], dim=1)}

    _rewrite(states / f"hs_{row}.safetensors", leaked)
    with pytest.raises(VerifyError, match="is not what the model computes"):
        _verify(states, recompute=1)


def test_one_large_token_does_not_hide_that_the_others_are_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(50, 16, generator=generator) for _ in range(3)]
    states[1][0] *= 1e5
    stored = states[1].clone()
    stored[1:] *= 1.3
    (check,) = compare(stored.unsqueeze(1), states, [1])
    assert check.best_id == 1 and check.error == pytest.approx(0.3 * 49 / 50, rel=1e-3)


# --- folders, datasets and models that do not belong together ---


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"has no manifest\.jsonl: give the folder that `extract` wrote"):
        _verify(tmp_path)


def test_a_folder_that_lists_nothing_is_not_verified(states: Path) -> None:
    manifest = states / "manifest.jsonl"
    manifest.write_text(manifest.read_text("utf-8").splitlines(keepends=True)[0], "utf-8")
    with pytest.raises(VerifyError, match="lists no sample: there is nothing to verify"):
        _verify(states)


def test_a_forward_that_does_not_fit_into_the_hosts_memory_is_one_line(models: dict[str, Path]) -> None:
    forward = PlainForward(models["llama"])
    forward._norm.register_forward_pre_hook(lambda *_: torch.empty(1 << 58, dtype=torch.uint8))
    with pytest.raises(JobError, match=r"llama in float32 does not fit into this machine's memory: recompute on"):
        forward.states([1, 2, 3])


def test_another_dataset_and_another_model_are_refused(
    extraction: Path, dataset: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    import datasets

    datasets.Dataset.from_dict(datasets.load_from_disk(str(dataset)).with_format(None)[:10]).save_to_disk(
        str(tmp_path / "other")
    )
    with pytest.raises(VerifyError, match="is not the one that was extracted"):
        _verify(extraction, dataset=str(tmp_path / "other"))
    with pytest.raises(DatasetError, match="is not a folder"):
        _verify(extraction, dataset=str(tmp_path / "gone"))
    with pytest.raises(VerifyError, match="llama is not the one that was extracted"):
        _verify(extraction, model=str(models["llama"]), recompute=1)
    with pytest.raises(VerifyError, match=r"gone has no config\.json"):
        _verify(extraction, model=str(tmp_path / "gone"), recompute=1)
    # Without recomputing no model is needed.
    assert _verify(extraction, model=str(tmp_path / "gone"))["verified"] == 24


def test_a_stop_says_how_far_it_came(extraction: Path) -> None:
    answers = iter([False] * 10 + [True])
    with pytest.raises(Interrupted) as caught:
        verify(VerifySpec(output=str(extraction)), EventLog(None), lambda: next(answers))
    assert (caught.value.done, caught.value.total) == (10, 24)


def test_the_plain_forward_is_that_of_transformers_with_the_last_id_before_the_norm(
    models: dict[str, Path], dataset: Path
) -> None:
    ids = PreparedDataset(dataset).row(0)[0]
    for folder in (models["qwen3"], models["llama"], models["mistral"]):
        forward = PlainForward(folder)
        states = forward.states(ids)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
            normed = model.model.norm(states[-1])
        assert len(states) == 9 == len(out.hidden_states)
        for k in range(8):
            assert torch.equal(states[k], out.hidden_states[k][0])
        assert torch.allclose(normed, out.hidden_states[8][0], atol=1e-6)
        assert not torch.allclose(states[8], out.hidden_states[8][0], rtol=0.1)
