"""A vLLM server that runs already: asked what it serves, its files moved from where they lie, and left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extraction_jobs import alive, until
from fake_servers import LAYERS, Bench, a_dataset, a_model

from backends import credentials
from backends.errors import JobError, WorkerError
from backends.plan import plan
from backends.spec import SpecError
from backends.vllm.client import ServerClient
from backends.vllm.command import ServeSpec, serve_command
from backends.vllm.other import address
from backends.vllm.server import free_port


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("inputs")
    return a_model(root / "Qwen3-tiny"), a_dataset(root / "dataset", 24)


class Elsewhere(Bench):
    """A server that somebody else started, for its own folder."""

    process: subprocess.Popen[bytes] | None = None

    def serve(self, layers: tuple[int, ...] = LAYERS, **environment: str) -> str:
        self.storage = self.root / "shared"
        self.port = free_port()
        command = serve_command(
            ServeSpec(sys.executable, "0.32.0", str(self.model), str(self.storage), layers, self.port, 64, "float32")
        )
        folder = self.root / "empty"
        folder.mkdir()
        # The tests' own environment already names the package that stands for vLLM.
        self.process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment})
        client = ServerClient(self.url)
        try:
            until(client.healthy, "the server's health")
        finally:
            client.close()
        return self.url

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def bench(inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    bench = Elsewhere(tmp_path, *inputs, monkeypatch.setenv)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    try:
        yield bench
    finally:
        bench.end()


def extracted(bench: Elsewhere, events: Any, url: str, **fields: Any) -> dict[str, Any]:
    from backends.runner import extract

    return extract(bench.spec(vllm_python="", server_url=url, **fields), events, lambda: False)


def test_a_server_that_runs_already_is_used_and_left_running(bench: Elsewhere, events: Any) -> None:
    url = bench.serve()
    done = extracted(bench, events, f"{url}/v1")
    bench.check()
    assert (done["done"], done["versions"]["vllm"]) == (24, "0.32.0")
    assert bench.process is not None
    assert alive(bench.process.pid), "a server that is not ours is ended by nobody here"
    assert not list(bench.storage.iterdir()), "its files, or their locks, are left"
    warnings = [event["message"] for event in events.of("warning")]
    assert any("taken on trust" in line and str(list(LAYERS)) in line for line in warnings)
    assert len(bench.starts()) == 1


def test_a_key_that_was_sent_opens_the_server_and_is_written_nowhere(
    bench: Elsewhere, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sent-with-the-job"
    url = bench.serve(VLLM_API_KEY=key)
    with pytest.raises(JobError, match="401") as refused:
        extracted(bench, events, url, last=2)
    assert "VLLM_API_KEY of the console's environment" in refused.value.remedy
    monkeypatch.setitem(credentials._secrets, "VLLM_API_KEY", key)
    extracted(bench, events, url)
    bench.check()
    assert not [path for path in bench.root.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert key not in str(events.__dict__)


@pytest.mark.parametrize("url", ["http://me:pa55@gpu-1:8000", "http://gpu-1:8000?key=pa55", "http://pa55@gpu-1/v1"])
def test_an_address_with_a_secret_in_it_is_refused_and_not_shown(bench: Elsewhere, url: str) -> None:
    with pytest.raises(SpecError, match="VLLM_API_KEY") as unfit:
        bench.spec(server_url=url)
    with pytest.raises(JobError) as refused:
        address(url)
    assert "VLLM_API_KEY" in refused.value.remedy
    assert "pa55" not in str(unfit.value) + str(refused.value)


def test_files_on_another_file_system_are_copied_whole_and_removed(bench: Elsewhere, events: Any) -> None:
    shared = Path("/dev/shm", f"dflash-tui-test-{os.getpid()}")
    if Path("/dev/shm").stat().st_dev == bench.root.stat().st_dev:
        shared = bench.root / "same"  # one file system for all: then it is the plain case once more
    bench.root.joinpath("shared").symlink_to(shared)
    shared.mkdir()
    try:
        extracted(bench, events, bench.serve())
        bench.check()
        assert not list(shared.iterdir())
    finally:
        bench.end()
        shared.rmdir()


def test_the_plan_asks_the_server_and_says_what_it_serves(bench: Elsewhere) -> None:
    url = bench.serve()
    answer = plan(bench.spec(vllm_python="", server_url=url))
    assert (answer["ok"], answer["workers"], answer["device"]) == (True, 1, "server")
    assert answer["memory_bytes_per_worker"] is None
    vllm = answer["vllm"]
    assert (vllm["server_url"], vllm["version"], vllm["model"]) == (url, "0.32.0", str(bench.model))
    assert (vllm["max_model_len"], vllm["command"]) == (64, None)
    assert any("taken on trust" in line for line in answer["warnings"])


@pytest.mark.parametrize(
    ("settings", "fields", "told"),
    [
        ({"serves": "/models/other"}, {}, "serves /models/other, not"),
        ({"max_model_len": 6}, {}, "row 4 has 9 tokens, .* its max_model_len is 6"),
        ({"kv_tokens": 7}, {}, "row 4 has 9 tokens, .* its KV cache holds 7 tokens"),
        ({}, {"gpus": ["GPU-a"]}, "and gpus would be of one that is started"),
        ({}, {"extra_args": ["--enforce-eager"]}, "and extra_args would be"),
    ],
    ids=["another model", "max_model_len", "KV cache", "gpus", "arguments"],
)
def test_a_server_that_does_not_fit_the_job_is_refused_before_work(
    bench: Elsewhere, settings: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    bench.set(**settings)
    answer = plan(bench.spec(**{"vllm_python": "", "server_url": bench.serve(), **fields}))
    assert answer["ok"] is False
    assert re.search(told, answer["error"]), answer["error"]
    assert answer["remedy"]


def test_a_model_is_known_by_the_last_part_of_its_name(bench: Elsewhere) -> None:
    bench.set(serves="org/Qwen3-tiny")
    assert plan(bench.spec(vllm_python="", server_url=bench.serve()))["ok"] is True


def test_no_server_at_the_address_is_told_in_one_line(bench: Elsewhere, events: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(JobError, match=f"the vLLM server at {url} does not answer as one") as failure:
        extracted(bench, events, url)
    assert "start it, or mend server_url" in failure.value.remedy


@pytest.mark.parametrize("url", ["gpu-1:8000", "ftp://gpu-1:8000", "http://", "http://gpu-1:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(JobError, match="is no address of a server"):
        address(url)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://gpu-1:8000", "http://gpu-1:8000"),
        ("https://gpu-1/v1/", "https://gpu-1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_an_address_may_end_as_clients_are_given_it(given: str, meant: str) -> None:
    assert address(given) == meant


def test_other_layers_than_the_jobs_show_in_the_first_file(bench: Elsewhere, events: Any) -> None:
    with pytest.raises(JobError, match=r"writes 2 layers of width 64 .* wants 3 of width 64") as failure:
        extracted(bench, events, bench.serve((2, 8)))
    assert "eagle_aux_hidden_state_layer_ids" in failure.value.remedy


def test_a_server_whose_files_are_not_visible_here_is_told_so(bench: Elsewhere, events: Any) -> None:
    bench.set({"name": "elsewhere", "path": "/on-another-machine/hs.safetensors"}, {"name": "no file"})
    with pytest.raises(
        JobError, match=r"/on-another-machine/hs.safetensors is not visible from this machine"
    ) as failure:
        extracted(bench, events, bench.serve(), last=2)
    assert "shared" in failure.value.remedy


def test_a_server_that_goes_away_is_told_after_the_restarts(bench: Elsewhere, events: Any) -> None:
    bench.set({"name": "ends", "status": 0, "tokens": [107]}, seconds=0.02)
    with pytest.raises(WorkerError, match="was lost"):
        extracted(bench, events, bench.serve(), worker_restarts=0)
    assert bench.output.joinpath("manifest.jsonl").read_text().count("\n") >= 2


def test_files_that_are_not_the_samples_are_left_and_told_of(bench: Elsewhere, events: Any) -> None:
    bench.set({"name": "other tokens", "times": 1, "tokens": [107]})
    extracted(bench, events, bench.serve())
    bench.check()
    left = [path for path in bench.storage.iterdir() if path.suffix == ".safetensors"]
    assert len(left) == 1
    told = [event["message"] for event in events.of("warning") if "cannot be removed from here" in event["message"]]
    assert told == [f"files of the vLLM server that were not taken and cannot be removed from here: 1, {left[0]} first"]
