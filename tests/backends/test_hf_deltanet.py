"""Gated delta nets in packs: state and convolution end with their sample, and the proof at start sees where they do not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from extraction_jobs import Job, make_dataset
from transformers.models.qwen3_5 import modeling_qwen3_5

from backends.demo.configs import tiny_config
from backends.demo.model import random_model
from backends.events import EventLog
from backends.hf import attention, deltanet, kernels
from backends.hf.deltanet import PackLayout, packed_convolution, packed_delta_rule
from backends.hf.extractor import Extractor
from backends.hf.families import model_shape, read_config
from backends.plan import plan
from backends.recompute import PlainForward
from backends.spec import ExtractSpec, VerifySpec
from backends.verify import verify

CPU = torch.device("cpu")
# Around the chunk of 64 and its double, and shorter than the convolution.
LENGTHS = (70, 9, 131, 64, 1, 2, 128, 200, 63, 65, 3, 4)
LAYERS = (1, 2, 3, 4)
HYBRIDS = ("qwen3_next", "qwen3_5")


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three gated delta nets and a full attention: with experts, and in its vision-language wrapper."""
    folder = tmp_path_factory.mktemp(request.param)
    probe = torch.randint(0, 500, (1, 150), generator=torch.Generator().manual_seed(1))
    random_model(tiny_config(request.param, 4, 64, 500), probe).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 500, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(hybrid: Path, samples: list[list[int]]) -> list[torch.Tensor]:
    forward = PlainForward(hybrid)
    return [torch.stack(forward.states(ids), dim=1) for ids in samples]


def opened(model: Path, dtype: str = "float32") -> Extractor:
    return Extractor.open(model, LAYERS, dtype=dtype, device="cpu", output=model)


def worst_error(using: Extractor, samples: list[list[int]], plain: list[torch.Tensor]) -> float:
    """The worst |a - b| / |b| of a token in any slot of any sample."""
    parts = using.states(samples).float().split([len(ids) for ids in samples])
    return max(
        float(((mine[:, slot] - theirs[:, layer]).norm(dim=1) / theirs[:, layer].norm(dim=1)).max())
        for mine, theirs in zip(parts, plain, strict=True)
        for slot, layer in enumerate(LAYERS)
    )


def rule_inputs(tokens: int, heads: int = 6, keys: int = 16, values: int = 24) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(tokens, heads, keys, generator=generator) for _ in range(2))
    value = torch.randn(tokens, heads, values, generator=generator)
    decay = -0.3 * torch.rand(tokens, heads, generator=generator)
    return query, key, value, decay, torch.rand(tokens, heads, generator=generator)


def token_by_token(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    query, key, value, decay, beta = (tensor.unsqueeze(0) for tensor in inputs)
    found, _ = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
    )
    states: torch.Tensor = found[0]
    return states


def by_sample(tensors: tuple[torch.Tensor, ...], lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(torch.split(tensor, list(lengths)) for tensor in tensors), strict=True))


@pytest.mark.parametrize("numbers", [1 << 27, 1], ids=["all heads together", "head by head"])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (64,), (65,), (1, 1, 1), (3, 200)])
def test_the_delta_rule_of_a_pack_is_that_of_each_sample_token_by_token(
    lengths: tuple[int, ...], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltanet, "DELTA_RULE_NUMBERS", numbers)
    inputs = rule_inputs(sum(lengths))
    found = packed_delta_rule(PackLayout.of(lengths, 4, CPU), *inputs)
    wanted = torch.cat([token_by_token(part) for part in by_sample(inputs, lengths)])
    assert torch.allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (2,), (1, 1, 1, 1), (3, 1, 5)])
def test_the_convolution_of_a_pack_is_that_of_each_sample(lengths: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    tokens, weight = (torch.randn(size, generator=generator) for size in ((sum(lengths), 40), (40, 4)))
    added = torch.randn(40, generator=generator) if bias else None
    found = packed_convolution(PackLayout.of(lengths, 4, CPU), tokens, weight, added)
    wanted = torch.cat(
        [
            torch.nn.functional.conv1d(part.t().unsqueeze(0), weight.unsqueeze(1), added, padding=3, groups=40)[0].t()[
                : len(part)
            ]
            for part in torch.split(tokens, list(lengths))
        ]
    )
    assert torch.allclose(found, wanted, atol=5e-6)


def test_chunks_stand_in_order_of_their_number_and_no_token_is_lost() -> None:
    layout = PackLayout.of((70, 9, 131, 64), 4, CPU)
    assert layout.steps == ((0, 4), (4, 6), (6, 7))
    assert torch.equal(layout.slots[layout.places], torch.arange(274))
    # The longest sample first, then the next; a sample's end is repeated, never another's token.
    assert layout.slots.view(-1, 64)[:, 0].tolist() == [79, 0, 70, 210, 143, 64, 207]
    assert layout.slots.view(-1, 64)[:, -1].tolist() == [142, 63, 78, 273, 206, 69, 209]
    assert layout.ends.tolist() == [0, 70, 79, 210, 274]
    assert layout.chunks.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2], [3, 0]]


def test_a_pack_through_a_hybrid_is_the_plain_forward(
    hybrid: Path, samples: list[list[int]], plain: list[torch.Tensor]
) -> None:
    using = opened(hybrid)
    assert (using.packing, using.why_not, using.kernels) == ("packs", "", "PyTorch")
    assert worst_error(using, samples, plain) < 1e-5


def test_only_the_models_own_forward_is_changed(
    hybrid: Path, samples: list[list[int]], plain: list[torch.Tensor]
) -> None:
    opened(hybrid)
    again = PlainForward(hybrid).states(samples[0])
    assert torch.equal(torch.stack(again, dim=1), plain[0])


def leak_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(_: PackLayout, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return packed_delta_rule(PackLayout.of([len(query)], 4, CPU), query, *others)

    monkeypatch.setattr(deltanet, "packed_delta_rule", whole)


def leak_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(_: PackLayout, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        return packed_convolution(PackLayout.of([len(tokens)], 4, CPU), tokens, *others)

    monkeypatch.setattr(deltanet, "packed_convolution", whole)


def leak_one_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary of the convolution is a token too late."""

    def late(layout: PackLayout, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        ends = layout.ends.tolist()
        ends = [0, *(end + 1 for end in ends[1:-1]), ends[-1]]
        lengths = [end - begin for begin, end in pairwise(ends)]
        return packed_convolution(PackLayout.of(lengths, 4, CPU), tokens, *others)

    monkeypatch.setattr(deltanet, "packed_convolution", late)


def leave_the_stock_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own, which take boundaries and ignore them."""
    monkeypatch.setattr(deltanet, "_replace", lambda net, functions: "")


def leak_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention._by_sample

    def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any, *others: Any) -> torch.Tensor:
        return real(query, key, value, [query.shape[2]], *others)

    monkeypatch.setattr(attention, "_by_sample", whole)


LEAKS = (leak_state, leak_convolution, leak_one_tap, leave_the_stock_functions, leak_attention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("leak", LEAKS)
def test_every_leak_is_found_at_start_in_every_dtype(
    hybrid: Path, leak: Callable[[pytest.MonkeyPatch], None], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak(monkeypatch)
    using = opened(hybrid, dtype)
    assert using.packing == "one sample at a time"
    assert "samples in a pack differ" in using.why_not or "other samples before it" in using.why_not


@pytest.mark.parametrize("leak", LEAKS)
def test_samples_of_a_model_that_leaks_run_alone_and_are_right(
    hybrid: Path,
    samples: list[list[int]],
    plain: list[torch.Tensor],
    leak: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leak(monkeypatch)
    using = opened(hybrid)
    few = [place for place, ids in enumerate(samples) if len(ids) < 70]
    if leak is not leak_one_tap:  # That one has no meaning for a single sample.
        assert worst_error(using, [samples[place] for place in few], [plain[place] for place in few]) < 1e-5
    # And not by a hair: in packs they would be wrong.
    using.packing = "packs"
    assert worst_error(using, samples, plain) > 1e-3


def test_a_version_of_transformers_with_other_names_runs_one_sample_at_a_time(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltanet, "_DELTA_RULE", "a_name_of_the_future")
    using = opened(hybrid)
    assert using.packing == "one sample at a time"
    assert "of this version of Transformers does not call a_name_of_the_future" in using.why_not


def test_a_delta_net_without_boundaries_is_an_error_not_a_guess() -> None:
    nets = deltanet.PackedDeltaNets(torch.nn.Linear(1, 1), CPU, torch.float32)
    assert nets.kernels == ""
    with pytest.raises(RuntimeError, match="boundaries"):
        nets._convolve(torch.randn(1, 4, 9), torch.randn(4, 4))
    with pytest.raises(RuntimeError, match="boundaries"):
        nets._convolve(torch.randn(1, 4, 9), torch.randn(4, 4), pack_lengths=(4, 4))


# Triton needs a GPU. What stands for its kernel here computes with the same arguments, or ignores some of them.


def right_kernel(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any, chunk_indices: Any, **_: Any) -> Any:
    lengths = cu_seqlens.diff().tolist()
    assert len(chunk_indices) == sum(-(-length // 64) for length in lengths)
    parts = by_sample((q[0], k[0], v[0], g[0], beta[0]), lengths)
    assert torch.allclose(k.float().norm(dim=-1), torch.ones(k.shape[:-1]), atol=1e-2)
    return torch.cat([token_by_token(part) for part in parts]).unsqueeze(0), None


def leaking_kernel(q: Any, k: Any, v: Any, *, cu_seqlens: Any, chunk_indices: Any, **others: Any) -> Any:
    return modeling_qwen3_5.torch_chunk_gated_delta_rule(q, k, v, **others)


def old_kernel(q: Any, k: Any, v: Any, *, cu_seqlens: Any, **_: Any) -> Any:
    raise AssertionError("called all the same")


def broken_kernel(q: Any, k: Any, v: Any, *, cu_seqlens: Any, chunk_indices: Any, **_: Any) -> Any:
    raise RuntimeError("ptxas is missing\nand more")


def small_kernel(q: Any, k: Any, v: Any, *, cu_seqlens: Any, chunk_indices: Any, **_: Any) -> Any:
    if len(chunk_indices) * 64 != v.shape[1]:
        raise RuntimeError("no configuration for samples this short")
    return torch.zeros_like(v), None


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (right_kernel, "flash-linear-attention 0.6.0"),
        (leaking_kernel, "PyTorch (not flash-linear-attention 0.6.0: samples in a pack differ"),
        (
            old_kernel,
            "PyTorch (not flash-linear-attention 0.6.0: ImportError: chunk_gated_delta_rule takes no chunk_indices)",
        ),
        (broken_kernel, "PyTorch (not flash-linear-attention 0.6.0: RuntimeError: ptxas is missing"),
        (small_kernel, "PyTorch (not flash-linear-attention 0.6.0: RuntimeError: no configuration for samples"),
    ],
)
def test_a_kernel_is_used_where_it_is_right_and_else_pytorch(
    kernel: Any,
    words: str,
    hybrid: Path,
    samples: list[list[int]],
    plain: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = kernel
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(deltanet, "takes_fla", lambda device, dtype: True)
    monkeypatch.setattr(deltanet, "fla_version", lambda: "0.6.0")
    using = opened(hybrid)
    assert using.packing == "packs"
    assert using.kernels.startswith(words)
    assert using.kernels == (f"PyTorch ({using.fallback})" if kernel is not right_kernel else words)
    assert "\n" not in using.kernels
    assert worst_error(using, samples, plain) < 1e-5


def test_a_hybrids_job_says_in_plan_and_log_what_computes_it_and_its_files_are_verified(
    hybrid: Path, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "data", [70, 5, 140, 64], vocab=500)
    job = Job(tmp_path, model=str(hybrid), dataset=str(dataset), output=str(tmp_path / "out"), layers=[1, 2, 3, 4])
    planned = plan(ExtractSpec.from_json(job.spec))
    assert planned["ok"] is True
    assert planned["packing"] == "packs, if proven at start; gated delta nets by PyTorch"
    try:
        assert job.run() == 0, job.stderr
    finally:
        job.end()
    assert job.events()[-1]["packing"] == "packs"
    assert "gated delta nets by PyTorch\n" in job.stdout + job.stderr
    found = verify(VerifySpec(output=str(job.output), recompute=4), EventLog(None), lambda: False)
    assert (found["verified"], found["recomputed"]) == (4, 4)
    assert found["recomputed_worst_error"] < 1e-5


def test_plan_says_what_will_compute_a_hybrid_as_far_as_it_can_be_known(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = model_shape(read_config(hybrid), hybrid)
    by_pytorch = "packs, if proven at start; gated delta nets by PyTorch"
    assert kernels.fla_version() is None
    assert kernels.expected_packing(shape, "cpu", "bfloat16") == (by_pytorch, [])
    assert kernels.expected_packing(shape, "cuda", "float32") == (by_pytorch, [])
    packing, (warning,) = kernels.expected_packing(shape, "cuda", "bfloat16")
    assert packing == by_pytorch
    assert "slower (pip install flash-linear-attention)" in warning
    monkeypatch.setattr(kernels, "fla_version", lambda: "0.6.0")
    packing, warnings = kernels.expected_packing(shape, "cuda", "bfloat16")
    assert (packing, warnings) == ("packs, if proven at start; gated delta nets by flash-linear-attention 0.6.0", [])
    dense = model_shape(tiny_config("qwen3", 4, 64, 500).to_dict(), hybrid)
    assert kernels.expected_packing(dense, "cuda", "bfloat16") == ("packs", [])
    assert kernels.delta_net_bytes(dense, 1000, "cuda", "bfloat16") == 0
    assert kernels.delta_net_bytes(shape, 1000, "cuda", "float32") > kernels.delta_net_bytes(
        shape, 1000, "cuda", "bfloat16"
    )
