"""What is read of a vLLM server's own lines while it starts and runs, held against real logs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from backends.vllm.client import kv_tokens_of
from backends.vllm.log import PHASES, ServerLog

LOGS = Path(__file__).parents[1] / "data" / "logs"
NAMES = [name for name, _ in PHASES]


class Read:
    """A log read as it grows, a line at a time."""

    def __init__(self, folder: Path, *pieces: bytes) -> None:
        with (folder / "log").open("w+b", buffering=0) as file:
            file.write(b"ValueError: of an earlier server\n")
            self.log = ServerLog(file.fileno())
            self.phases: list[str] = []
            for piece in pieces:
                file.write(piece)
                self.log.read()
                if self.log.phase not in self.phases:
                    self.phases.append(self.log.phase)


def of_recording(name: str, folder: Path) -> Read:
    return Read(folder, *(LOGS / f"{name}.log").read_bytes().splitlines(keepends=True))


@pytest.mark.parametrize(
    ("name", "kv_tokens", "left_out"),
    [
        ("v0.20.1-h200-dense-ok", 591184, ()),
        ("v0.26.0-h200-dense-ok", 591184, ()),
        ("v0.26.0-h200-hybrid-ok-then-stopped", 1316374, ("compiling",)),
        ("v0.32.0-cpu-hybrid-ok", 155306, ("compiling",)),
    ],
)
def test_a_start_goes_through_its_phases_in_order_and_tells_its_kv_cache(
    name: str, kv_tokens: int, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    read = of_recording(name, tmp_path)
    assert read.phases == [phase for phase in NAMES if phase not in left_out]
    assert read.log.kv_tokens == kv_tokens
    assert read.log.said() == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v0.20.1-h200-no-eagle3-interface", "RuntimeError: Model does not support EAGLE3 interface"),
        ("v0.20.1-hybrid-kv-manager-off", "ValueError: Hybrid KV cache manager is disabled but failed to convert"),
        ("v0.20.1-hybrid-page-size", "The page size of the layer is not divisible"),
        ("v0.32.0-cpu-pin-memory", "RuntimeError: pin_memory=True requires a CUDA"),
        ("v0.32.0-cpu-prefix-caching", "TypeError: 'function' object is not subscriptable"),
        ("v0.32.0-cpu-killed", "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"),
    ],
)
def test_a_failed_servers_own_words_are_the_first_error_not_its_consequences(
    name: str, said: str, tmp_path: Path
) -> None:
    assert said in of_recording(name, tmp_path).log.said()


def test_a_worker_that_failed_and_a_server_that_does_not_end_is_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = of_recording("v0.26.0-two-h200-worker-hangs", tmp_path).log
    assert log.phase == "profiling, making the KV cache"
    assert "CUBLAS_STATUS_INTERNAL_ERROR when calling" in log.said()
    assert not log.hangs()  # it may still end
    monkeypatch.setattr("backends.vllm.log._ENDS_WITHIN_S", 0.0)
    assert log.hangs()
    assert not of_recording("v0.26.0-h200-dense-ok", tmp_path).log.hangs()
    log.of(0)  # another start
    assert not log.hangs()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"vllm serve: error: argument --dtype: invalid choice: 'int3'\n", "argument --dtype: invalid choice: 'int3'"),
        (b"error: unrecognized arguments: --odd 3\n", "unrecognized arguments: --odd 3"),
        (
            b"pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            b"  Value error, Invalid repository ID '/x'. [type=value_error, input_value=ArgsKwargs()]\n",
            "Invalid repository ID '/x'.",
        ),
        (
            b"subprocess.CalledProcessError: Command '['/v/bin/python', '-m', 'registry']' returned non-zero exit status 1.\n"
            b"RuntimeError: Error raised in subprocess:\nModuleNotFoundError: No module named 'torchvision'\n"
            b"pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            b"  Value error, Model architectures ['X'] failed to be inspected. Please check the logs for more details.\n",
            "ModuleNotFoundError: No module named 'torchvision'",
        ),
        (b"2026-11-30T12:00:00Z warning message=OSError: No space left on device\nbackends: ValueError: ours\n", ""),
        (b"INFO: all is well, Error: 0\n", ""),
    ],
    ids=["argparse", "argparse without a name", "pydantic", "a subprocess", "the runner's own lines", "none"],
)
def test_what_vllm_says_is_told_apart_from_what_we_say(text: bytes, said: str, tmp_path: Path) -> None:
    read = Read(tmp_path, text)
    assert read.log.said() == said
    assert read.log.failed_write() == ("", False)


def test_a_line_that_comes_in_pieces_is_one_line(tmp_path: Path) -> None:
    read = Read(tmp_path, b"(EngineCore pid=2147483647) INFO GPU KV cache si", b"ze: 1,2", b"34 tokens\r", b"\n")
    assert read.log.kv_tokens == 1234


@pytest.mark.parametrize(
    "why",
    [
        "SafetensorError('I/O error: No space left on device (os error 28)')",
        "OSError(28, 'No space left on device')",
        "OSError(122, 'Disk quota exceeded')",
    ],
)
def test_a_write_that_failed_for_want_of_room_is_known_as_such(why: str, tmp_path: Path) -> None:
    read = Read(tmp_path, f"(Worker pid=2147483647) ERROR x Hidden-states write failed for req_id=a: {why}\n".encode())
    assert read.log.failed_write() == (why, True)
    assert read.log.failed_write() == ("", False), "it is of one file"


def test_a_cache_that_found_no_room_makes_no_missing_file_a_full_disk(tmp_path: Path) -> None:
    lines = (
        b"OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache'\n",
        b"(Worker pid=2147483647) ERROR x Hidden-states write failed for req_id=a: ValueError('odd')\n",
    )
    assert Read(tmp_path, *lines).log.failed_write() == ("ValueError('odd')", False)


def test_many_threads_read_each_line_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b", buffering=0) as file:
        log = ServerLog(file.fileno())
        taken: list[str] = []
        log._take = taken.append
        written = [f"line {number} {'x' * (number % 97)}" for number in range(20_000)]
        done = threading.Event()

        def follow() -> None:
            while not done.is_set():
                log.read()

        readers = [threading.Thread(target=follow) for _ in range(9)]
        for reader in readers:
            reader.start()
        for first in range(0, len(written), 50):
            file.write("\n".join([*written[first : first + 50], ""]).encode())
        done.set()
        for reader in readers:
            reader.join()
        log.read()
    assert taken == written


def test_an_error_that_a_server_survived_is_not_what_it_died_of(tmp_path: Path) -> None:
    read = Read(tmp_path, b"ValueError: of one request\n")
    now = time.monotonic()
    read.log.survived(now + 5)
    assert read.log.said() == "ValueError: of one request", "samples that were under way still come after an error"
    read.log.survived(now + 3600)
    assert read.log.said() == ""
    with (tmp_path / "log").open("ab") as file:
        file.write(b"MemoryError: of the engine\nRuntimeError: later\n")
    read.log.read()
    assert read.log.said() == "MemoryError: of the engine"


def test_a_log_that_is_no_file_tells_nothing_and_harms_nothing() -> None:
    with Path("/dev/null").open("wb") as file:
        log = ServerLog(file.fileno())
    log.read()
    assert (log.phase, log.said()) == (NAMES[0], "")


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ({"kv_cache_size_tokens": "465920", "block_size": "128", "num_gpu_blocks": "10"}, 465920),
        ({"block_size": "16", "num_gpu_blocks": "100"}, 1600),
        ({"block_size": "16", "num_gpu_blocks": "None"}, None),
        ({}, None),
    ],
)
def test_the_kv_caches_size_is_read_from_the_metrics_of_new_and_old_versions(
    labels: dict[str, str], tokens: int | None
) -> None:
    assert kv_tokens_of(labels) == tokens
