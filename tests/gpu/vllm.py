"""A vLLM of this machine: what `doctor` predicts for a dense and a hybrid model, and what then happens; prints one JSON document.

    python3 tests/gpu/vllm.py --out FOLDER --vllm-python PYTHON [--cells dense,hybrid] [--compare] [--samples 256]
        [--gpus 0,1 --tensor-parallel 2] [--tiny]

By the commands that a user types, `--host local`: `doctor --model`, `launch --backend vllm --wait`, `verify`, `compare`, `diagnose`. Where the
prediction is no, the launch must be refused; then the server is started by hand with the backend's own command line, which must
fail, and `diagnose` must name the cause. Models are random, of Qwen3-8B's shape and of Qwen3.6-27B's width (8 of 64 blocks); those
that lie in `--work` already are taken. `--compare`: hf and vLLM on the dense model. `--tiny` is the same for a CPU. Every expectation that
fails is listed under `failed`, and the exit status is then 1. The card's settings are left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "bench")]

from random_models import PUBLISHED  # noqa: E402 - after the path
from shapes import make_dataset  # noqa: E402 - after the path

MODELS = {"dense": "qwen3-8b", "hybrid": PUBLISHED}
# Of both models' vocabularies.
VOCABULARY = {False: 32_000, True: 1_500}
LIMIT_S = 420.0
# Of the start alone: a hybrid's kernels are compiled without it, too.
SERVER_ARGUMENTS = {"dense": (), "hybrid": ("--enforce-eager",)}


class Run:
    """Commands, what they said, and what was not as it should be."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out.resolve()
        self.work: Path = args.work.resolve()
        self.began = time.monotonic()
        self.failed: list[str] = []
        self.env = {
            **os.environ,
            "HOME": str(self.work / "home"),
            "XDG_DATA_HOME": os.environ.get("XDG_DATA_HOME", str(self.work / "home" / "data")),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        if args.tiny:
            self.env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        (self.work / "home").mkdir(parents=True, exist_ok=True)
        self.gpus = [] if args.tiny else ["--gpus", args.gpus]
        self.parallel = ["--tensor-parallel", str(args.tensor_parallel)]

    def expect(self, what: str, holds: bool, found: Any = None) -> None:
        if not holds:
            self.failed.append(f"{what}: {found!r:.1500}")
            self.note(f"NOT AS EXPECTED: {self.failed[-1]}")

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def ask(self, *words: object, code: int | None = 0) -> Any:
        """The JSON document of a command, with its wall time and exit code."""
        began = time.monotonic()
        before, dashes, after = [*map(str, words)], [], []
        if "--" in before:
            place = before.index("--")
            before, dashes, after = before[:place], ["--"], before[place + 1 :]
        done = subprocess.run(
            [sys.executable, "-m", "dflash_tui.cli", *before, "--host", "local", "--json", *dashes, *after],
            env=self.env,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = round(time.monotonic() - began, 1)
        told = (done.stderr.strip() or done.stdout)[-800:]
        self.note(f"{words[0]} {words[1] if len(words) > 1 else ''} ended with {done.returncode} after {seconds} s")
        if code is not None:
            self.expect(f"{words[0]} ends with {code}", done.returncode == code, f"{done.returncode} {told}")
        self.expect(f"{words[0]} prints no traceback", "Traceback" not in told, told)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = {"stdout": done.stdout[-800:]}
        document = found[0] if isinstance(found, list) and found else found
        return {**document, "seconds": seconds, "exit": done.returncode}


def model_of(run: Run, cell: str) -> Path:
    """The cell's model with a tokenizer, made where it is not there yet, by a process whose memory is then free again."""
    folder = run.work / f"model-{cell}"
    if not (folder / "whole").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable,
            __file__,
            "--build",
            cell,
            "--out",
            str(folder),
            *(["--tiny"] if run.args.tiny else []),
        ]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        run.expect(f"the {cell} model is made", done.returncode == 0, done.stderr[-800:])
        run.note(f"the {cell} model was made in {time.monotonic() - began:.1f} s: {done.stdout.strip()[-200:]}")
    return folder


def build_into(cell: str, tiny: bool, folder: Path) -> None:
    from random_models import build

    import backends.demo
    from backends.demo.model import train_tokenizer

    model, changes = build(MODELS[cell], tiny)
    model.save_pretrained(folder)
    file = Path(backends.demo.__file__).parent / "data" / "mt-bench.jsonl"
    train_tokenizer(file.read_text(encoding="utf-8").splitlines(), 1_000).save_pretrained(folder)
    (folder / "whole").touch()
    print(json.dumps({"blocks": len(changes), "least_change": round(min(changes), 3)}))


def data_of(run: Run) -> Path:
    folder, count = run.work / f"data-{run.args.samples}", run.args.samples
    if not folder.is_dir():
        mean, longest = (60, 200) if run.args.tiny else (875, 4096)
        lengths = make_dataset(folder, VOCABULARY[run.args.tiny], count, mean, longest)
        run.note(f"{count} samples, {sum(lengths)} tokens, the longest {max(lengths)}")
    return folder


def predicted(run: Run, model: Path) -> dict[str, Any]:
    """What doctor says of this vLLM and the model."""
    python = run.args.vllm_python
    answer = run.ask("doctor", "--model", model, "--vllm-python", python, *run.gpus, *run.parallel, code=None)
    mine = [one for one in answer.get("vllm") or () if one["python"] == python]
    run.expect("doctor judges this vLLM", len(mine) == 1, answer)
    return {"hf": answer.get("hf"), "vllm": mine[0] if mine else {}, "seconds": answer["seconds"]}


def extraction(run: Run, cell: str, model: Path, samples: int) -> list[object]:
    output = run.work / f"states-{cell}"
    shutil.rmtree(output, ignore_errors=True)
    # On two cards the compiled all-reduce wants NVLink multicast, which not every host has.
    eager = run.args.tiny or run.args.tensor_parallel > 1
    extra = [*SERVER_ARGUMENTS[cell], *(["--enforce-eager"] if eager and not SERVER_ARGUMENTS[cell] else [])]
    words: list[object] = ["--backend", "vllm", "--model", model, "--dataset", data_of(run), "--output", output]
    words += [
        "--vllm-python",
        run.args.vllm_python,
        "--last",
        samples,
        *run.gpus,
        *run.parallel,
        "--name",
        cell,
        "--wait",
    ]
    return [*words, "--", *extra] if extra else words


def works(run: Run, cell: str, model: Path) -> dict[str, Any]:
    """The launch, to its end; its files verified."""
    samples = min(run.args.samples, 96) if cell == "hybrid" else run.args.samples
    job = run.ask("launch", *extraction(run, cell, model, samples), code=None)
    keep_log(run, cell, job)
    found: dict[str, Any] = {"launch": job, "started_s": starts(job)}
    if job["exit"]:
        found["diagnosis"] = run.ask("diagnose", job["job"], code=None) if job.get("job") else None
        return found
    found["verify"] = run.ask(
        "verify", run.work / f"states-{cell}", "--recompute", 2, *(one.split(",")[0] for one in run.gpus)
    )
    shutil.rmtree(run.work / f"states-{cell}", ignore_errors=True)
    return found


def starts(job: dict[str, Any]) -> dict[str, float]:
    """Seconds from the server's start to each phase of it, by the job's events."""
    events = Path(str(job.get("log") or "")).with_name("events.jsonl")
    began, found = None, {}
    for line in events.read_text(encoding="utf-8").splitlines() if events.is_file() else ():
        event = json.loads(line)
        if event["event"] == "worker" and event.get("port") and began is None:
            began = event["t"]
        elif event["event"] == "phase" and began is not None:
            found.setdefault(event["phase"], round(event["t"] - began, 1))
        elif event["event"] == "progress" and began is not None and event["done"]:
            found.setdefault("first sample", round(event["t"] - began, 1))
    return found


def keep_log(run: Run, cell: str, job: dict[str, Any]) -> None:
    log = Path(str(job.get("log") or ""))
    if log.is_file():
        shutil.copy(log, run.out / f"{cell}.log")


def refused(run: Run, cell: str, model: Path) -> dict[str, Any]:
    """The launch refused, the server started by hand and failing, and the cause that diagnose names."""
    from backends.vllm.command import ServeSpec, serve_command
    from backends.vllm.compat import version_of
    from backends.vllm.table import FLAGS, Case

    # A verdict of no has no flags: those that the family and the version would need.
    family = json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"]
    case = Case(family, version_of(run.version) or (0,), not run.args.tiny, run.args.tensor_parallel)
    flags = [word for note in FLAGS if note.applies(case) for word in note.text.split()]

    launch = run.ask("launch", *extraction(run, cell, model, 8), code=2)
    log = run.out / f"{cell}.log"
    command = serve_command(
        ServeSpec(
            python=run.args.vllm_python,
            version=run.version,
            model=str(model),
            storage=str(run.work / "by-hand"),
            layer_ids=(2, 3, 4, 5, 6, 8),
            port=8123,
            max_model_len=4097,
            tensor_parallel=run.args.tensor_parallel,
            flags=tuple(flags),
            extra_args=("--enforce-eager",),
        )
    )
    began, empty = time.monotonic(), run.work / "empty"
    empty.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=empty, env=run.env, start_new_session=True
        )
        try:
            status: int | None = server.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
    seconds = round(time.monotonic() - began, 1)
    run.note(f"the server by hand ended with {status} after {seconds} s")
    run.expect(f"the {cell} server fails, as predicted", status not in (None, 0), status)
    diagnosis = run.ask("diagnose", log, code=1)
    run.expect(f"diagnose finds why {cell} failed", bool(diagnosis.get("failed")), diagnosis)
    return {"launch": launch, "server_exit": status, "server_s": seconds, "diagnosis": diagnosis}


def compared(run: Run, model: Path) -> dict[str, Any]:
    output = run.work / "compare"
    shutil.rmtree(output, ignore_errors=True)
    extra = ["--", "--enforce-eager"] if run.args.tiny else []
    words: list[object] = [
        "--model",
        model,
        "--dataset",
        data_of(run),
        "--output",
        output,
        "--samples",
        run.args.samples,
    ]
    words += [*run.gpus, *run.parallel, "--vllm-python", run.args.vllm_python]
    found: dict[str, Any] = run.ask("compare", *words, *extra)
    for name in ("compare.json", "hf.events.jsonl", "vllm.events.jsonl"):
        if (output / name).is_file():
            shutil.copy(output / name, run.out / name)
    keep_log(run, "compare", found)
    if found["exit"] and found.get("job"):
        found["diagnosis"] = run.ask("diagnose", found["job"], code=None)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the document and the logs")
    parser.add_argument("--vllm-python", help="the Python that vLLM is in")
    parser.add_argument("--cells", default="dense,hybrid", help='comma-separated, "" for none (%(default)s)')
    parser.add_argument("--compare", action="store_true", help="hf and vLLM on the dense model")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--work", type=Path, help="where models and states are written (OUT/work)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--build", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build_into(args.build, args.tiny, args.out)
        return 0
    if not args.vllm_python:
        parser.error("name the Python that vLLM is in with --vllm-python")
    args.work = args.work or args.out / "work"
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    seen: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "cells": {}}
    for cell in filter(None, args.cells.split(",")):
        model = model_of(run, cell)
        told = predicted(run, model)
        run.version = told["vllm"].get("version", "")
        seen["vllm"] = {name: told["vllm"].get(name) for name in ("version", "torch", "transformers", "cuda")}
        says = told["vllm"].get("ok")
        found = refused(run, cell, model) if says is False else works(run, cell, model)
        if says is True:
            run.expect(f"{cell} works, as predicted", found["launch"]["exit"] == 0, found)
        seen["cells"][cell] = {"predicted": told, **found}
        (run.out / f"seen-{cell}.json").write_text(json.dumps(seen, indent=1), encoding="utf-8")
    if args.compare:
        seen["compare"] = compared(run, model_of(run, "dense"))
    seen["node"] = {key: run.ask("status").get(key) for key in ("metrics",)}
    seen["failed"] = run.failed
    text = json.dumps(seen, indent=1)
    (run.out / "seen.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
