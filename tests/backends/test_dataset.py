from __future__ import annotations

import os
import shutil
from pathlib import Path

import datasets
import pytest

from backends.dataset import DatasetError, PreparedDataset


def _save(folder: Path, **columns: list[object]) -> Path:
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return folder


def test_a_prepared_row_is_its_tokens_and_their_mask(dataset: Path) -> None:
    prepared = PreparedDataset(dataset)
    assert len(prepared) == 24 == len(prepared.lengths())
    for row, length in enumerate(prepared.lengths()):
        ids, mask = prepared.row(row)
        assert len(ids) == len(mask) == length
        assert set(mask) == {0, 1}
        assert all(isinstance(token, int) for token in ids)


def test_the_fingerprint_is_the_same_elsewhere_and_another_for_another_token(dataset: Path, tmp_path: Path) -> None:
    here = PreparedDataset(dataset).fingerprint
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    assert PreparedDataset(copy).fingerprint == here

    rows = datasets.load_from_disk(str(dataset)).with_format(None)[:]
    for name, token in (("as it was", None), ("changed", 5)):
        if token is not None:
            rows["input_ids"][7][-1] = token
        table = datasets.Dataset.from_dict(rows).data
        datasets.Dataset(table, fingerprint="the same").save_to_disk(str(tmp_path / name))
    assert PreparedDataset(tmp_path / "changed").fingerprint != PreparedDataset(tmp_path / "as it was").fingerprint


def test_a_dataset_is_saved_in_torchs_format_as_the_trainer_needs_and_read_here_as_numbers(dataset: Path) -> None:
    saved = datasets.load_from_disk(str(dataset))
    # The trainer compares the rows' tokens with `torch.equal`, which refuses a list.
    assert saved.format["type"] == "torch"
    ids, mask = PreparedDataset(dataset).row(3)
    assert saved[3]["input_ids"].tolist() == ids and saved[3]["loss_mask"].tolist() == mask


def test_what_is_no_dataset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="missing is not a folder"):
        PreparedDataset(tmp_path / "missing")
    with pytest.raises(DatasetError, match="is not a prepared dataset"):
        PreparedDataset(tmp_path)


def test_a_dataset_of_splits_names_them(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"input_ids": [[1]], "loss_mask": [[1]], "seq_len": [1]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DatasetError, match=f"{tmp_path}/both/train"):
        PreparedDataset(tmp_path / "both")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path / "raw", input_ids=[[1, 2]], loss_mask=[[0, 1]])
    with pytest.raises(DatasetError, match="no column seq_len, only input_ids, loss_mask"):
        PreparedDataset(folder)


def test_a_damaged_file_is_one_clear_line(dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (arrow,) = copy.glob("*.arrow")
    os.truncate(arrow, 100)
    with pytest.raises(DatasetError, match="cannot be opened") as caught:
        PreparedDataset(copy)
    assert "\n" not in str(caught.value)


def test_a_row_whose_columns_disagree_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path / "odd", input_ids=[[1, 2], [3]], loss_mask=[[0, 1], [1]], seq_len=[2, 2])
    prepared = PreparedDataset(folder)
    assert prepared.row(0) == ([1, 2], [0, 1])
    with pytest.raises(DatasetError, match=r"row 1 .* has 1 input_ids, 1 loss_mask and seq_len 2"):
        prepared.row(1)
    with pytest.raises(IndexError, match="no row 2"):
        prepared.row(2)


def test_an_empty_row_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path / "empty", input_ids=[[1], []], loss_mask=[[1], []], seq_len=[1, 0])
    with pytest.raises(DatasetError, match=r"row 1 .* has no tokens"):
        PreparedDataset(folder).lengths()
