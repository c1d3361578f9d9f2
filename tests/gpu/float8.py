"""float8 on a real GPU; prints one JSON document, exit status 1 where something is not as it should be.

    python3 tests/gpu/float8.py [--tokens 16384] [--blocks 8]

The device's values are the CPU's, what quantising costs is measured against the copy that it halves, and an extractor of
random weights at Qwen3-8B's width writes the same samples both ways: the float8 files are the bfloat16 ones, quantised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model

from backends.flattening import Flattening
from backends.hf.attention import ATTENTION
from backends.hf.extractor import Extractor, PackResult, Sample
from backends.hf.fp8 import packed, unpacked
from backends.hsfile import file_name, read_file

LAYERS, HIDDEN = 6, 4096


def milliseconds(work: Any) -> float:
    """Median of ten, after two for nothing."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times[2:]), 3)


def differing(ours: Any, theirs: Any) -> list[int]:
    """How many bytes of the values, and how many scales, are not the same."""
    return [int(np.count_nonzero(np.asarray(ours[part]) != np.asarray(theirs[part]))) for part in (0, 1)]


def cpu_and_gpu() -> list[int]:
    """How many bytes and scales the two make otherwise, of states with a token of zeros and one with an outlier."""
    states = torch.randn(2500, LAYERS, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    states[7], states[11, 2, 5] = 0, 3e4
    ours, theirs = (unpacked(packed(s).cpu().numpy(), 2500, LAYERS) for s in (states, states.cuda()))
    return differing(ours, theirs)


def timed(tokens: int) -> dict[str, Any]:
    """What quantising a pack costs, and the copies to the host of the pack both ways."""
    states = torch.randn(tokens, LAYERS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    small, large = packed(states), states.view(torch.uint8).view(-1)
    host = torch.empty(large.numel(), dtype=torch.uint8, pin_memory=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": tokens,
        "quantise_ms": milliseconds(lambda: packed(states)),
        "copy_float8_ms": milliseconds(lambda: host[: small.numel()].copy_(small, non_blocking=True)),
        "copy_bfloat16_ms": milliseconds(lambda: host.copy_(large, non_blocking=True)),
    }


def extracted(
    folder: Path, model: Any, layer_ids: list[int], samples: list[Sample], *, float8: bool
) -> tuple[float, PackResult]:
    """Seconds that 4 packs of the same samples take, and what became of the last."""
    (folder / str(float8)).mkdir()
    extractor = Extractor(
        model,
        layer_ids,
        vocab_size=model.config.vocab_size,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        output=folder / str(float8),
        float8=float8,
    )
    results: list[PackResult | BaseException] = []
    extractor.run(samples, results.append)
    began = time.perf_counter()
    for _ in range(4):
        extractor.run(samples, results.append)
    extractor.close()
    seconds = time.perf_counter() - began
    last = results[-1]
    if isinstance(last, BaseException):
        raise last
    return seconds, last


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    layer_ids = [1, 2, 3, 4, 5, options.blocks]

    seen = timed(options.tokens)
    torch.set_default_device("cuda")
    config = Qwen3Config(
        hidden_size=HIDDEN,
        num_hidden_layers=options.blocks,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=32000,
        attn_implementation=ATTENTION,
    )
    model = Qwen3Model._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    torch.set_default_device("cpu")
    samples = [
        Sample(row, torch.randint(0, 32000, (1024,), generator=torch.Generator().manual_seed(row)).tolist())
        for row in range(options.tokens // 1024)
    ]
    failed = []
    if any(apart := cpu_and_gpu()):
        failed.append(f"{apart} values and scales of the GPU are not the CPU's")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for float8 in (False, True):
            seconds, result = extracted(folder, model, layer_ids, samples, float8=float8)
            way = "float8" if float8 else "bfloat16"
            seen[f"extract_{way}_s"] = round(seconds, 3)
            if len(result.entries) != len(samples):
                failed.append(f"{way}: {result.bad or result.disk_error}")
        bound = {"model_fingerprint": "", "dataset_fingerprint": "", "layer_ids": layer_ids, "hidden_size": HIDDEN}
        found = Flattening(bound)
        found.add(options.tokens, result.float8_figures or [])
        seen["error_by_layer"] = {k: round(error, 5) for k, error in found.errors().items()}
        for sample in samples[:4]:
            exact, small = (read_file(folder / str(way) / file_name(sample.row)) for way in (False, True))
            wanted = torch.from_numpy(np.array(exact.states).view(np.int16)).view(torch.bfloat16)
            quantised = unpacked(packed(wanted).numpy(), len(wanted), LAYERS)
            if any(apart := differing(quantised, (small.states, small.scales))):
                failed.append(
                    f"row {sample.row}: {apart} values and scales are not those of the bfloat16 file, quantised"
                )
    print(json.dumps({**seen, "failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
