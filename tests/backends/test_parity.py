"""Two output folders compared layer by layer: the figures, the verdict, the worst sample, and what cannot be compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extraction_jobs import InProcess
from safetensors.torch import load_file, save_file

from backends import parity as module
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.fp8 import FLOAT8
from backends.hsfile import file_name, read_states
from backends.limits import limit, pair_limit
from backends.parity import parity
from backends.plan import plan
from backends.runner import extract
from backends.spec import ExtractSpec, ParitySpec, SpecError
from backends.store import read_manifest

LAYERS = [2, 3, 4, 5, 6, 8]
ROWS = 12


def run(reference: Path, output: Path, events: EventLog | None = None, **fields: Any) -> dict[str, Any]:
    spec = ParitySpec(reference=str(reference), output=str(output), **fields)
    result = parity(spec, events or EventLog(None), lambda: False)
    return json.loads(json.dumps(result, allow_nan=False))


def states(folder: Path, row: int) -> np.ndarray[Any, Any]:
    return read_states(folder / file_name(row))[0].astype(np.float64)


def _relist(folder: Path) -> None:
    """The manifest again lists the sizes that the files have."""
    header, *lines = (folder / "manifest.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    sized = [json.dumps({**entry, "bytes": (folder / entry["file"]).stat().st_size}) for entry in entries]
    (folder / "manifest.jsonl").write_text("\n".join([header, *sized]) + "\n")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], *rows: int) -> None:
    for row in rows or range(ROWS):
        tensors = load_file(folder / file_name(row))
        save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / file_name(row))
    _relist(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], dataset: Path) -> dict[str, Path]:
    """One model, one dataset, one choice of layers: in float32, in bfloat16, and that in float8. Never changed."""
    root = tmp_path_factory.mktemp("parity")
    kinds = {"float32": {"dtype": "float32"}, "bfloat16": {}, "float8": {"file_dtype": FLOAT8, "pack_tokens": 300}}
    for name, fields in kinds.items():
        values: dict[str, Any] = {"min_free_bytes": 0, "last": ROWS, **fields}
        spec = ExtractSpec(model=str(models["qwen3"]), dataset=str(dataset), output=str(root / name), **values)
        extract(spec, EventLog(None), lambda: False, make_workers=InProcess)
    return {name: root / name for name in kinds}


@pytest.fixture
def changed(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy to be changed."""
    return lambda name: Path(
        shutil.copytree(folders[name], tmp_path / name, ignore=shutil.ignore_patterns("parity.json"))
    )


def test_every_figure_is_what_the_plain_formula_gives_over_all_tokens(folders: dict[str, Path]) -> None:
    result = run(folders["bfloat16"], folders["float8"])
    assert result["verdict"] == "good" and result["reasons"] == []
    assert (result["samples"], result["done"], result["layer_ids"]) == (ROWS, ROWS, LAYERS)
    pairs = [(states(folders["bfloat16"], row), states(folders["float8"], row)) for row in range(ROWS)]
    a, b = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    assert result["tokens"] == len(a)
    assert list(result["layers"]) == [str(layer_id) for layer_id in LAYERS]
    for slot, layer in enumerate(result["layers"].values()):
        difference, size = (np.linalg.norm(x, axis=1) for x in (b[:, slot] - a[:, slot], a[:, slot]))
        together = float(np.sqrt((difference**2).sum() / (size**2).sum()))
        cosine = (a[:, slot] * b[:, slot]).sum(1) / size / np.linalg.norm(b[:, slot], axis=1)
        each = [
            max(
                np.linalg.norm(y[:, slot] - x[:, slot]) / np.linalg.norm(x[:, slot]),
                (np.linalg.norm(y[:, slot] - x[:, slot], axis=1) / np.linalg.norm(x[:, slot], axis=1)).mean(),
            )
            for x, y in pairs
        ]
        assert layer["good"] is True
        assert layer["relative_error"] == pytest.approx(together, rel=1e-4) and 0.02 < together < 0.035
        assert layer["relative_error_by_token"] == pytest.approx((difference / size).mean(), rel=1e-4)
        assert layer["cosine"] == pytest.approx(cosine.mean(), abs=1e-5)
        assert layer["worst_cosine"] == pytest.approx(cosine.min(), abs=1e-5)
        assert layer["worst_row"] == int(np.argmax(each))
        assert layer["worst_row_error"] == pytest.approx(max(each), rel=1e-4)
        apart = np.abs(b[:, slot] - a[:, slot]).max() / np.abs(a[:, slot]).max()
        assert layer["worst_of_largest"] == pytest.approx(apart, rel=1e-4) and 0 < apart < 0.07
        assert layer["limit"] == pytest.approx(2**-8 * (LAYERS[slot] + 2) + 2**-4, rel=1e-4)


def test_the_parts_in_which_a_file_is_read_change_nothing(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folders["float32"], folders["float8"])
    monkeypatch.setattr(module, "_CHUNK_VALUES", 6 * 64 * 7)
    parts = run(folders["float32"], folders["float8"])
    for one, other in zip(whole["layers"].values(), parts["layers"].values(), strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5) for name in one)


def test_dtypes_are_held_to_the_wider_limit_and_float32_to_its_own(
    folders: dict[str, Path], models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    assert pair_limit(("bfloat16", "bfloat16"), ("float32", "float32"), 8) == limit("bfloat16", 8)
    assert pair_limit(("bfloat16", FLOAT8), ("bfloat16", FLOAT8), 8) == limit("bfloat16", 8) + 2 * 2**-4
    result = run(folders["float32"], folders["bfloat16"])
    assert result["verdict"] == "good"
    assert all(1e-4 < layer["relative_error"] < layer["limit"] for layer in result["layers"].values())
    spec = ExtractSpec(
        model=str(models["qwen3"]),
        dataset=str(dataset),
        output=str(tmp_path / "singly"),
        dtype="float32",
        last=ROWS,
        pack_tokens=1,
        min_free_bytes=0,
    )
    extract(spec, EventLog(None), lambda: False, make_workers=InProcess)
    alike = run(folders["float32"], tmp_path / "singly")
    assert alike["verdict"] == "good" and all(
        layer["limit"] == pytest.approx(1e-5) for layer in alike["layers"].values()
    )


def test_one_sample_that_differs_is_found_and_named(
    folders: dict[str, Path], changed: Callable[[str], Path], events: Any
) -> None:
    output = changed("bfloat16")

    def other(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["hidden_states"][:, 1] *= -3
        return tensors

    rewrite(output, other, 7)
    result = run(folders["bfloat16"], output, events)
    (bad,) = [layer for layer in result["layers"].values() if not layer["good"]]
    assert result["verdict"] == "bad" and bad is result["layers"]["3"]
    assert bad["worst_row"] == 7 and bad["worst_row_error"] == pytest.approx(4, rel=1e-3)
    assert bad["worst_cosine"] == pytest.approx(-1, abs=1e-3)
    (reason,) = result["reasons"]
    assert reason.startswith("layer id 3 is off by") and "limit 0.02" in reason and "row 7 is worst (4)" in reason
    assert [event["message"] for event in events.of("warning")] == [reason]


def test_slots_in_another_order_are_told_by_the_layer_that_they_hold(
    folders: dict[str, Path], changed: Callable[[str], Path]
) -> None:
    output = changed("float8")
    rewrite(
        output,
        lambda t: {
            **t,
            "hidden_states": t["hidden_states"].view(torch.uint8)[:, [0, 2, 1, 3, 4, 5]].view(torch.float8_e4m3fn),
        },
    )
    result = run(folders["bfloat16"], output)
    assert result["verdict"] == "bad" and len(result["reasons"]) == 2
    assert (
        "layer id 3 is off by" in result["reasons"][0]
        and "nearer to the reference's layer id 4" in result["reasons"][0]
    )


def test_layers_that_float8_flattens_are_told_as_flattened_and_the_next_plan_knows(
    folders: dict[str, Path], changed: Callable[[str], Path], models: dict[str, Path], dataset: Path
) -> None:
    reference, output = changed("bfloat16"), changed("float8")
    (output / "fp8.json").unlink()

    def coarse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is stored where the last layer is so large that the others fall on the smallest steps."""
        exact = load_file(reference / file_name(next(rows)))["hidden_states"].float()
        scales = exact.abs().amax((1, 2), keepdim=True) * 60
        return {**tensors, "hidden_states": (exact / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}

    rows = iter(range(ROWS))
    rewrite(output, coarse)
    result = run(reference, output)
    assert result["verdict"] == "bad" and all(result["layers"][k]["lost_share"] > 0.05 for k in ("2", "3"))
    assert "float8 flattens it" in result["reasons"][0] and "% of its values became 0" in result["reasons"][0]
    kept = json.loads((output / "parity.json").read_text())
    assert kept["layers"] == result["layers"] and kept["verdict"] == "bad" and kept["parity"] == 1
    fields: dict[str, Any] = {"model": str(models["qwen3"]), "dataset": str(dataset), "min_free_bytes": 0}
    answer = plan(ExtractSpec(**fields, output=str(output.parent / "next"), file_dtype=FLOAT8))
    (warning,) = answer["warnings"]
    assert "float8 flattens layer ids 2 (relative error" in warning and "parity.json" in warning
    assert answer["float8_measured_tokens"] == result["tokens"]


def test_so_many_samples_as_asked_for_are_compared_and_the_seed_chooses(folders: dict[str, Path], events: Any) -> None:
    result = run(folders["bfloat16"], folders["float8"], events, samples=4, seed=1)
    entries = read_manifest(folders["float8"]).entries
    assert result["samples"] == 4 == events.of("progress")[-1]["done"]
    assert result["tokens"] != run(folders["bfloat16"], folders["float8"], samples=4, seed=2)["tokens"]
    assert run(folders["bfloat16"], folders["float8"], samples=999)["samples"] == ROWS
    longest = max(entry.tokens for entry in entries.values())
    assert run(folders["bfloat16"], folders["float8"], samples=1)["tokens"] == longest


def test_only_the_report_is_written(folders: dict[str, Path]) -> None:
    def seen() -> dict[str, int]:
        every = [path for name in ("float32", "float8") for path in folders[name].iterdir()]
        return {str(path): path.stat().st_mtime_ns for path in every if path.name != "parity.json"}

    before = seen()
    result = run(folders["float32"], folders["float8"])
    assert seen() == before and result["report"] == str(folders["float8"] / "parity.json")
    assert not (folders["float32"] / "parity.json").exists()


def test_a_plan_says_what_will_be_read_and_within_which_limits(folders: dict[str, Path]) -> None:
    answer = plan(ParitySpec(reference=str(folders["bfloat16"]), output=str(folders["float8"])))
    assert answer["ok"] and (answer["samples"], answer["layer_ids"]) == (ROWS, LAYERS)
    assert (answer["reference_dtype"], answer["output_dtype"]) == ("bfloat16", FLOAT8)
    sizes = [entry.bytes for name in ("bfloat16", "float8") for entry in read_manifest(folders[name]).entries.values()]
    assert answer["bytes_to_read"] == sum(sizes)
    assert answer["limits"] == [round(limit("bfloat16", layer_id, FLOAT8), 4) for layer_id in LAYERS]


# --- what cannot be compared ---


def test_a_folder_and_itself_a_folder_without_a_manifest_and_bad_numbers_are_one_line(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(JobError, match="would be compared with itself: give two output folders"):
        run(folders["float8"], folders["float8"] / ".." / "float8")
    with pytest.raises(JobError, match=r"has no manifest\.jsonl: give the folders that two extractions wrote"):
        run(folders["float8"], tmp_path)
    refused = plan(ParitySpec(reference=str(tmp_path), output=str(folders["float8"])))
    assert not refused["ok"] and "has no manifest.jsonl" in refused["error"]
    with pytest.raises(SpecError, match="parity: samples must be a whole number of at least 1, not 0"):
        ParitySpec(reference="a", output="b", samples=0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layer_ids", [2, 3, 4, 5, 7, 8], r"different layer ids: \[2, 3, 4, 5, 6, 8\] in .*, \[2, 3, 4, 5, 7, 8\] in"),
        ("model_fingerprint", "other", r"different models: .*/qwen3 in .* \(their contents differ\)"),
        ("dataset_fingerprint", "other", r"different datasets: .*/dataset in .* \(their contents differ\)"),
    ],
)
def test_folders_of_other_models_datasets_or_layers_are_refused_in_one_line(
    folders: dict[str, Path], changed: Callable[[str], Path], name: str, value: Any, words: str
) -> None:
    output = changed("float8")
    header, *lines = (output / "manifest.jsonl").read_text().splitlines()
    (output / "manifest.jsonl").write_text("\n".join([json.dumps({**json.loads(header), name: value}), *lines]) + "\n")
    with pytest.raises(JobError, match=f"the two folders hold {words}") as caught:
        run(folders["bfloat16"], output)
    assert "\n" not in str(caught.value) and not (output / "parity.json").exists()


def test_folders_without_a_common_sample_are_refused(folders: dict[str, Path], changed: Callable[[str], Path]) -> None:
    output = changed("float8")
    header, *_ = (output / "manifest.jsonl").read_text().splitlines()
    (output / "manifest.jsonl").write_text(header + "\n")
    with pytest.raises(JobError, match="have no sample in common: extract the same samples into both"):
        run(folders["bfloat16"], output)


def nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["hidden_states"][3, 2, 1] = float("nan")
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, r"hs_5\.safetensors holds a value that is not finite"),
        (lambda t: {**t, "token_ids": t["token_ids"].flip(0)}, r"hs_5\.safetensors holds other tokens in"),
        (
            lambda t: {**t, "hidden_states": t["hidden_states"][:, :5]},
            r"hs_5\.safetensors holds bfloat16 \[.*, 5, 64\], and",
        ),
        (lambda t: {**t, "hidden_states": t["hidden_states"].half()}, r"hs_5\.safetensors holds float16"),
        (lambda t: {"token_ids": t["token_ids"]}, r"hs_5\.safetensors is not a hidden-state file"),
    ],
    ids=["nan", "tokens", "slot missing", "dtype", "no states"],
)
def test_a_damaged_file_ends_the_comparison_and_is_named(
    folders: dict[str, Path], changed: Callable[[str], Path], change: Any, words: str
) -> None:
    output = changed("bfloat16")
    rewrite(output, change, 5)
    with pytest.raises(JobError, match=words) as caught:
        run(folders["float32"], output)
    assert "dflash-tui verify" in caught.value.remedy


def test_a_stop_says_how_far_it_came_and_leaves_no_report(
    folders: dict[str, Path], changed: Callable[[str], Path]
) -> None:
    output = changed("float8")
    answers = iter([False] * 4 + [True])
    spec = ParitySpec(reference=str(folders["bfloat16"]), output=str(output))
    with pytest.raises(Interrupted) as caught:
        parity(spec, EventLog(None), lambda: next(answers))
    assert (caught.value.done, caught.value.total) == (5, ROWS) and not (output / "parity.json").exists()
