"""Which of the files that a vLLM server names are taken, which are removed, and which are left as they are."""

from __future__ import annotations

import errno
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extraction_jobs import until

from backends.hsfile import Entry, StoreError
from backends.store import check_sample
from backends.vllm import filing
from backends.vllm.client import ServerClient
from backends.vllm.feeding import Feeder, Sample
from backends.vllm.filing import Filer, NotThere, sweep

HEADER = {"layer_ids": [2, 4], "hidden_size": 32, "dtype": "float32"}
IDS = [5, 6, 7]


def a_file(path: Path, ids: list[int] = IDS) -> Path:
    """A whole file of a sample, as a server writes it, and the lock beside it."""
    values = np.random.default_rng(0).standard_normal((len(ids), 2, 32)).astype(np.float32)
    parts = {"hidden_states": ("F32", values), "token_ids": ("I64", np.asarray(ids, np.int64))}
    header, data = {}, b""
    for name, (kind, array) in parts.items():
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    head = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    path.with_name(path.name + ".lock").touch()
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def filer(output: Path, storage: Path | None = None) -> Filer:
    return Filer(output, HEADER, storage=storage, appear_s=0.1, lock_s=5.0)


def never() -> bool:
    return False


def test_another_servers_file_of_the_sample_is_taken_with_its_lock(output: Path, tmp_path: Path) -> None:
    path = a_file(tmp_path / "shared" / "cmpl-1.safetensors")
    its = filer(output)
    assert its.refusal(str(path)) == ""
    assert its.take(3, IDS, path, never) == Entry(
        3, "hs_3.safetensors", 3, (output / "hs_3.safetensors").stat().st_size
    )
    assert not list(path.parent.iterdir())
    assert its.left == []


@pytest.mark.parametrize("kind", ["text", "other tokens", "link", "folder"])
def test_nothing_that_another_server_names_is_removed_unless_it_is_the_sample(
    output: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "precious.safetensors"
    if kind == "text":
        path.write_text("mine")
    elif kind == "other tokens":
        a_file(path, [1, 2, 3, 4])
    elif kind == "link":
        path.symlink_to(a_file(tmp_path / "real.safetensors"))
    else:
        path.mkdir()
    path.with_name(path.name + ".lock").write_text("mine, too")
    its = filer(output)
    with pytest.raises((StoreError, NotThere)):
        its.take(3, IDS, path, never)
    assert path.exists() and path.with_name(path.name + ".lock").read_text() == "mine, too"
    assert its.left == [path], "what is left is told"
    assert not list(output.iterdir())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/home/me/.ssh/id_ed25519", "which is no *.safetensors"),
        ("notes.safetensors", "which is no whole path"),
        ("/a\0.safetensors", "which is no whole path"),
        ("/\ud800.safetensors", "which is no name of a file"),
        ("{output}/hs_7.safetensors", "which is in the job's own output folder"),
        ("{output}/../out/hs_7.safetensors", "which is in the job's own output folder"),
    ],
)
def test_what_another_servers_answer_cannot_be_is_refused_unseen(output: Path, name: str, why: str) -> None:
    assert filer(output).refusal(name.format(output=output)) == why


def test_a_file_of_our_own_server_that_is_no_good_is_removed(output: Path, tmp_path: Path) -> None:
    path = a_file(tmp_path / "states" / "x.safetensors", [1, 2, 3, 4])
    its = filer(output, path.parent)
    with pytest.raises(StoreError):
        its.take(3, IDS, path, never)
    assert not list(path.parent.iterdir())
    assert its.refusal(str(tmp_path / "x.safetensors")) == "which is not where it was told to write"


def test_a_file_that_is_swept_while_it_is_checked_is_not_there_and_the_disk_is_not_full(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_file(tmp_path / "states" / "x.safetensors")

    def swept(*given: Any) -> None:
        check_sample(*given)
        sweep(path.parent)

    monkeypatch.setattr(filing, "check_sample", swept)
    with pytest.raises(NotThere):
        filer(output, path.parent).take(3, IDS, path, never)


class Slow(Filer):
    """Fails as a disk does, once it may."""

    def __init__(self, output: Path) -> None:
        super().__init__(output, HEADER, storage=None, appear_s=0.1, lock_s=5.0)
        self.begun, self.go = threading.Event(), threading.Event()

    def take(self, *_given: Any) -> Entry:
        self.begun.set()
        self.go.wait()
        raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def client() -> Iterator[ServerClient]:
    client = ServerClient("http://127.0.0.1:9")
    yield client
    client.close()


def test_what_fails_after_the_server_is_given_up_is_told_to_nobody_and_waited_for(
    output: Path, client: ServerClient
) -> None:
    told: list[str] = []
    slow = Slow(output)
    feeder = Feeder(
        client, slow, model="m", shape=(2, 32), dtype="float32", bytes_per_token=8, output=output, direct=None,
        concurrency=1, tell=lambda event, **_: told.append(event), explain=lambda: ("", False),
    )  # fmt: skip
    feeder._answered.put(Sample(0, 3, IDS, path=output / "x.safetensors"))
    until(slow.begun.is_set, "the file")
    closing = threading.Thread(target=feeder.close)
    closing.start()
    until(feeder._stop.is_set, "the end")
    assert closing.is_alive(), "the file is waited for"
    slow.go.set()
    closing.join()
    assert told == []
    assert not [thread for thread in feeder._threads if thread.name.startswith("file") and thread.is_alive()]
