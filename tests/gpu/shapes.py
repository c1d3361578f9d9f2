"""Models of real shapes on a real GPU: their files verified against the plain float32 forward, and what packing buys a hybrid.

    python3 tests/gpu/shapes.py --out FOLDER [--shapes qwen3-8b,qwen3.6-27b] [--tiny]
    python3 tests/gpu/shapes.py --out FOLDER --bench [--tiny]

Nothing is downloaded: weights are random, every block changes its stream by a fifth or more, and both are of the full width
(the hybrid has 8 of 64 blocks). For each shape and dtype the verbs `plan`, `extract` and `verify --recompute` run as the
node runs them, in processes of their own. `--bench` times the hybrid: packs by flash-linear-attention and by PyTorch, and
stock Transformers one sample at a time with both. Prints one JSON line a result, and writes them to OUT/shapes.jsonl or
OUT/bench.jsonl; the exit status is 1 where something is not as it should be. `--tiny` is the same at sizes for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "bench")]

from random_models import HYBRID, SHAPES, build  # noqa: E402 - after the path

MAIN = ROOT / "backends" / "__main__.py"


class Report:
    """JSON lines on stdout and in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self.failed: list[str] = []
        path.write_text("", encoding="utf-8")

    def tell(self, what: str, **fields: Any) -> None:
        line = json.dumps({"what": what, "at_s": round(time.monotonic() - self._began, 1), **fields})
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def expect(self, what: str, holds: bool, found: Any = None) -> None:
        if not holds:
            self.failed.append(f"{what}: {found}")
            self.tell("failed", expected=what, found=found)


class MemoryOfTheGpu:
    """The most memory in use on the first GPU while it lasts, bytes; None where NVML is not there."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # No NVML, or no GPU: then there is nothing to tell.
            return
        while not self._end.wait(0.2):
            self.peak = max(self.peak or 0, int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used))

    def __enter__(self) -> MemoryOfTheGpu:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def build_into(name: str, tiny: bool, folder: Path) -> None:
    """What the child process does: its memory is free again when it ends. Prints the changes."""
    model, changes = build(name, tiny)
    model.save_pretrained(folder)
    print(json.dumps(changes))


def make_dataset(folder: Path, vocabulary: int, samples: int, mean: int, longest: int) -> list[int]:
    """Random tokens with log-normal lengths, which are returned."""
    import datasets
    import torch
    from bench_extract import lengths_of

    lengths = lengths_of(samples, mean, longest)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    rows = {"input_ids": ids, "loss_mask": [[1] * length for length in lengths], "seq_len": lengths}
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(folder)
    return lengths


def run_verb(verb: str, spec: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, the last event's fields, and the log."""
    folder.mkdir(parents=True, exist_ok=True)
    path, events = folder / f"{verb}.json", folder / f"{verb}.events.jsonl"
    path.write_text(json.dumps(spec), encoding="utf-8")
    events.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-u", str(MAIN), verb, str(path), "--events", str(events)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stdout


def ask_plan(spec: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(MAIN), "plan", "-"],
        input=json.dumps({"verb": "extract", "spec": spec}),
        capture_output=True,
        text=True,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def files_of(name: str, args: argparse.Namespace, report: Report, work: Path) -> None:
    """One shape: built, then extracted and verified in bfloat16 and float32."""
    import torch

    from backends.limits import limit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = work / "model", work / "data"
    began = time.monotonic()
    command = [sys.executable, __file__, "--build", name, "--out", str(model), *(["--tiny"] if args.tiny else [])]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    report.expect(f"{name} is built", built.returncode == 0, built.stderr[-800:])
    if built.returncode:
        return
    changes = json.loads(built.stdout.splitlines()[-1])
    report.expect("every block changes its stream by a fifth", min(changes) >= 0.2, changes)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    report.tell("built", shape=name, blocks=len(changes), bytes=size, least_change=min(changes), wall_s=_since(began))
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    mean, longest = (150, 400) if args.tiny else (875, 4096)
    lengths = make_dataset(data, vocabulary, args.samples, mean, longest)
    counts = {"bfloat16": args.samples, "float32": min(args.samples, 64)}
    for dtype, count in ((dtype, counts[dtype]) for dtype in args.dtypes.split(",")):
        output = work / f"states-{dtype}"
        spec = {
            "model": str(model),
            "dataset": str(data),
            "output": str(output),
            "dtype": dtype,
            "device": device,
            "last": count,
            "pack_tokens": 1024 if args.tiny else 16384,
        }
        planned = ask_plan(spec)
        began = time.monotonic()
        with MemoryOfTheGpu() as memory:
            status, last, log = run_verb("extract", spec, work / dtype)
        (args.out / f"{name}-{dtype}.log").write_text(log, encoding="utf-8")
        report.expect(f"{name} in {dtype} is extracted", status == 0, f"{status} {last} {log[-800:]}")
        kernels = [line for line in log.splitlines() if line.startswith("gated delta nets by")]
        extracted = {
            "shape": name,
            "dtype": dtype,
            "samples": count,
            "tokens": sum(lengths[:count]),
            "longest": max(lengths[:count]),
            **{key: last.get(key) for key in ("samples_per_s", "tokens_per_s", "bytes_per_s", "packing", "layer_ids")},
            "kernels": kernels[0].removeprefix("gated delta nets by ") if kernels else None,
            "planned": {key: planned.get(key) for key in ("packing", "memory_bytes_per_worker", "warnings", "error")},
            "peak_memory_bytes": memory.peak,
            "wall_s": _since(began),
        }
        report.tell("extracted", **extracted)
        report.expect(f"{name} in {dtype} runs in packs", last.get("packing") == "packs", last.get("packing"))
        began = time.monotonic()
        status, last, log = run_verb(
            "verify", {"output": str(output), "recompute": args.recompute, "device": device}, work / f"verify-{dtype}"
        )
        report.expect(f"{name} in {dtype} is verified", status == 0, f"{status} {last} {log[-800:]}")
        found = ("verified", "recomputed", "recomputed_worst_error", "worst_error_by_layer", "message")
        limits = {str(layer): limit(dtype, layer) for layer in extracted["layer_ids"] or ()}
        report.tell(
            "verified",
            shape=name,
            dtype=dtype,
            **{key: last.get(key) for key in found},
            limits=limits,
            wall_s=_since(began),
        )
        shutil.rmtree(output, ignore_errors=True)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def bench(args: argparse.Namespace, report: Report, work: Path) -> None:
    """The hybrid four ways, alternating; the first pass of each, in which Triton tunes, apart from the later ones."""
    import torch
    from bench_extract import by_packs, by_transformers, lengths_of, timed

    from backends.hf.attention import ATTENTION
    from backends.hf.extractor import Extractor, Sample
    from backends.layers import layer_ids
    from backends.recompute import _without_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, changes = build(HYBRID, args.tiny)
    report.expect("every block changes its stream by a fifth", min(changes) >= 0.2, changes)
    base = model.model.requires_grad_(False)
    del model
    base.set_attn_implementation(ATTENTION)
    config = base.config
    wanted = layer_ids("dflash", config.num_hidden_layers)
    lengths = lengths_of(args.samples, *((150, 400) if args.tiny else (875, 4096)))
    ids = [torch.randint(0, config.vocab_size, (length,)).tolist() for length in lengths]
    samples = [Sample(row, tokens) for row, tokens in enumerate(ids)]
    pack_tokens = 1024 if args.tiny else 16384
    began = time.monotonic()
    extractor = Extractor(
        base,
        wanted,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        dtype=torch.bfloat16,
        device=device,
        output=work,
    )
    nets = extractor._deltanets
    report.tell(
        "opened", kernels=extractor.kernels, packing=extractor.packing, why_not=extractor.why_not, wall_s=_since(began)
    )
    report.expect("the hybrid runs in packs", extractor.packing == "packs", extractor.why_not)
    rule = nets._rule
    ours = {net: net.__dict__["forward"] for net in base.modules() if hasattr(net, "A_log")}

    def packs(kernel: Any) -> Callable[[], None]:
        def way() -> None:
            nets._rule = kernel
            by_packs(extractor, samples, pack_tokens)

        return way

    def stock(plain: bool) -> Callable[[], None]:
        def way() -> None:
            for net in ours:
                del net.__dict__["forward"]
            base.set_attn_implementation("sdpa")
            try:
                with _without_kernels(base) if plain else nullcontext():
                    by_transformers(base, wanted, samples, 1, work, device)
            finally:
                base.set_attn_implementation(ATTENTION)
                for net, forward in ours.items():
                    net.__dict__["forward"] = forward

        return way

    ways: dict[str, tuple[Callable[[], None], int]] = {"packs, PyTorch": (packs(None), 3)}
    if rule is not None:
        ways["packs, flash-linear-attention"] = (packs(rule), 3)
        ways["one at a time, stock, flash-linear-attention"] = (stock(False), 2)
        few = ids[:4]
        found = []
        for kernel in (rule, None):
            nets._rule = kernel
            found.append(extractor.states(few).float())
        apart = ((found[0] - found[1]).norm(dim=2) / found[1].norm(dim=2)).mean(0)
        report.tell("kernel against PyTorch", relative_error_by_slot=[round(float(slot), 5) for slot in apart])
    ways["one at a time, stock, PyTorch"] = (stock(True), 2)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    for turn in range(1 + max(rounds for _, rounds in ways.values())):
        for way, (run, rounds) in ways.items():
            if turn > rounds - (way.startswith("one")):
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds[way].append(timed(run, device))
            if device.type == "cuda":
                peaks[way] = torch.cuda.max_memory_allocated()
            report.tell("pass", way=way, turn=turn, seconds=round(seconds[way][-1], 3))
    nets._rule = rule
    extractor.close()
    for way, taken in seconds.items():
        median = statistics.median(taken[1:])
        report.tell(
            "way",
            way=way,
            samples=len(samples),
            tokens=sum(lengths),
            samples_per_s=round(len(samples) / median, 2),
            tokens_per_s=round(sum(lengths) / median),
            first_pass_samples_per_s=round(len(samples) / taken[0], 2),
            passes=[round(second, 3) for second in taken],
            peak_memory_bytes=peaks.get(way),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results and logs")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated (%(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="comma-separated (%(default)s)")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--recompute", type=int, default=4)
    parser.add_argument("--work", type=Path, help="where models and states are written (a temporary folder)")
    parser.add_argument("--bench", action="store_true", help="time the hybrid instead")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--build", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build_into(args.build, args.tiny, args.out)
        return 0
    unknown = set(args.shapes.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"no shape is called {', '.join(sorted(unknown))}; use {', '.join(SHAPES)}")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = Report(args.out / ("bench.jsonl" if args.bench else "shapes.jsonl"))
    for name in args.shapes.split(",") if not args.bench else [HYBRID]:
        work = Path(tempfile.mkdtemp(prefix="shapes-", dir=args.work))
        try:
            if args.bench:
                bench(args, report, work)
            else:
                files_of(name, args, report, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    report.tell("ended", failed=report.failed)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
