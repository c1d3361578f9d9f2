"""Extractions with a program in vLLM's place (`tests/fakes/vllm_package`), started by the backend as it starts the real one."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backends.hsfile import read_file
from backends.runner import extract
from backends.spec import ExtractSpec
from backends.store import read_manifest
from backends.vllm.session import members

PACKAGE = Path(__file__).parents[1] / "fakes" / "vllm_package"
HIDDEN, BLOCKS, LAYERS = 64, 8, (2, 4, 8)


def first_token(row: int) -> int:
    """By which a fault tells a row."""
    return 100 + row


def ids_of(row: int) -> list[int]:
    return [first_token(row), *((row * 7 + place) % 90 + 3 for place in range(4 + row % 5))]


def a_model(folder: Path) -> Path:
    """What the backend reads of a model: its config and that there are weights."""
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "vocab_size": 2000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(4))
    return folder


def a_dataset(folder: Path, rows: int) -> Path:
    import datasets

    ids = [ids_of(row) for row in range(rows)]
    columns = {"input_ids": ids, "loss_mask": [[1] * len(row) for row in ids], "seq_len": [len(row) for row in ids]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder)
    return folder


class Bench:
    """A fake vLLM of some version, a model and a dataset; `run` extracts in this process with real workers and servers."""

    def __init__(self, root: Path, model: Path, dataset: Path, setenv: Callable[[str, str], None]) -> None:
        self.root, self.model, self.dataset = root, model, dataset
        self.setenv = setenv
        self.output = root / "out"
        self.log = root / "log"
        self.memory = root / "memory"
        self.memory.mkdir()
        self.is_version("0.32.0+cpu")
        self.set()

    def is_version(self, version: str, **beside: str) -> None:
        """What an installer writes of a vLLM of this version, and of packages beside it."""
        site = self.root / f"site-{version}"
        for name, number in {"vllm": version, **beside}.items():
            folder = site / f"{name}-{number}.dist-info"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        self.setenv("PYTHONPATH", os.pathsep.join([str(site), str(PACKAGE)]))

    def set(self, *faults: dict[str, Any], **settings: Any) -> None:
        """What the next servers do wrong."""
        self.settings = {"folder": str(self.memory), "faults": list(faults), **settings}
        self.setenv("FAKE_VLLM", json.dumps(self.settings))

    def spec(self, **fields: Any) -> ExtractSpec:
        values: dict[str, Any] = {
            "model": str(self.model),
            "dataset": str(self.dataset),
            "output": str(self.output),
            "backend": "vllm",
            "layers": list(LAYERS),
            "dtype": "float32",
            "min_free_bytes": 0,
            "concurrency": 4,
            "vllm_python": sys.executable,
            **fields,
        }
        return ExtractSpec.from_json(values)

    def run(self, events: Any, should_stop: Callable[[], bool] = lambda: False, **fields: Any) -> dict[str, Any]:
        """One extraction; what its processes print goes to `log`, as a job's does."""
        try:
            with stderr_into(self.log):
                return extract(self.spec(**fields), events, should_stop)
        finally:
            for start in self.starts():
                assert not members(start["pid"]), "processes of a server are left"
            assert not (self.output / ".vllm").exists(), "files of a server are left"

    def starts(self) -> list[dict[str, Any]]:
        """What each server found when it started."""
        path = self.memory / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check(self, rows: range | None = None, done: int | None = None) -> None:
        """Every sample is listed once, and its file holds what the server computed for its tokens; nothing else is there."""
        manifest = read_manifest(self.output)
        wanted = list(rows if rows is not None else range(24))
        assert sorted(manifest.entries) == wanted
        lines = [json.loads(line)["row"] for line in (self.output / "manifest.jsonl").read_text().splitlines()[1:]]
        assert sorted(lines) == wanted, "a row is listed twice"
        for row, entry in manifest.entries.items():
            sample = read_file(self.output / entry.file)
            ids = ids_of(row)
            assert list(sample.token_ids) == ids
            assert (self.output / entry.file).stat().st_size == entry.bytes
            expected = (
                np.asarray(ids)[:, None, None] * 0.01
                + np.asarray(LAYERS)[None, :, None]
                + np.arange(HIDDEN)[None, None, :] * 0.001
                + np.arange(len(ids))[:, None, None] * 0.5
            )
            np.testing.assert_allclose(sample.values(), expected.astype(np.float32), rtol=1e-6)
        names = {path.name for path in self.output.iterdir()}
        assert names == {*(entry.file for entry in manifest.entries.values()), "manifest.jsonl", ".lock"}


@contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """What this process's children print lands in a file, as in a job's log."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
