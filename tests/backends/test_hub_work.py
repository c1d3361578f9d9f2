"""The whole work from names: plans that download no weights, datasets, an extraction, and its verification later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.dataset import PreparedDataset
from backends.events import EventLog
from backends.prepare import prepare
from backends.spec import PrepareSpec
from backends.store import read_manifest
from tests.backends.hub_jobs import Machine
from tests.fakes.hub import Hub

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def hub(models: dict[str, Path], conversation_files: tuple[str, str]) -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/tiny", models["qwen3"])
    hub.add("org/chats", chats(conversation_files[0]), kind="datasets")
    try:
        yield hub
    finally:
        hub.close()


@pytest.fixture
def machine(tmp_path: Path, hub: Hub) -> Machine:
    return Machine(tmp_path, hub)


def lines_of(name: str) -> list[bytes]:
    return Path(name).read_bytes().splitlines(keepends=True)


def chats(name: str) -> dict[str, bytes]:
    """A dataset's repository: a split in two shards, another in one, and what is none of its rows."""
    lines = lines_of(name)
    return {
        "README.md": b"# Chats",
        "data/train-00000-of-00002.jsonl": b"".join(lines[:6]),
        "data/train-00001-of-00002.jsonl": b"".join(lines[6:10]),
        "data/test-00000-of-00001.jsonl": b"".join(lines[10:13]),
        "dataset_infos.json": b"{}",
    }


def weights_sent(hub: Hub) -> bool:
    return any(path.endswith(".safetensors") for path in hub.downloads())


def test_a_plan_says_what_is_to_be_downloaded_and_downloads_no_weights(
    machine: Machine, hub: Hub, models: dict[str, Path], dataset: Path
) -> None:
    spec = machine.spec(dataset=str(dataset), dtype="float32")
    answer = machine.plan("extract", spec)
    commit = hub.repositories["models/org/tiny"].commit
    kept = [path for path in models["qwen3"].iterdir() if path.suffix in (".json", ".safetensors", ".jinja")]
    assert answer["ok"], answer
    assert answer["hub"] == [f"org/tiny@{commit}"]
    assert (answer["download_bytes"], answer["download_files"]) == (sum(p.stat().st_size for p in kept), len(kept))
    assert answer["download_free_bytes"] > 0
    assert hub.downloads() == ["config.json"]
    local = machine.plan("extract", spec | {"model": str(models["qwen3"])})
    same = ("layer_ids", "num_layers", "family", "bytes_total", "memory_bytes_per_worker", "samples")
    assert {name: answer[name] for name in same} == {name: local[name] for name in same}
    refused = machine.plan("extract", spec | {"min_free_bytes": 1 << 60})
    assert (refused["ok"], refused["download_files"]) == (False, len(kept) - 1)
    assert "bytes of org/tiny are to be downloaded" in refused["error"]
    assert "HF_HOME" in refused["remedy"]
    missing = machine.plan("extract", spec | {"model": "org/nothing"})
    assert (missing["ok"], "has no model org/nothing" in missing["error"]) == (False, True)


def test_a_plan_of_prepare_reads_the_template_and_the_sizes_alone(machine: Machine, hub: Hub) -> None:
    spec = machine.spec("prepare", inputs=["hf://datasets/org/chats"])
    answer = machine.plan("prepare", spec)
    assert answer["ok"], answer
    assert set(hub.downloads()) <= {"config.json", "tokenizer_config.json", "chat_template.jinja"}
    files = hub.repositories["datasets/org/chats"].files
    size = sum(len(data) for path, data in files.items() if path.startswith("data/train"))
    assert (answer["inputs"], answer["input_bytes"]) == (2, size)
    assert answer["download_bytes"] > size
    hub.add("org/base", dict(hub.repositories["models/org/tiny"].files))
    base = hub.repositories["models/org/base"].files
    base.pop("chat_template.jinja", None)
    config = json.loads(base["tokenizer_config.json"])
    config.pop("chat_template", None)
    base["tokenizer_config.json"] = json.dumps(config).encode()
    jsonl = machine.folder / "chats.jsonl"
    jsonl.write_bytes(files["data/train-00000-of-00002.jsonl"])
    refused = machine.plan("prepare", spec | {"model": "org/base", "inputs": [str(jsonl)]})
    assert "has no chat template" in refused["error"]


def test_a_dataset_by_name_is_prepared_as_its_files_are(
    machine: Machine, hub: Hub, models: dict[str, Path], conversation_files: tuple[str, str]
) -> None:
    by_name = machine.spec("prepare", inputs=["hf://datasets/org/chats"], output=str(machine.folder / "by-name"))
    done = machine.run("prepare", by_name, whole=True)
    assert done.status == 0, done.err
    assert not weights_sent(hub)
    local = machine.folder / "chats.jsonl"
    local.write_bytes(b"".join(lines_of(conversation_files[0])[:10]))
    by_file = PrepareSpec(model=str(models["qwen3"]), inputs=(str(local),), output=str(machine.folder / "by-file"))
    prepare(by_file, EventLog(None), lambda: False)
    made = [PreparedDataset(machine.folder / name) for name in ("by-name", "by-file")]
    assert [list(made[0].row(i)) for i in range(len(made[0]))] == [list(made[1].row(i)) for i in range(len(made[1]))]
    assert len(made[0]) == 10


def test_splits_paths_and_formats_of_a_dataset_are_told_apart(machine: Machine, hub: Hub) -> None:
    def inputs(text: str) -> list[str]:
        done = machine.run("prepare", machine.spec("prepare", inputs=[text], model=str(machine.folder)))
        if done.status:
            return [done.line]
        return [path.rpartition("/")[2] for path in done.last["spec"]["inputs"]]

    assert inputs("hf://datasets/org/chats:test") == ["test-00000-of-00001.jsonl"]
    assert inputs("hf://datasets/org/chats/data/train-00001*") == ["train-00001-of-00002.jsonl"]
    assert len(inputs("hf://datasets/org/chats/data")) == 3
    assert "has no split 'dev'" in inputs("hf://datasets/org/chats:dev")[0]
    assert "there are: test, train" in inputs("hf://datasets/org/chats:dev")[0]
    assert "has no dev/* in Parquet or JSON" in inputs("hf://datasets/org/chats/dev/*")[0]
    assert "has no dataset org/none" in inputs("hf://datasets/org/none")[0]
    assert "is no name of a dataset" in inputs("hf://datasets/org")[0]
    hub.add("org/both", {"train.jsonl": b"{}", "train.parquet": b"x"}, kind="datasets")
    assert inputs("hf://datasets/org/both") == ["train.parquet"]


def test_an_extraction_by_name_is_verified_later_with_the_commit_that_it_was_made_of(
    machine: Machine, hub: Hub, dataset: Path
) -> None:
    spec = machine.spec(dataset=str(dataset), dtype="float32", last=4)
    done = machine.run("extract", spec, whole=True)
    assert done.status == 0, done.err
    first = hub.repositories["models/org/tiny"].commit
    header = read_manifest(machine.folder / "out").header
    assert (header["model_hub"], header["model_commit"]) == ("org/tiny", first)
    assert header["model"].endswith(f"models--org--tiny/snapshots/{first}")
    # On another machine, or once the cache was emptied: the branch has moved, the commit is the same.
    shutil.rmtree(machine.cache)
    later = hub.repositories["models/org/tiny"]
    hub.repositories["models/org/tiny"] = type(later)("models", {**later.files, "README.md": b"2"}, history=[later])
    check = {"output": str(machine.folder / "out"), "recompute": 1}
    assert machine.plan("verify", check)["download_bytes"] > 0
    verified = machine.run("verify", check, whole=True)
    assert verified.status == 0, verified.err
    assert verified.last["recomputed"] == 1
    assert (machine.cache / "models--org--tiny" / "snapshots" / first / "model.safetensors").is_file()
