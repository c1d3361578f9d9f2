"""Hidden-state files and their manifest: nothing half-written ever counts as done."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.errors import JobError
from backends.hsfile import write_sample
from backends.store import Entry, Store, StoreError, check_file, read_manifest

HEADER: dict[str, Any] = {
    "manifest": 1,
    "model": "/models/tiny",
    "model_fingerprint": "aa",
    "num_layers": 8,
    "hidden_size": 16,
    "layer_ids": [2, 4, 8],
    "dtype": "bfloat16",
    "dataset": "/data/tiny",
    "dataset_fingerprint": "bb",
    "dataset_rows": 9,
    "backend": "hf",
    "created": 1.0,
}
UNSIGNED = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def tensor(tokens: int = 70, dtype: str = "bfloat16") -> torch.Tensor:
    return torch.randn(tokens, 3, 16, generator=torch.Generator().manual_seed(tokens)).to(getattr(torch, dtype))


def write(folder: Path, row: int, states: torch.Tensor, ids: list[int] | None = None) -> Entry:
    dtype = str(states.dtype).removeprefix("torch.")
    bits = states.view(torch.int16 if states.element_size() == 2 else torch.int32).numpy().view(UNSIGNED[dtype])
    ids = list(range(len(states))) if ids is None else ids
    return write_sample(folder, row, bits, np.asarray(ids), dtype=dtype, layers=3, hidden_size=16)


def check(path: Path, tokens: int = 70, dtype: str = "bfloat16") -> None:
    check_file(path, token_ids=range(tokens), layers=3, hidden_size=16, dtype=dtype)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_safetensors_reads_what_was_written_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    states = tensor(dtype=dtype)
    entry = write(tmp_path, 4, states)
    found = load_file(tmp_path / "hs_4.safetensors")
    assert set(found) == {"hidden_states", "token_ids"}
    assert torch.equal(found["hidden_states"], states)
    assert found["hidden_states"].dtype == states.dtype
    assert torch.equal(found["token_ids"], torch.arange(70, dtype=torch.int64))
    assert entry == Entry(4, "hs_4.safetensors", 70, (tmp_path / "hs_4.safetensors").stat().st_size)
    check(tmp_path / "hs_4.safetensors", dtype=dtype)


def test_a_file_that_safetensors_wrote_passes_the_check(tmp_path: Path) -> None:
    save_file({"hidden_states": tensor(), "token_ids": torch.arange(70)}, tmp_path / "hs_0.safetensors")
    check(tmp_path / "hs_0.safetensors")


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_and_named_and_nothing_is_left(
    tmp_path: Path, dtype: str, value: float
) -> None:
    states = tensor(dtype=dtype)
    states[69, 1, 15] = value
    with pytest.raises(StoreError, match="slot 1 of token 69 holds a value that is not finite"):
        write(tmp_path, 0, states)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_the_largest_finite_value_and_negative_zero_are_not_mistaken(tmp_path: Path, dtype: str) -> None:
    states = tensor(dtype=dtype)
    states[0, 0, 0] = torch.finfo(states.dtype).max
    states[0, 0, 1] = -torch.finfo(states.dtype).max
    states[5] = -0.0
    write(tmp_path, 0, states)
    states[:, 2] = -0.0
    with pytest.raises(StoreError, match="slot 2 is all zero"):
        write(tmp_path, 1, states)


def test_identical_slots_are_refused(tmp_path: Path) -> None:
    states = tensor()
    states[:, 1] = states[:, 0]
    with pytest.raises(StoreError, match="slots 0 and 1 are identical"):
        write(tmp_path, 0, states)
    states[69, 1, 3] += 1
    write(tmp_path, 0, states)


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="shape"):
        write(tmp_path, 0, tensor(), ids=[1, 2, 3])
    with pytest.raises(StoreError, match="shape"):
        write(tmp_path, 0, tensor(0))


@pytest.mark.parametrize("cut", [1, 100, 4000])
def test_a_truncated_file_fails_the_check(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 0, tensor())
    path = tmp_path / "hs_0.safetensors"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(StoreError, match=r"hs_0\.safetensors"):
        check(path)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 64, b"\2\0\0\0\0\0\0\0{}", b"\4\0\0\0\0\0\0\0null", b"hello, world"]
)
def test_garbage_fails_the_check_with_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"hs_0\.safetensors") as caught:
        check(path)
    assert "\n" not in str(caught.value)


def test_other_ids_other_dtype_and_other_layers_fail_the_check(tmp_path: Path) -> None:
    write(tmp_path, 0, tensor())
    path = tmp_path / "hs_0.safetensors"
    with pytest.raises(StoreError, match="token_ids differ"):
        check_file(path, token_ids=[*range(69), 5], layers=3, hidden_size=16, dtype="bfloat16")
    with pytest.raises(StoreError, match="holds bfloat16, not float16"):
        check(path, dtype="float16")
    with pytest.raises(StoreError, match="shape"):
        check_file(path, token_ids=range(70), layers=4, hidden_size=16, dtype="bfloat16")


def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    # A child of its own: a file size limit is the process's for good.
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); from tests.backends.test_store import write, tensor\n"
        "try: write(pathlib.Path(sys.argv[1]), 0, tensor(500))\n"
        "except OSError as error: print(error)"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), root], preexec_fn=limit, capture_output=True, text=True, timeout=120
    )
    assert "File too large" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_its_line_and_each_new_name_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(os, "fsync", noted)
    output = tmp_path / "new" / "out"
    store = Store.open(output, HEADER)
    manifest = str(output / "manifest.jsonl")
    assert sorted(synced[:2]) == [str(tmp_path), str(tmp_path / "new")]
    assert synced[2:] == [manifest, str(output)]
    synced.clear()
    entry = write(output, 0, tensor())
    assert len(synced) == 1
    assert Path(synced[0]).name.startswith(".tmp-")
    store.commit([entry])
    assert synced[1:] == [str(output), manifest]
    store.close()


def test_what_was_committed_is_listed_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path, HEADER)
    entries = [write(tmp_path, row, tensor(row + 1)) for row in range(3)]
    store.commit(entries[:1])
    store.commit(entries[1:])
    store.close()
    manifest = read_manifest(tmp_path)
    assert manifest.header == HEADER
    assert list(manifest.entries.values()) == entries
    again = Store.open(tmp_path, {**HEADER, "created": 2.0, "model": "/moved/tiny"})
    assert again.listed == manifest.entries
    assert again.stray == []
    again.close()
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "torn", [b'{"row":1,"file":"hs_1', b'{"row":1,"file":"hs_1.safetensors","tokens":2,"bytes":9}']
)
def test_a_torn_last_line_is_cut_off_and_its_file_is_a_stray(tmp_path: Path, torn: bytes) -> None:
    store = Store.open(tmp_path, HEADER)
    store.commit([write(tmp_path, 0, tensor())])
    write(tmp_path, 1, tensor())
    store.close()
    path = tmp_path / "manifest.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert set(read_manifest(tmp_path).entries) == {0}
    again = Store.open(tmp_path, HEADER)
    assert set(again.listed) == {0}
    assert again.stray == [1]
    again.close()
    assert path.read_bytes() == whole


def test_a_torn_header_starts_the_manifest_anew(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_bytes(b'{"manifest":1,"mod')
    Store.open(tmp_path, HEADER).close()
    assert read_manifest(tmp_path).header == HEADER


def test_a_line_that_is_no_entry_is_refused_with_its_number(tmp_path: Path) -> None:
    store = Store.open(tmp_path, HEADER)
    store.commit([write(tmp_path, 0, tensor())])
    store.close()
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(path.read_bytes() + b"rubbish\n")
    with pytest.raises(StoreError, match="line 3 of"):
        read_manifest(tmp_path)
    with pytest.raises(JobError, match="line 3 of"):
        Store.open(tmp_path, HEADER)


def test_listed_files_that_are_missing_or_of_another_size_are_to_be_made_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path, HEADER)
    store.commit([write(tmp_path, row, tensor()) for row in range(3)])
    store.close()
    (tmp_path / "hs_0.safetensors").unlink()
    os.truncate(tmp_path / "hs_1.safetensors", 100)
    again = Store.open(tmp_path, HEADER)
    assert set(again.listed) == {2}
    again.close()


def test_leftovers_of_a_killed_job_are_swept(tmp_path: Path) -> None:
    Store.open(tmp_path, HEADER).close()
    (tmp_path / ".tmp-12-34-0-hs_3.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    Store.open(tmp_path, HEADER).close()
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.jsonl", ".lock", "notes.txt"}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("layer_ids", [2, 8], r"layers: \[2, 4, 8\] there, \[2, 8\] here"),
        ("dtype", "float32", "dtype: bfloat16 there, float32 here"),
        ("model_fingerprint", "cc", "model: /models/tiny there"),
        ("dataset_fingerprint", "cc", "dataset: /data/tiny there"),
    ],
)
def test_a_folder_of_other_states_is_refused_naming_the_difference(
    tmp_path: Path, field: str, value: Any, says: str
) -> None:
    store = Store.open(tmp_path, HEADER)
    store.commit([write(tmp_path, 0, tensor())])
    store.close()
    before = (tmp_path / "manifest.jsonl").read_bytes()
    with pytest.raises(JobError, match=says) as caught:
        Store.open(tmp_path, {**HEADER, field: value})
    assert caught.value.remedy == "give another output folder"
    assert (tmp_path / "manifest.jsonl").read_bytes() == before
    Store.open(tmp_path, HEADER).close()


def test_a_header_under_which_nothing_was_written_binds_nobody(tmp_path: Path) -> None:
    Store.open(tmp_path, HEADER).close()
    Store.open(tmp_path, {**HEADER, "dtype": "float32"}).close()
    assert read_manifest(tmp_path).header["dtype"] == "float32"


def test_files_without_a_manifest_are_refused_and_not_adopted(tmp_path: Path) -> None:
    write(tmp_path, 0, tensor())
    with pytest.raises(JobError, match=r"1 hidden-state files but no manifest\.jsonl"):
        Store.open(tmp_path, HEADER)


def test_a_second_job_on_one_folder_is_refused_naming_the_first(tmp_path: Path) -> None:
    store = Store.open(tmp_path, HEADER)
    with pytest.raises(JobError, match=rf"another job \(pid {os.getpid()}\)"):
        Store.open(tmp_path, HEADER)
    store.close()
    Store.open(tmp_path, HEADER).close()


def test_the_lock_of_a_dead_runner_is_waited_for_until_its_last_worker_is_gone(tmp_path: Path) -> None:
    # The holder keeps the lock, but the pid in it is of a process that has ended.
    code = (
        "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0); f.write(str(pid)); f.flush(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(JobError, match="another job"):
            Store.open(tmp_path, HEADER, patience_s=0.2)
        holder.stdin.close()
        Store.open(tmp_path, HEADER, patience_s=60).close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="cannot be written"):
        Store.open(tmp_path / "file" / "out", HEADER)


def test_a_missing_and_an_empty_manifest_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has no manifest\.jsonl"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.jsonl").write_bytes(b"")
    with pytest.raises(StoreError, match="empty"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.jsonl").write_text(json.dumps({**HEADER, "manifest": 7}) + "\n")
    with pytest.raises(StoreError, match="version 7"):
        read_manifest(tmp_path)
