"""What a vLLM server leaves behind: temporary files go with its staging folder, shared memory with its processes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from extraction_jobs import until

from backends.vllm.filing import TEMPORARY, sweep
from backends.vllm.server import Server

# As a server does: a socket by a name of its own, which stays when it ends.
LEAVER = """
import os, signal, socket, sys, tempfile
held = socket.socket(socket.AF_UNIX)
held.bind(os.path.join(tempfile.gettempdir(), "0123456789-a-name-as-long-as-a-uuid"))
open("../up", "w").close()
signal.pause()
"""

# As its queues do; and it hears of no request to end.
SHARER = """
import os, signal
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = shared_memory.SharedMemory(create=True, size=1 << 20)
with open("../draft", "w") as file:
    file.write(held.name)
os.rename("../draft", "../up")
signal.pause()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a short name, as on a node: sockets lie in it. (`tmp_path` is made before, where such folders are.)"""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def start(folder: Path) -> Server:
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    (folder / "up").unlink(missing_ok=True)
    server = Server([sys.executable, "-c", LEAVER], os.environ, folder / "empty")
    until((folder / "up").exists, "the server")
    return server


@pytest.mark.parametrize("swept", ["", "0"], ids=["the folder of all servers", "that of one"])
def test_a_servers_sockets_are_gone_once_its_folder_is_swept(temporary: Path, tmp_path: Path, swept: str) -> None:
    # So long that no socket could be bound below it.
    staging = tmp_path / ("long" * 30)
    server = start(staging / "0")
    (left,) = temporary.iterdir()
    assert any(path.is_socket() for path in left.iterdir())
    assert server.end(grace_s=10)
    sweep(staging / swept)
    assert list(temporary.iterdir()) == []
    assert not (staging / swept).exists()


def test_a_server_that_is_started_again_leaves_nothing_of_the_one_before(temporary: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert start(tmp_path / "0").end(grace_s=10)
    assert len(list(temporary.iterdir())) == 1


def test_shared_memory_of_a_server_that_had_to_be_killed_is_given_back(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "0" / "empty").mkdir(parents=True)
    server = Server([sys.executable, "-c", SHARER], os.environ, tmp_path / "0" / "empty")
    until((tmp_path / "0" / "up").exists, "the server")
    segment = Path("/dev/shm") / (tmp_path / "0" / "up").read_text()
    assert segment.exists()
    assert server.end(grace_s=0.1)
    assert not segment.exists()


def test_a_link_to_anything_else_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / ".vllm" / "0").mkdir(parents=True)
    (tmp_path / ".vllm" / "0" / TEMPORARY).symlink_to(precious)
    sweep(tmp_path / ".vllm")
    assert precious.is_dir() and not (tmp_path / ".vllm").exists()
