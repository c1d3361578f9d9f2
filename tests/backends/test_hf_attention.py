"""Attention of a pack against a softmax written out in float64, and what it refuses to guess."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from backends.errors import JobError
from backends.hf import attention
from backends.hf.extractor import Extractor
from backends.recompute import PlainForward


def tensors(length: int, heads: int = 4, kv_heads: int = 2, width: int = 16, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, count, length, width, generator=generator) for count in (heads, kv_heads, kv_heads))


def boundaries(lengths: list[int]) -> dict[str, Any]:
    arguments = attention.pack_arguments(lengths, torch.device("cpu"))
    del arguments["position_ids"]
    return arguments


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    *,
    scaling: float = 0.25,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, T, heads, D] in float64, sample by sample, each with its whole matrix of scores."""
    parts = []
    for begin, end in pairwise([0, *accumulate(lengths)]):
        part = slice(begin, end)
        keys, values = (tensor[:, :, part].double().repeat_interleave(2, dim=1) for tensor in (key, value))
        scores = query[:, :, part].double() @ keys.transpose(2, 3) * scaling
        row, column = torch.arange(end - begin)[:, None], torch.arange(end - begin)
        hidden = (column > row) | (column <= row - (window or end - begin))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            joined = sinks.double().view(1, -1, 1, 1).expand(1, -1, end - begin, 1)
            scores = torch.cat([scores, joined], dim=-1)
        weights = scores.softmax(-1)[..., : end - begin]
        parts.append((weights @ values).transpose(1, 2))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 3.0, 0.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 600])
def test_a_pack_with_windows_and_sinks_is_the_softmax_written_out(
    window: int | None, sinks: torch.Tensor | None
) -> None:
    lengths = [5, 1, 3, 4, 40]
    query, key, value = tensors(sum(lengths))
    found, _ = attention.packed_attention(
        nn.Module(), query, key, value, None, sliding_window=window, s_aux=sinks, **boundaries(lengths)
    )
    wanted = written_out(query, key, value, lengths, window=window, sinks=sinks)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [100, 700])
def test_a_sample_longer_than_a_stretch_of_queries_is_whole(window: int, sinks: torch.Tensor | None) -> None:
    lengths = [1300, 20]
    query, key, value = tensors(sum(lengths))
    found, _ = attention.packed_attention(
        nn.Module(), query, key, value, None, sliding_window=window, s_aux=sinks, **boundaries(lengths)
    )
    wanted = written_out(query, key, value, lengths, window=window, sinks=sinks)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


def test_no_matrix_of_a_long_sample_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    visible = attention._visible

    def watched(*arguments: Any) -> torch.Tensor:
        mask = visible(*arguments)
        seen.append(tuple(mask.shape))
        return mask

    monkeypatch.setattr(attention, "_visible", watched)
    query, key, value = tensors(4096, heads=2, kv_heads=2)
    for sinks in (None, torch.zeros(2)):
        attention.packed_attention(
            nn.Module(), query, key, value, None, sliding_window=256, s_aux=sinks, **boundaries([4096])
        )
    assert len(seen) == 16
    assert max(rows * columns for rows, columns in seen) <= 512 * (512 + 255)


def test_the_models_scaling_of_attention_is_used() -> None:
    query, key, value = tensors(12)
    found, _ = attention.packed_attention(nn.Module(), query, key, value, None, scaling=0.9, **boundaries([5, 7]))
    wanted = written_out(query, key, value, [5, 7], scaling=0.9)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


def test_sinks_are_folded_in_after_a_kernel_that_knows_none() -> None:
    lengths = [9, 30]
    query, key, value = tensors(sum(lengths))
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0])
    without = written_out(query, key, value, lengths)[0]
    # The logarithm of the sum of a softmax, from the share that a sink of 0 leaves to the tokens.
    constant = torch.ones_like(value)
    share = written_out(query, key, constant, lengths, sinks=torch.zeros(4))[0, :, :, 0]
    logsum = torch.logit(share)
    found = attention.with_sinks(without, logsum, sinks)
    wanted = written_out(query, key, value, lengths, sinks=sinks)[0]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_attention_without_boundaries_is_an_error_not_a_guess() -> None:
    tensor = torch.randn(1, 2, 4, 16)
    with pytest.raises(RuntimeError, match="boundaries"):
        attention.packed_attention(nn.Module(), tensor, tensor, tensor, None)


@pytest.mark.parametrize("asked", [{"softcap": 50.0}, {"is_causal": False}])
def test_attention_that_is_not_computed_here_is_an_error_not_a_guess(asked: dict[str, Any]) -> None:
    query, key, value = tensors(4)
    with pytest.raises(RuntimeError, match="not computed here"):
        attention.packed_attention(nn.Module(), query, key, value, None, **boundaries([4]), **asked)


def test_a_vocabulary_padded_beyond_the_tokenizer_is_the_models_to_use_up(
    models: dict[str, Path], tmp_path: Path
) -> None:
    padded = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    padded.resize_token_embeddings(2048)
    padded.save_pretrained(tmp_path)
    using = Extractor.open(tmp_path, (0, 3, 8), dtype="float32", device="cpu", output=tmp_path)
    plain = PlainForward(tmp_path)
    for ids in ([2047, 5, 6], [2040]):
        wanted = torch.stack([plain.states(ids)[layer] for layer in (0, 3, 8)], dim=1)
        torch.testing.assert_close(using.states([ids]), wanted, atol=1e-4, rtol=1e-5)
    with pytest.raises(JobError, match="token id 2048 is outside the model's vocabulary of 2048"):
        using.states([[5, 2048]])
