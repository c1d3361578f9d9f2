"""What the hf backend captures is what the plain forward has, and the check that says so can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from backends.demo.model import LEAST_CHANGE, measure_changes
from backends.errors import JobError
from backends.hf import attention, capture, extractor
from backends.hf.extractor import Extractor

LENGTHS = (5, 1, 17, 64, 2, 33, 128)
LAYERS = (0, 1, 3, 4, 7, 8)
# float32: other kernels and another order of summing. bfloat16 rounds to 8 bits (0.2 % on average) some six times a block:
# errors that add up like a random walk reach 0.2 % * sqrt(6 * 8 blocks) = 1.4 %; a token may have three times that.
LIMITS = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3 tied", "llama tied"])
def model(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, tied = request.param.partition(" ")
    if not tied:
        return models[family]
    folder = tmp_path_factory.mktemp("tied")
    tied_model = AutoModelForCausalLM.from_pretrained(models[family], tie_word_embeddings=True)
    tied_model.tie_weights()
    tied_model.save_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).config.tie_word_embeddings
    return folder


@pytest.fixture(scope="module")
def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 1500, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(model: Path, samples: list[list[int]]) -> list[torch.Tensor]:
    return plain_states(model, samples)


def plain_states(model: Path, samples: list[list[int]]) -> list[torch.Tensor]:
    """Every layer id 0..N of every sample, [N + 1, T, H], by the stock model with its head, alone, eager, float32."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    states = []
    before_norm: list[torch.Tensor] = []
    stock.model.norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        for ids in samples:
            found = stock(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
            # The stock model's last entry is after the norm; the trainer wants what went in.
            states.append(torch.stack([*(state[0] for state in found[:-1]), before_norm.pop()[0]]))
    return states


def open_extractor(model: Path, dtype: str = "float32", layers: tuple[int, ...] = LAYERS) -> Extractor:
    return Extractor.open(model, layers, dtype=dtype, device="cpu", output=model)


def packed(using: Extractor, samples: list[list[int]]) -> list[torch.Tensor]:
    return [part.float() for part in using.states(samples).split([len(ids) for ids in samples])]


def worst_error(states: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    """The worst |a - b| / |b| of a token in any slot of any sample."""
    return max(
        float(((mine[:, slot] - theirs[layer]).norm(dim=1) / theirs[layer].norm(dim=1)).max())
        for mine, theirs in zip(states, plain, strict=True)
        for slot, layer in enumerate(LAYERS)
    )


def check(states: list[torch.Tensor], plain: list[torch.Tensor], dtype: str) -> None:
    error = worst_error(states, plain)
    assert error <= LIMITS[dtype], f"relative error {error:.3g}"


def test_every_block_of_the_test_models_changes_its_stream_by_a_fifth_or_more(
    model: Path, samples: list[list[int]]
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    changes = measure_changes(stock, torch.tensor([samples[3]]))
    assert len(changes) == 8
    assert min(changes) >= LEAST_CHANGE == 0.2


@pytest.mark.parametrize("dtype", LIMITS)
def test_every_slot_of_a_pack_equals_the_plain_forwards(
    model: Path, samples: list[list[int]], plain: list[torch.Tensor], dtype: str
) -> None:
    using = open_extractor(model, dtype)
    assert using.packing == "packs"
    check(packed(using, samples), plain, dtype)


# So short that most positions of the samples are beyond it, where the kinds of scaling differ.
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "linear rope": ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}}),
    "yarn rope": ("qwen3", {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 4.0}}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biases of attention": ("qwen3", {"attention_bias": True}),
    "wide heads": ("qwen3", {"head_dim": 48}),
    "one head for keys": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_a_config_may_ask_for_reaches_the_packs(
    feature: str, models: dict[str, Path], samples: list[list[int]], tmp_path: Path
) -> None:
    family, fields = FEATURES[feature]
    config = AutoConfig.from_pretrained(models[family])
    for name, value in fields.items():
        setattr(config, name, value)
    featured = AutoModelForCausalLM.from_config(config)
    plainer = AutoModelForCausalLM.from_pretrained(models[family])
    weights = featured.state_dict()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        there = plainer.state_dict().get(name)
        if there is not None and there.shape == tensor.shape:
            tensor.copy_(there)
        else:  # Biases, and projections of another width.
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    featured.save_pretrained(tmp_path)
    wanted = plain_states(tmp_path, samples)
    using = open_extractor(tmp_path)
    assert using.packing == "packs"
    states = packed(using, samples)
    check(states, wanted, "float32")
    # Without the feature these are other states.
    assert worst_error(states, plain_states(models[family], samples)) > 100 * LIMITS["float32"]


def test_a_vocabulary_padded_beyond_the_tokenizer_is_the_models_to_use_up(
    models: dict[str, Path], tmp_path: Path
) -> None:
    padded = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    padded.resize_token_embeddings(2048)
    padded.save_pretrained(tmp_path)
    samples = [[2047, 5, 6], [2040]]
    check(packed(open_extractor(tmp_path), samples), plain_states(tmp_path, samples), "float32")
    with pytest.raises(JobError, match="token id 2048 is outside the model's vocabulary of 2048"):
        open_extractor(tmp_path).states([[5, 2048]])


def test_a_pack_equals_one_sample_at_a_time(model: Path, samples: list[list[int]]) -> None:
    using = open_extractor(model)
    alone = [using.states([ids]) for ids in samples]
    for mine, single in zip(packed(using, samples), alone, strict=True):
        assert float(((mine - single).norm(dim=2) / single.norm(dim=2)).max()) <= LIMITS["float32"]


def shift_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(capture.Capture):
        def __init__(self, model: nn.Module, layer_ids: Any) -> None:
            super().__init__(model, [min(layer + 1, 8) for layer in layer_ids])

    monkeypatch.setattr(extractor, "Capture", Shifted)


def take_the_last_slot_after_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_norm(model: Any) -> nn.Module:
        if not isinstance(model.norm, nn.Sequential):
            model.norm = nn.Sequential(model.norm, nn.Identity())
        return model.norm[1]

    monkeypatch.setattr(capture, "final_norm_of", after_norm)


def drop_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(lengths: Any, device: torch.device) -> dict[str, Any]:
        arguments = attention.pack_arguments(lengths, device)
        whole = attention.pack_arguments([sum(lengths)], device)
        # Positions restart as they should: only the attention looks past the boundary.
        return {**whole, "position_ids": arguments["position_ids"]}

    monkeypatch.setattr(extractor, "pack_arguments", without)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("sabotage", [shift_ids, take_the_last_slot_after_the_norm, drop_the_boundary])
def test_the_check_fails_when_the_backend_is_sabotaged(
    model: Path,
    samples: list[list[int]],
    plain: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[pytest.MonkeyPatch], None],
    dtype: str,
) -> None:
    sabotage(monkeypatch)
    # The proof at start would turn packs off; here the check alone must notice.
    monkeypatch.setattr(Extractor, "_prove", lambda self: None)
    states = packed(open_extractor(model, dtype), samples)
    with pytest.raises(AssertionError, match="relative error"):
        check(states, plain, dtype)
    # Not by a hair.
    assert worst_error(states, plain) > 4 * LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
def test_attention_that_leaks_is_found_at_start_and_samples_then_run_alone(
    model: Path, samples: list[list[int]], plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    drop_the_boundary(monkeypatch)
    using = open_extractor(model, dtype)
    assert using.packing == "one sample at a time"
    assert "differ from single runs" in using.why_not
    check(packed(using, samples), plain, dtype)


def test_the_models_scaling_of_attention_is_used(model: Path) -> None:
    query, key, value = (torch.randn(1, heads, 12, 16) for heads in (4, 2, 2))
    boundaries = attention.pack_arguments([5, 7], torch.device("cpu"))
    boundaries.pop("position_ids")
    found, _ = attention.packed_attention(nn.Module(), query, key, value, None, scaling=0.9, **boundaries)
    for part in (slice(0, 5), slice(5, 12)):
        keys, values = (tensor[:, :, part].repeat_interleave(2, dim=1) for tensor in (key, value))
        scores = query[:, :, part] @ keys.transpose(2, 3) * 0.9
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        wanted = (scores.softmax(-1) @ values).transpose(1, 2)
        assert torch.allclose(found[:, part], wanted, atol=1e-6)


def test_attention_without_boundaries_is_an_error_not_a_guess() -> None:
    tensor = torch.randn(1, 2, 4, 16)
    with pytest.raises(RuntimeError, match="boundaries"):
        attention.packed_attention(nn.Module(), tensor, tensor, tensor, None)
