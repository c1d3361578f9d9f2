"""Real extraction jobs for tests: the command as a process or with workers in this one, and what is on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backends.hf.extractor import Extractor, PackResult, Sample
from backends.plan.extract import ExtractPlan
from backends.store import Store, check_file, file_dtype, read_manifest
from backends.workers import Message, Work

MAIN = Path(__file__).parents[2] / "backends" / "__main__.py"
PATIENCE_S = 240.0


def until(holds: Callable[[], Any], what: str) -> Any:
    """Polls until something holds, and returns it. The limit is generous: a slow machine is not a fault."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = holds()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"waited {PATIENCE_S} s in vain for {what}")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def make_dataset(folder: Path, lengths: list[int], *, vocab: int = 1500, seed: int = 0) -> Path:
    """A prepared dataset of random tokens with these lengths."""
    import datasets

    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
    rows = {"input_ids": ids, "loss_mask": [[1] * length for length in lengths], "seq_len": lengths}
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(folder)
    return folder


class Job:
    """One `extract` process. `spec` fields override the defaults of the tests."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.spec = {"dtype": "float32", "min_free_bytes": 0, "pack_tokens": 256, **spec}
        self.output = Path(self.spec["output"])
        folder.mkdir(exist_ok=True, parents=True)
        self.events_path = folder / f"events-{time.monotonic_ns()}.jsonl"
        self.spec_path = self.events_path.with_suffix(".spec.json")
        self.spec_path.write_text(json.dumps(self.spec))
        self.process: subprocess.Popen[str] | None = None

    def start(self, python: str = sys.executable, preexec: Callable[[], None] | None = None, **env: str) -> Job:
        self.process = subprocess.Popen(
            [python, "-u", str(MAIN), "extract", str(self.spec_path), "--events", str(self.events_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=preexec,
        )
        return self

    def wait(self) -> int:
        assert self.process is not None
        self.stdout, self.stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    def run(self, **options: Any) -> int:
        self.start(**options)
        return self.wait()

    def kill(self) -> None:
        """The runner dies without a word."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """For a test's `finally`."""
        if self.process is not None and self.process.poll() is None:
            workers = [pid for pid in self.worker_pids() if alive(pid)]
            self.kill()
            until(lambda: not any(map(alive, workers)), "the workers' end")
        if self.process is not None:
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_bytes().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if name is None or event["event"] == name]

    def worker_pids(self) -> list[int]:
        return [event["pid"] for event in self.events("worker") if event["state"] == "starting"]

    def files(self) -> set[str]:
        return {path.name for path in self.output.glob("hs_*.safetensors")} if self.output.exists() else set()

    def until_files(self, number: int) -> None:
        """Waits until the job is in the middle."""
        assert self.process is not None
        until(lambda: len(self.files()) >= number or self.process.poll() is not None, f"{number} files")
        assert self.process.poll() is None, "the job ended before the middle"


def identities(output: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each file: both differ where a file was made again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in output.glob("hs_*.safetensors")}


def check_all_done_once(output: Path, dataset: Path, *, layers: int = 6, hidden: int = 64) -> None:
    """Every sample is listed in exactly one line and its file is whole; nothing else is in the folder."""
    from backends.dataset import PreparedDataset

    rows = PreparedDataset(dataset)
    lines = [json.loads(line) for line in (output / "manifest.jsonl").read_text().splitlines()[1:]]
    assert sorted(line["row"] for line in lines) == list(range(len(rows)))
    check_whole(output, dataset, layers=layers, hidden=hidden)
    assert {path.name for path in output.iterdir()} == {*(line["file"] for line in lines), "manifest.jsonl", ".lock"}


def check_whole(output: Path, dataset: Path, *, layers: int = 6, hidden: int = 64) -> int:
    """Every file that the manifest lists is whole. Returns how many."""
    from backends.dataset import PreparedDataset

    rows = PreparedDataset(dataset)
    manifest = read_manifest(output)
    for row, entry in manifest.entries.items():
        path = output / entry.file
        check_file(
            path, token_ids=rows.row(row)[0], layers=layers, hidden_size=hidden, dtype=file_dtype(manifest.header)
        )
        assert path.stat().st_size == entry.bytes
    return len(manifest.entries)


class InProcess:
    """Workers for tests in this process, with a real extractor: what a cluster's engine would be.

    most_tokens: a larger pack "does not fit into memory".
    """

    count = 1
    fallback = ""

    def __init__(self, plan: ExtractPlan, _store: Store, most_tokens: int = 1 << 30) -> None:
        self.extractor = Extractor.open(
            Path(plan.spec.model),
            plan.layer_ids,
            dtype=plan.spec.dtype,
            device="cpu",
            output=Path(plan.spec.output),
            float8=plan.spec.file_dtype != "same",
        )
        self.plan = plan
        self.most_tokens = most_tokens
        self.said: list[Message] = []
        self.sizes: list[int] = []

    def start(self, worker: int) -> int:
        self.said.append(
            Message(worker, "ready", {"device": "cpu", "packing": "packs", "why_not": "", "fallback": self.fallback})
        )
        self.ready = True
        return os.getpid()

    def room(self) -> bool:
        return True

    def submit(self, work: Work) -> None:
        samples = [Sample(row, self.plan.dataset.row(row)[0]) for row in work.rows]
        tokens = sum(len(sample.token_ids) for sample in samples)
        if tokens > self.most_tokens:
            self.said.append(Message(0, "oom", {"id": work.id, "message": "no room"}))
            return
        self.sizes.append(tokens)
        results: list[PackResult | BaseException] = []
        self.extractor.run(samples, results.append)
        until(lambda: results, "a pack")
        result = results[0]
        assert isinstance(result, PackResult)
        entries = [[entry.row, entry.file, entry.tokens, entry.bytes] for entry in result.entries]
        fields = {"id": work.id, "entries": entries, "bad": result.bad, "float8": result.float8_figures}
        self.said.append(Message(0, "done", fields))

    def in_flight(self) -> int:
        return len([message for message in self.said if message.event in ("done", "oom")])

    def results(self, timeout_s: float) -> list[Message]:
        said, self.said = self.said, []
        return said

    def close(self, *, at_once: bool = False) -> None:
        self.extractor.close()
