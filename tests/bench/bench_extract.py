"""What packing buys: the hf extractor against one sample at a time and against padded batches, on one device.

    python3 tests/bench/bench_extract.py --shape qwen3-8b --samples 192 --out OUT.json

Weights are random and made on the device, so nothing is downloaded; lengths are log-normal. Ways, all writing the same files:
  packs          the extractor as it is: packs, the wanted layers only, copies and writes overlapped, files checked, fsync
  one at a time  stock Transformers, output_hidden_states, .cpu(), save_file
  padded         the same in padded batches of 8, sorted by length
Before anything is timed, packs are compared with the plain forward in float32 and in bfloat16; a difference ends the run.
Figures of a shared machine are worth their ratios: rounds of the ways alternate, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3Model

from backends.hf.attention import ATTENTION
from backends.hf.extractor import Extractor, PackResult, Sample
from backends.layers import layer_ids
from backends.packing import pack_samples
from backends.store import check_file

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 384,
        "vocab_size": 2_000,
    },
}
# Error of a token's state that other kernels and another order of summing explain, over the blocks of the check's model.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
PADDED_BATCH = 8


def lengths_of(samples: int, mean: int, longest: int) -> list[int]:
    """Log-normal lengths in tokens (sigma 0.7) with about this mean."""
    generator = torch.Generator().manual_seed(1)
    spread = 0.7
    normal = torch.randn(samples, generator=generator) * spread + math.log(mean) - spread * spread / 2
    return [int(length) for length in normal.exp().clamp(8, longest)]


def random_model(shape: dict[str, int], dtype: torch.dtype, device: torch.device, attention: str) -> Qwen3Model:
    """A base model made on the device; each block changes its residual stream by a fifth or more (checked by `check`)."""
    config = Qwen3Config(**shape, max_position_embeddings=40_960, use_cache=False, attn_implementation=attention)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3Model(config)
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(0, scale, generator=generator)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def check(shape: dict[str, int], dtype: torch.dtype, device: torch.device, folder: Path) -> dict[str, float]:
    """Packs against the plain eager forward in float32, one sample at a time. Raises SystemExit where they differ."""
    name = str(dtype).removeprefix("torch.")
    shape = {**shape, "num_hidden_layers": min(shape["num_hidden_layers"], 8)}
    wanted = tuple(range(shape["num_hidden_layers"] + 1))
    plain = random_model(shape, dtype, device, "eager")
    packed = random_model(shape, dtype, device, ATTENTION)
    plain.float()
    samples = [ids.tolist() for ids in torch.randint(0, shape["vocab_size"], (700,)).split([1, 130, 3, 400, 37, 129])]
    extractor = make_extractor(packed, shape, wanted, dtype, device, folder)
    states = extractor.states(samples).float()
    before_norm: list[torch.Tensor] = []
    plain.norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0]))
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    references = []
    for ids in samples:
        found = plain(torch.tensor([ids], device=device), output_hidden_states=True, use_cache=False).hidden_states
        references.append(torch.stack([*(state[0] for state in found[:-1]), before_norm.pop()[0]], dim=1))
    torch.set_float32_matmul_precision(matmul)
    reference = torch.cat(references)
    error = float(((states - reference).norm(dim=2) / reference.norm(dim=2)).mean(dim=0).max())
    changes = (reference[:, 1:] - reference[:, :-1]).norm(dim=2) / reference[:, :-1].norm(dim=2)
    change = float(changes.mean(dim=0).min())
    if extractor.packing != "packs" or error > LIMITS[name] or change < 0.2:
        raise SystemExit(
            f"{name}: {extractor.packing} {extractor.why_not}; error {error:.3g}, least change {change:.3g}"
        )
    extractor.close()
    return {"error": error, "limit": LIMITS[name], "least_change_of_a_block": change}


def make_extractor(
    model: Qwen3Model,
    shape: dict[str, int],
    wanted: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    output: Path,
) -> Extractor:
    return Extractor(
        model,
        wanted,
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        dtype=dtype,
        device=device,
        output=output,
    )


def by_packs(extractor: Extractor, samples: Sequence[Sample], pack_tokens: int) -> None:
    """All samples by the extractor. Waits until the last file has its name."""
    by_row = {sample.row: sample for sample in samples}
    results: list[PackResult | BaseException] = []
    packs = pack_samples([(sample.row, len(sample.token_ids)) for sample in samples], pack_tokens)
    for pack in packs:
        extractor.run([by_row[row] for row in pack.rows], results.append)
    while len(results) < len(packs):
        time.sleep(0.001)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        if result.bad or result.disk_error:
            raise SystemExit(f"{result.bad} {result.disk_error}")


@torch.inference_mode()
def by_transformers(
    model: Qwen3Model, wanted: Sequence[int], samples: Sequence[Sample], batch: int, output: Path, device: torch.device
) -> None:
    """What a script does: batches padded on the right, all layers returned, the wanted ones saved."""
    last: list[torch.Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids)) if batch > 1 else samples
    for begin in range(0, len(ordered), batch):
        chunk = ordered[begin : begin + batch]
        longest = max(len(sample.token_ids) for sample in chunk)
        ids = torch.zeros(len(chunk), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, sample in enumerate(chunk):
            ids[place, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
            mask[place, : len(sample.token_ids)] = 1
        arguments: dict[str, Any] = {"attention_mask": mask.to(device)} if batch > 1 else {}
        found = model(ids.to(device), output_hidden_states=True, use_cache=False, **arguments).hidden_states
        layers = [*found[:-1], last.pop()]
        states = torch.stack([layers[layer] for layer in wanted], dim=2).cpu()
        for place, sample in enumerate(chunk):
            length = len(sample.token_ids)
            tensors = {
                "hidden_states": states[place, :length].contiguous(),
                "token_ids": torch.tensor(sample.token_ids),
            }
            save_file(tensors, output / f"hs_{sample.row}.safetensors")
    hook.remove()


def timed(way: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    for name in SHAPES["tiny"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the shape's")
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--mean-tokens", type=int, default=875)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--pack-tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3, help="of packs; the slower ways run once fewer")
    parser.add_argument("--folder", type=Path, help="where files are written (a temporary folder)")
    parser.add_argument("--out", type=Path, help="a JSON file with everything that was measured")
    given = parser.parse_args()
    shape = {name: getattr(given, name) or size for name, size in SHAPES[given.shape].items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    root = Path(tempfile.mkdtemp(prefix="bench-extract-", dir=given.folder))
    try:
        report = measure(given, shape, device, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report |= {"device": name, "torch": torch.__version__, "transformers": transformers.__version__, "shape": shape}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"device": name, "checks": report["checks"]}))
    print(f"{'way':<16}{'samples/s':>10}{'tokens/s':>10}{'MB/s':>8}{'rounds':>8}{'of packs':>10}")
    for way, row in report["ways"].items():
        print(
            f"{way:<16}{row['samples_per_s']:>10.2f}{row['tokens_per_s']:>10.0f}{row['bytes_per_s'] / 1e6:>8.0f}"
            f"{len(row['seconds']):>8}{row['share_of_packs']:>10.2f}"
        )


def measure(given: argparse.Namespace, shape: dict[str, int], device: torch.device, root: Path) -> dict[str, Any]:
    checks = {}
    for dtype in (torch.float32, torch.bfloat16):
        checks[str(dtype).removeprefix("torch.")] = check(shape, dtype, device, root)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dtype = torch.bfloat16
    wanted = layer_ids("dflash", shape["num_hidden_layers"])
    lengths = lengths_of(given.samples, given.mean_tokens, given.max_tokens)
    generator = torch.Generator().manual_seed(2)
    samples = [
        Sample(row, torch.randint(0, shape["vocab_size"], (length,), generator=generator).tolist())
        for row, length in enumerate(lengths)
    ]
    tokens = sum(lengths)
    size = tokens * (len(wanted) * shape["hidden_size"] * 2 + 8)
    model = random_model(shape, dtype, device, "sdpa")

    def one_by_one() -> None:
        by_transformers(model, wanted, samples, 1, root, device)

    def padded() -> None:
        by_transformers(model, wanted, samples, PADDED_BATCH, root, device)

    seconds: dict[str, list[float]] = {"packs": [], "one at a time": [], "padded": []}
    by_transformers(model, wanted, samples[:4], 1, root, device)
    for _ in range(max(given.rounds - 1, 1)):
        seconds["one at a time"].append(timed(one_by_one, device))
        seconds["padded"].append(timed(padded, device))
    # The same weights, now with packed attention; cutting off blocks after the last wanted layer changes nothing here.
    model.set_attn_implementation(ATTENTION)
    extractor = make_extractor(model, shape, wanted, dtype, device, root)
    if extractor.packing != "packs":
        raise SystemExit(f"{extractor.packing}: {extractor.why_not}")
    # The first round pins the host's buffers; it is reported apart.
    first = timed(lambda: by_packs(extractor, samples, given.pack_tokens), device)
    for _ in range(given.rounds):
        seconds["packs"].append(timed(lambda: by_packs(extractor, samples, given.pack_tokens), device))
    forward = statistics.median(
        timed(lambda: forwards(extractor, samples, given.pack_tokens), device) for _ in range(2)
    )
    extractor.close()
    for sample in samples[:: max(len(samples) // 16, 1)]:
        check_file(
            root / f"hs_{sample.row}.safetensors",
            token_ids=sample.token_ids,
            layers=len(wanted),
            hidden_size=shape["hidden_size"],
            dtype="bfloat16",
        )
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "checks": checks,
        "samples": len(samples),
        "tokens": tokens,
        "bytes": size,
        "layer_ids": list(wanted),
        "pack_tokens": given.pack_tokens,
        "first_round_of_packs_s": first,
        "forwards_alone_s": forward,
        "forwards_alone_tokens_per_s": tokens / forward,
        "ways": {
            way: {
                "seconds": seconds[way],
                "samples_per_s": len(samples) / median,
                "tokens_per_s": tokens / median,
                "bytes_per_s": size / median,
                "share_of_packs": medians["packs"] / median,
            }
            for way, median in medians.items()
        },
    }


def forwards(extractor: Extractor, samples: Sequence[Sample], pack_tokens: int) -> None:
    """The packs' forwards without copies and files: what writing costs is the difference."""
    by_row = {sample.row: sample for sample in samples}
    for pack in pack_samples([(sample.row, len(sample.token_ids)) for sample in samples], pack_tokens):
        extractor.states([by_row[row].token_ids for row in pack.rows])


if __name__ == "__main__":
    main()
