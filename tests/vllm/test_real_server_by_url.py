"""A vLLM server that somebody else runs: its states are taken, and it is left as it was."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends.vllm.command import ServeSpec, serve_command
from backends.vllm.found import find_vllm
from backends.vllm.server import free_port
from backends.vllm.session import end_session
from tests.vllm.real_node import EAGER, ENVIRONMENT, LAYERS, Site, poll


@dataclass(frozen=True, slots=True)
class Theirs:
    url: str
    storage: Path
    process: subprocess.Popen[bytes]

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="module")
def theirs(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theirs]:
    """Started by hand, as the documentation of vLLM says."""
    folder = tmp_path_factory.mktemp("theirs")
    found, port = find_vllm(site.python), free_port()
    (folder / "empty").mkdir()
    spec = ServeSpec(
        python=found.python,
        version=found.version,
        model=site.data.dense,
        storage=str(folder / "states"),
        layer_ids=tuple(LAYERS),
        port=port,
        max_model_len=2048,
        flags=("--no-enable-prefix-caching",),
        extra_args=tuple(EAGER),
    )
    temporary = tempfile.mkdtemp()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            serve_command(spec),
            env={**site.env, **ENVIRONMENT, "TMPDIR": temporary},
            cwd=folder / "empty",
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Theirs(f"http://127.0.0.1:{port}", folder / "states", process)
    try:
        poll(lambda: server.healthy() or process.poll() is not None, "the server to be healthy")
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        yield server
    finally:
        end_session(process.pid, grace_s=20)
        process.wait()
        shutil.rmtree(temporary)


def test_a_server_by_its_address_gives_the_states_and_goes_on(site: Site, theirs: Theirs) -> None:
    job = site.extract("url", site.data.dense, site.data.conversations, server_url=theirs.url, last=48)
    assert job.wait("done")["result"]["done"] == 48
    job.nothing_is_left()
    assert site.verify(job, recompute=1)["verified"] == 48
    assert theirs.healthy()
    assert list(theirs.storage.iterdir()) == []


def test_a_server_of_another_model_or_of_other_layers_is_refused_before_anything_is_kept(
    site: Site, theirs: Theirs
) -> None:
    other = site.extract("url-other", site.data.hybrid, site.data.conversations, server_url=theirs.url, last=4)
    reason = other.wait("failed")["reason"]
    assert f"serves {site.data.dense}" in reason and f"not {site.data.hybrid}" in reason
    layers = site.extract(
        "url-ids", site.data.dense, site.data.conversations, server_url=theirs.url, last=4, layers=[2, 8]
    )
    reason = layers.wait("failed")["reason"]
    assert "writes 6 layers" in reason and "wants 2 of" in reason
    assert other.files() == layers.files() == 0
    assert theirs.healthy()


def test_a_stop_leaves_the_server_alone(site: Site, theirs: Theirs) -> None:
    job = site.extract("url-stop", site.data.dense, site.data.conversations, server_url=theirs.url, concurrency=4)
    job.until_written(4)
    site.agent.ask("stop", job=job.id)
    record = job.wait("interrupted")
    assert (record["exit"], record["killed_processes"]) == ({"code": 3, "signal": None}, 0)
    job.nothing_is_left()
    assert 0 < site.verify(job)["verified"] < site.data.samples
    assert theirs.healthy()


def test_a_server_that_nobody_runs_any_more_is_told_by_its_address(site: Site) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    job = site.extract("url-gone", site.data.dense, site.data.conversations, server_url=gone, last=4)
    reason = job.wait("failed")["reason"]
    assert gone in reason
