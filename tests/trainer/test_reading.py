"""What the trainer's own reader (speculators 0.9.0) makes of our dataset and files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from backends.dataset import PreparedDataset
from backends.events import EventLog
from backends.hsfile import read_states, write_sample
from backends.spec import VerifySpec
from backends.verify import VerifyError, verify


def test_the_trainer_reads_each_row_with_its_states(verifier: tuple[Path, Path], states: Path) -> None:
    from speculators.train.data import ArrowDataset

    model, data = verifier
    rows, reader = PreparedDataset(data), ArrowDataset(512, str(data), on_missing="raise", model=str(model))
    assert len(reader) == len(rows) and list(reader.approx_lengths) == rows.lengths()
    for row in (0, 7, len(rows) - 1):
        ids, mask = rows.row(row)
        written = load_file(states / f"hs_{row}.safetensors")["hidden_states"]
        sample = reader[row]
        assert sample["input_ids"].tolist() == ids and sample["loss_mask"].tolist() == mask
        # The last slot is what the verifier says; the others, one behind the other, are what the drafter sees.
        assert torch.equal(sample["hidden_states"], written[:, :-1].flatten(1))
        assert torch.equal(sample["verifier_last_hidden_states"], written[:, -1])


def test_what_the_trainer_takes_the_verifier_to_say_is_what_the_model_says(
    verifier: tuple[Path, Path], states: Path, shifted: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier[0]).eval()

    def agreement(folder: Path) -> float:
        """The share of tokens after which norm and head make the same token of the last slot as the model itself."""
        same: list[torch.Tensor] = []
        for row in range(10):
            sample = load_file(folder / f"hs_{row}.safetensors")
            with torch.inference_mode():
                said = model(input_ids=sample["token_ids"][None]).logits[0].argmax(-1)
                taken = model.lm_head(model.model.norm(sample["hidden_states"][:, -1])).argmax(-1)
            same.append(said == taken)
        return float(torch.cat(same).float().mean())

    assert agreement(states) > 0.999
    assert agreement(shifted) < 0.5


def test_a_file_of_other_tokens_is_dropped_by_the_trainer_without_an_error_and_named_by_verify(
    verifier: tuple[Path, Path], states: Path, tmp_path: Path
) -> None:
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset
    from speculators.train.recovery import SampleUnavailable

    model, data = verifier
    output = Path(shutil.copytree(states, tmp_path / "hidden_states"))
    values, ids = read_states(output / "hs_3.safetensors")
    ids[-1] += 1
    bits = values.view(np.uint32)
    write_sample(output, 3, bits, ids, dtype="float32", layers=bits.shape[1], hidden_size=bits.shape[2])
    reader = ArrowDataset(512, str(data), FileTransfer(output), on_missing="raise", model=str(model))
    with pytest.warns(UserWarning, match="don't ?match input ids"):
        assert isinstance(reader[3], SampleUnavailable)
    assert not isinstance(reader[4], SampleUnavailable)
    with pytest.raises(VerifyError, match=r"hs_3\.safetensors: token_ids differ from the dataset's"):
        verify(VerifySpec(str(output)), EventLog(None), lambda: False)


def test_the_trainers_fp8_reader_makes_of_float8_files_what_we_make_of_them(
    verifier: tuple[Path, Path], states: Path, tmp_path: Path
) -> None:
    from hs_connectors.transfer import FP8Transfer

    from backends.runner import extract
    from backends.spec import ExtractSpec

    model, data = verifier
    output = tmp_path / "fp8"
    spec = ExtractSpec(
        str(model), str(data), str(output), layers=(2, 3, 4, 6), dtype="bfloat16", file_dtype="float8_e4m3fn",
        last=4, min_free_bytes=0,
    )  # fmt: skip
    extract(spec, EventLog(None), lambda: False)
    for row in range(4):
        read = FP8Transfer(output, torch.float32).get_cached(row)
        assert read is not None and set(read) == {"hidden_states", "token_ids"}
        ours, ids = read_states(output / f"hs_{row}.safetensors")
        assert torch.equal(read["hidden_states"], torch.from_numpy(ours))
        assert torch.equal(read["token_ids"], torch.from_numpy(ids))
        right = load_file(states / f"hs_{row}.safetensors")["hidden_states"]
        assert float((read["hidden_states"] - right).norm() / right.norm()) < 0.1
