"""Recomputing a model with experts in 16 bits: rounding reroutes some tokens, and a fault still shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backends.hf.extractor import Extractor
from backends.recompute import PlainForward, describe

LAYERS = (0, 1, 3, 5, 7, 8)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_rerouted_tokens_are_no_fault_and_a_wrong_id_is(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    folder = models[family]
    plain = PlainForward(folder)
    assert plain.routed
    using = Extractor.open(folder, LAYERS, dtype="bfloat16", device="cpu", output=tmp_path)
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randint(0, 1500, (length,), generator=generator).tolist() for length in (40, 90, 200)]
    largest = 0.0
    for ids, states in zip(samples, using.states(samples).split([len(ids) for ids in samples]), strict=True):
        path = tmp_path / "hs_0.safetensors"
        save_file({"token_ids": torch.tensor(ids), "hidden_states": states.contiguous()}, path)
        checks = plain.check(path, LAYERS)
        assert describe(checks, "bfloat16") is None
        assert all(check.rerouted for check in checks)
        # A token or more was rerouted: the rule for the others would call this a fault.
        wanted = plain.states(ids)
        by_token = (states[:, -1].float() - wanted[8]).norm(dim=1) / wanted[8].norm(dim=1)
        largest = max(largest, float(by_token.max()))
        shifted = plain.check(path, [min(layer + 1, 8) for layer in LAYERS])
        assert "holds id 0" in (describe(shifted, "bfloat16") or "")
        save_file({"token_ids": torch.tensor(ids), "hidden_states": states * 1.15}, path)
        assert "is off by 0.15" in (describe(plain.check(path, LAYERS), "bfloat16") or "")
    assert largest > 0.1
