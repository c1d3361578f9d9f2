"""What SpecForge reads is what the extraction wrote, value by value, and what it would stop at is not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from extraction_jobs import MAIN, InProcess, until
from safetensors.torch import load_file

from backends.dataset import PreparedDataset
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.export import export
from backends.plan import plan
from backends.runner import extract
from backends.spec import ExportSpec, ExtractSpec, SpecError
from backends.store import read_manifest

IDS, TARGETS = [2, 3, 4, 5, 6], [1, 2, 3, 4, 5]


def _export(output: Path, to: Path, events: EventLog | None = None, **fields: Any) -> dict[str, Any]:
    spec = ExportSpec(str(output), str(to), **{"min_free_bytes": 0, **fields})
    return export(spec, events or EventLog(None), lambda: False)


def read_as_specforge(folder: Path, max_length: int = 1 << 20) -> dict[int, dict[str, torch.Tensor]]:
    """SpecForge's reader for DFlash (its `main` of August 2026): every *.ckpt below a folder, cut and given a batch axis."""
    samples = {}
    for path in sorted(folder.rglob("*.ckpt")):
        raw = torch.load(path, weights_only=True, mmap=True)
        hidden_states = raw["hidden_states"]
        assert hidden_states.dim() == 3 and hidden_states.shape[0] == 1
        sample = {
            "input_ids": raw["input_ids"][:max_length].unsqueeze(0),
            "loss_mask": raw["loss_mask"][:max_length].unsqueeze(0),
            "hidden_states": hidden_states[:, :max_length],
        }
        assert len({value.shape[1] for value in sample.values()}) == 1
        mask = sample["loss_mask"][0].bool()
        assert bool((mask[1:] & mask[:-1]).any())
        samples[int(path.stem.removeprefix("data_"))] = sample
    return samples


def _small(models: dict[str, Path], dataset: Path, output: Path, **fields: Any) -> Path:
    spec = ExtractSpec(str(models["qwen3"]), str(dataset), str(output), last=5, min_free_bytes=0, **fields)
    extract(spec, EventLog(None), lambda: False, make_workers=InProcess)
    return output


def test_specforge_reads_every_value_that_was_extracted(
    extraction: Path, dataset: Path, tmp_path: Path, events: Any
) -> None:
    result = _export(extraction, tmp_path / "out", events, rows_per_folder=10)
    assert (result["exported"], result["kept"], result["left_out"], result["total"]) == (24, 0, 0, 24)
    rows = PreparedDataset(dataset)
    samples = read_as_specforge(tmp_path / "out")
    assert sorted(samples) == list(range(24))
    for row, sample in samples.items():
        ids, mask = rows.row(row)
        states = load_file(extraction / f"hs_{row}.safetensors")["hidden_states"]
        assert sample["input_ids"].tolist() == [ids] and sample["loss_mask"].tolist() == [mask]
        # The five layers of a token one behind the other, the last layer left out.
        assert torch.equal(sample["hidden_states"][0], states[:, :5].flatten(1))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock", "rows_0-10", "rows_10-20", "rows_20-30", "specforge.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "rows_10-20" / "data_17.ckpt").is_file()
    assert events.of("progress")[-1]["done"] == 24


def test_the_layers_are_said_in_specforges_numbering(extraction: Path, tmp_path: Path) -> None:
    result = _export(extraction, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "specforge.json").read_text())
    assert result["layer_ids"] == said["layer_ids"] == IDS
    assert result["target_layer_ids"] == said["target_layer_ids"] == TARGETS
    assert said["longest_tokens"] == max(e.tokens for e in read_manifest(extraction).entries.values())
    assert said["samples"] == 24 and said["dtype"] == "float32"


def test_sixteen_bit_states_keep_their_bits(models: dict[str, Path], dataset: Path, tmp_path: Path) -> None:
    output = _small(models, dataset, tmp_path / "bf16", dtype="bfloat16", layers=(1, 4, 7))
    assert _export(output, tmp_path / "out")["target_layer_ids"] == [0, 3, 6]
    for row, sample in read_as_specforge(tmp_path / "out").items():
        states = load_file(output / f"hs_{row}.safetensors")["hidden_states"]
        assert sample["hidden_states"].dtype == torch.bfloat16
        # No slot of the last layer: all of them go in.
        assert torch.equal(sample["hidden_states"][0], states.flatten(1))


def test_float8_states_are_dequantised(models: dict[str, Path], dataset: Path, tmp_path: Path) -> None:
    output = _small(models, dataset, tmp_path / "fp8", dtype="bfloat16", file_dtype="float8_e4m3fn")
    _export(output, tmp_path / "out")
    samples = read_as_specforge(tmp_path / "out")
    assert len(samples) == 5
    for row, sample in samples.items():
        tensors = load_file(output / f"hs_{row}.safetensors")
        values = tensors["hidden_states"].float() * tensors["hidden_states_scales"]
        assert torch.equal(sample["hidden_states"][0], values[:, :5].flatten(1).bfloat16())


def test_a_file_takes_no_more_than_planned_and_no_slot_is_saved_twice(extraction: Path, tmp_path: Path) -> None:
    spec = ExportSpec(str(extraction), str(tmp_path / "out"), min_free_bytes=0)
    before = plan(spec)
    assert before["ok"] and before["target_layer_ids"] == TARGETS and before["already_done"] == 0
    result = export(spec, EventLog(None), lambda: False)
    sizes = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.ckpt"))
    assert result["bytes"] == sizes <= before["bytes_total"] <= sizes + 24 * 4096
    assert plan(spec)["already_done"] == 24


def test_what_is_there_is_kept_and_what_is_missing_damaged_or_older_is_made(extraction: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(extraction, tmp_path / "states"))
    out = tmp_path / "out"
    _export(output, out)
    files = {path.name: path for path in out.rglob("*.ckpt")}
    before = {name: path.stat().st_mtime_ns for name, path in files.items()}
    files["data_3.ckpt"].unlink()
    os.truncate(files["data_5.ckpt"], 1000)
    later = files["data_7.ckpt"].stat().st_mtime_ns + 1_000_000_000
    os.utime(output / "hs_7.safetensors", ns=(later, later))
    (files["data_3.ckpt"].parent / ".tmp-1-2-3").write_bytes(b"left by a killed writer")
    again = _export(output, out)
    assert (again["exported"], again["kept"]) == (24, 21)
    changed = {name for name, path in files.items() if path.stat().st_mtime_ns != before[name]}
    assert changed == {"data_3.ckpt", "data_5.ckpt", "data_7.ckpt"}
    assert len(read_as_specforge(out)) == 24 and not list(out.rglob(".tmp-*"))


def test_a_sample_at_which_specforge_would_stop_is_left_out_and_counted(
    extraction: Path, dataset: Path, tmp_path: Path, events: Any
) -> None:
    rows = datasets.load_from_disk(str(dataset)).with_format(None)[:]
    for row, supervised in ((2, []), (9, [4, 6, 8])):
        rows["loss_mask"][row] = [int(place in supervised) for place in range(rows["seq_len"][row])]
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "data"))
    output = Path(shutil.copytree(extraction, tmp_path / "states"))
    _point_at(
        output, dataset=str(tmp_path / "data"), dataset_fingerprint=PreparedDataset(tmp_path / "data").fingerprint
    )
    result = _export(output, tmp_path / "out", events)
    assert result["left_out_rows"] == [2, 9] and result["exported"] == 22
    assert json.loads((tmp_path / "out" / "specforge.json").read_text())["left_out_rows"] == [2, 9]
    assert "2 samples without two supervised tokens in a row are left out" in events.of("warning")[0]["message"]
    assert sorted(read_as_specforge(tmp_path / "out")) == [row for row in range(24) if row not in (2, 9)]


def _point_at(output: Path, **fields: Any) -> None:
    path = output / "manifest.jsonl"
    header, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(header), **fields}) + "\n" + "".join(rest))


def test_an_extraction_of_a_part_of_its_dataset_is_exported_and_the_rest_counted(
    models: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    spec = ExportSpec(str(_small(models, dataset, tmp_path / "states")), str(tmp_path / "out"), min_free_bytes=0)
    rest = len(PreparedDataset(dataset)) - 5
    assert plan(spec)["not_extracted"] == rest > 0
    result = export(spec, EventLog(None), lambda: False)
    assert (result["exported"], result["not_extracted"]) == (5, rest)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_ids": [0, 3, 4, 5, 6, 8]}, "id 0, the embeddings, has no number in specforge's convention"),
        ({"layer_ids": [8]}, "the only layer id is 8, the last one, which SpecForge's files do not hold"),
        ({"layer_ids": [2, 3, 4, 5, 6, 9]}, "id 9 is not in a model of 8 blocks"),
        ({"dataset": "/nowhere"}, "the dataset /nowhere is not a folder"),
        ({"dataset_fingerprint": "another"}, "is not the one that was extracted"),
    ],
)
def test_an_extraction_that_does_not_suit_is_refused_by_plan_and_export(
    extraction: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    output = Path(shutil.copytree(extraction, tmp_path / "states"))
    _point_at(output, **fields)
    with pytest.raises(JobError, match=words) as caught:
        _export(output, tmp_path / "out")
    assert caught.value.remedy
    assert not (tmp_path / "out").exists()
    answer = plan(ExportSpec(str(output), str(tmp_path / "out")))
    assert not answer["ok"] and words in answer["error"] and answer["remedy"]


def test_another_export_and_strange_files_are_left_alone(extraction: Path, tmp_path: Path) -> None:
    _export(extraction, tmp_path / "out", rows_per_folder=10)
    with pytest.raises(
        JobError, match=r"holds another export .rows_per_folder: 10 there, 20 here.: give another folder"
    ):
        _export(extraction, tmp_path / "out", rows_per_folder=20)
    (tmp_path / "out" / "specforge.json").unlink()
    with pytest.raises(JobError, match=r"holds SpecForge files but no specforge\.json"):
        _export(extraction, tmp_path / "out", rows_per_folder=10)
    with pytest.raises(JobError, match="among its own source"):
        _export(extraction, extraction)
    with pytest.raises(JobError, match="has no manifest"):
        _export(tmp_path, tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="file cannot be written"):
        _export(extraction, tmp_path / "file")
    with pytest.raises(SpecError, match="rows_per_folder must be a whole number of at least 1, not 0"):
        ExportSpec("a", "b", rows_per_folder=0)


def test_a_damaged_source_is_named_and_nothing_of_it_is_exported(extraction: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(extraction, tmp_path / "states"))
    os.truncate(output / "hs_4.safetensors", 5000)
    with pytest.raises(JobError, match=r"hs_4\.safetensors is truncated .*: see what `verify` says"):
        _export(output, tmp_path / "out")
    assert 4 not in read_as_specforge(tmp_path / "out")
    shutil.copy(extraction / "hs_4.safetensors", output)
    assert _export(output, tmp_path / "out")["exported"] == 24


def test_the_disks_floor_ends_it_with_one_line(extraction: Path, tmp_path: Path) -> None:
    floor = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize * 2
    with pytest.raises(JobError, match=r"bytes left, too few for the next .* above the floor of .*: free some space"):
        _export(extraction, tmp_path / "out", min_free_bytes=floor)
    answer = plan(ExportSpec(str(extraction), str(tmp_path / "out"), min_free_bytes=floor))
    assert not answer["ok"] and "its disk has room for 0" in answer["error"]


def test_a_stop_finishes_what_was_begun_and_the_rest_is_made_later(extraction: Path, tmp_path: Path) -> None:
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 9

    with pytest.raises(Interrupted, match="stopped after 9 of 24 samples") as caught:
        export(ExportSpec(str(extraction), str(tmp_path / "out"), min_free_bytes=0), EventLog(None), stop)
    assert caught.value.done == 9
    assert sorted(read_as_specforge(tmp_path / "out")) == list(range(9))
    assert _export(extraction, tmp_path / "out")["kept"] == 9


def _start(folder: Path, output: Path) -> tuple[subprocess.Popen[bytes], Callable[[], list[dict[str, Any]]]]:
    """The verb as a node runs it."""
    (folder / "spec.json").write_text(
        json.dumps({"output": str(output), "to": str(folder / "out"), "min_free_bytes": 0})
    )
    command = [sys.executable, str(MAIN), "export", str(folder / "spec.json"), "--events", str(folder / "events")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, lambda: [json.loads(line) for line in (folder / "events").read_text().splitlines()]


def test_a_killed_export_leaves_whole_files_and_the_next_one_ends_it(
    extraction: Path, dataset: Path, tmp_path: Path
) -> None:
    process, _ = _start(tmp_path, extraction)
    try:
        until(lambda: process.poll() is not None or list((tmp_path / "out").rglob("*.ckpt")), "a first file")
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    read_as_specforge(tmp_path / "out")
    process, events = _start(tmp_path, extraction)
    try:
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()
    last = events()[-1]
    assert last["event"] == "finished" and last["exported"] == 24 and last["kept"] >= 1
    assert len(read_as_specforge(tmp_path / "out")) == 24
