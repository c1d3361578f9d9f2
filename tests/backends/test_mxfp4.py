"""gpt-oss as it is published, its experts in MXFP4: unpacked on loading, to the numbers that the format says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.hf.extractor import Extractor
from backends.recompute import PlainForward

# OCP Microscaling Formats 1.0: E2M1 values; 32 of them share a power of two, stored with a bias of 127.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LAYERS = (0, 1, 4, 8)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, in, out] of blocks [E, out, in / 32, 16] with two values a byte, the lower half first, and scales [E, out, in / 32]."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (pairs * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2).transpose(1, 2).contiguous()


@pytest.fixture(scope="module")
def folders(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model twice: with packed experts, and with the numbers that they stand for."""
    root = tmp_path_factory.mktemp("mxfp4")
    packed, plain = root / "packed", root / "plain"
    shutil.copytree(models["gpt_oss"], packed)
    shutil.copytree(models["gpt_oss"], plain)
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = numbers[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = unpacked(blocks, scales)
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def states_of(folder: Path, dtype: str, samples: list[list[int]]) -> torch.Tensor:
    using = Extractor.open(folder, LAYERS, dtype=dtype, device="cpu", output=folder)
    assert using.packing == "packs"
    return using.states(samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_are_the_numbers_that_they_stand_for(folders: tuple[Path, Path], dtype: str) -> None:
    packed, plain = folders
    samples = [list(range(40, 70)), [9, 8, 7]]
    assert torch.equal(states_of(packed, dtype, samples), states_of(plain, dtype, samples))


def test_the_reference_unpacks_them_too(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    ids = list(range(40, 70))
    wanted = PlainForward(plain).states(ids)
    for mine, theirs in zip(PlainForward(packed).states(ids), wanted, strict=True):
        assert torch.equal(mine, theirs)
    found = states_of(packed, "float32", [ids])
    for slot, layer in enumerate(LAYERS):
        torch.testing.assert_close(found[:, slot], wanted[layer], atol=1e-4, rtol=1e-5)


def test_a_plan_takes_it_and_refuses_other_packings(folders: tuple[Path, Path]) -> None:
    from backends.errors import JobError
    from backends.hf.families import model_shape, read_config

    config: dict[str, Any] = read_config(folders[0])
    assert model_shape(config, folders[0]).parameters(8) == model_shape(read_config(folders[1]), folders[1]).parameters(
        8
    )
    config["quantization_config"]["quant_method"] = "awq"
    with pytest.raises(JobError, match=r"is quantized \(awq\)"):
        model_shape(config, folders[0])
