"""Every row of the tables of causes: what such a log looks like, and that no other row takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_tui.node.diagnose import find
from dflash_tui.node.diagnose.rules import WORDS, all_rows


def raised(line: str, file: str = "/venv/lib/python3.12/site-packages/some/module.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 5, in f\n    go()\n{line}\n'


def vllm(line: str, who: str = "EngineCore pid=7") -> str:
    """The exception as vLLM's logger writes it, with what its API server says afterwards."""
    rows = raised(line).splitlines()
    head = f"({who}) ERROR 11-30 01:25:26 [core.py:1136] "
    after = "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    server = [f"(APIServer pid=5) {row}" for row in rows[:-1]]
    return "\n".join([head + "EngineCore failed to start.", *(head + row for row in rows), *server, after]) + "\n"


READY = "(APIServer pid=5) INFO:     Application startup complete.\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
# (id, log, words that the cause or the remedy must have)
CASES = [
    ("cuda-out-of-memory-loading", vllm(OOM), "tensor parallel"),
    ("cuda-out-of-memory-running", READY + vllm(OOM), "ran out at work"),
    ("cuda-out-of-memory-loading", raised("RuntimeError: CUDA error: out of memory"), "load the model"),
    ("gpu-memory-taken", vllm("ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB)."), "holds memory"),
    ("memory-taken", vllm("ValueError: Available memory on node 0 (18.02/20.21 GiB) on startup is less than desired CPU memory utilization (0.92, 18.6 GiB)."), "smaller share"),
    ("kv-cache-too-small", vllm("ValueError: To serve at least one request with the models's max seq len (40960), (5.6 GiB KV cache is needed, which is larger than the available KV cache memory (1.2 GiB)."), "--max-model-len"),
    ("kv-cache-too-small", vllm("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"), "KV cache"),
    ("request-too-long", READY + "(APIServer pid=5) ERROR 11-30 01:25:26 [serving.py:9] This model's maximum context length is 2048 tokens. However, you requested 4000 tokens\n", "2048"),
    ("request-too-long", raised("ValueError: The decoder prompt (length 9000) is longer than the maximum model length of 8192."), "9000"),
    ("vllm-cannot-extract", raised("pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nmethod\n  Input should be 'ngram' or 'eagle' [type=literal_error, input_value='extract_hidden_states', input_type=str]").replace("\nmethod\n", "\n  method\n"), "too old"),
    ("vllm-cannot-extract", vllm("ValueError: Unsupported connector type: ExampleHiddenStatesConnector"), "0.22.0"),
    ("vllm-architecture", raised("ValueError: Model architectures ['NewForCausalLM'] are not supported for now. Supported architectures: x"), "NewForCausalLM"),
    ("vllm-takes-no-uuids", vllm("ValueError: invalid literal for int() with base 10: 'GPU-00000000-0000-4000-8000-000000000001'"), "PCI_BUS_ID"),
    ("vllm-tensor-parallel", raised("ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8)."), "28"),
    ("engine-timeout", vllm("TimeoutError: RPC call to sample_tokens timed out."), "sample_tokens"),
    ("unrecognised-arguments", "usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --no-such-flag\n", "--no-such-flag"),
    ("unrecognised-arguments", "usage: api_server.py [-h]\napi_server.py: error: argument --dtype: invalid choice: 'int3'\n", "int3"),
    ("unrecognised-arguments", "error: unrecognized arguments: --mystery\n", "--mystery"),
    ("port-in-use", "(APIServer pid=5) " + raised("OSError: [Errno 98] Address already in use").replace("\n", "\n(APIServer pid=5) "), "ss -ltnp"),
    ("port-in-use", "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use\n", "8000"),
    ("port-in-use", raised("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"), "29500"),
    ("gated-model", raised("OSError: You are trying to access a gated repo.\n  Make sure to have access to it at https://hub/meta/model.\n  403 Client Error. (Request ID: Root=1)\n  Cannot access gated repo for url https://hub/meta/model/resolve/main/config.json."), "terms"),
    ("gated-model", raised("huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model org/secret is restricted."), "org/secret"),
    ("token-refused", raised("huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url: https://hub/api/models/x (Request ID: 1). Invalid credentials in Authorization header"), "token"),
    ("hub-forbidden", raised("requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://hub/x"), "403"),
    ("hub-unreachable", raised("OSError: We couldn't connect to 'https://hub.example' to load the files, and couldn't find them in the cached files."), "mirror"),
    ("hub-unreachable", raised("socket.gaierror: [Errno -3] Temporary failure in name resolution"), "HF_ENDPOINT"),
    ("missing-model", raised("OSError: /data/nowhere is not a local folder and is not a valid model identifier listed on 'https://hub/models'"), "/data/nowhere"),
    ("missing-model", raised("OSError: /data/empty does not appear to have a file named config.json. Checkout 'https://hub//data/empty'"), "config.json"),
    ("missing-model", raised("ValueError: Invalid repository ID or local directory specified: '/data/none'."), "config.json"),
    ("missing-model", vllm("RuntimeError: Cannot find any model weights with `/data/noweights`"), "/data/noweights"),
    ("missing-tokenizer", raised("OSError: Can't load tokenizer for '/data/m'. If you were trying to load it from the hub"), "/data/m"),
    ("custom-code", raised("ValueError: The repository /data/m contains custom code which must be executed to correctly load the model."), "trust"),
    ("transformers-too-old", raised("ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers does not recognize this architecture."), "qwen9"),
    ("torchvision-misfit", raised("RuntimeError: operator torchvision::nms does not exist"), "uninstall torchvision"),
    ("missing-module", raised("ModuleNotFoundError: No module named 'flash_attn'"), "flash_attn"),
    ("missing-module", "/venv/bin/python: No module named vllm\n", "vllm"),
    ("library-misfit", raised("ImportError: /venv/lib/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab"), "_ZN3c104cuda9SetDeviceEab"),
    ("library-misfit", raised("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"), "libcudart.so.12"),
    ("broken-import", raised("ImportError: cannot import name 'AutoThing' from 'transformers' (/venv/lib/transformers/__init__.py)"), "AutoThing"),
    ("broken-import", raised("ModuleNotFoundError: Could not import module 'Qwen3ForCausalLM'. Are this object's requirements defined correctly?"), "torchvision"),
    ("damaged-weights", raised("safetensors_rust.SafetensorError: Error while deserializing header: invalid header deserialization"), "LFS"),
    ("missing-compiler", raised("RuntimeError: Failed to find C compiler. Please specify via CC environment variable."), "compiler"),
    ("missing-compiler", raised("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"), "ninja"),
    ("all-zero-states", "backends: row 7: slot 2 is all zero: extract it anew\n", "slot 2"),
    ("all-zero-states", raised("StoreError: slot 0 is all zero"), "46301"),
    ("missing-file", raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/set/state.json'"), "/data/set/state.json"),
    ("missing-program", "/bin/sh: 1: vllm: not found\n", "vllm"),
    ("missing-program", "bash: line 3: nvidia-smi: command not found\n", "nvidia-smi"),
    ("driver-too-old", raised("RuntimeError: The NVIDIA driver on your system is too old (found version 12040)."), "driver"),
    ("driver-too-old", raised("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."), "driver"),
    ("driver-too-old", "CUDA driver version is insufficient for CUDA runtime version\n", "older CUDA"),
    ("driver-mismatch", "Failed to initialize NVML: Driver/library version mismatch\n", "reboot"),
    ("gpu-not-visible", raised("RuntimeError: Found no NVIDIA driver on your system."), "nvidia-smi"),
    ("gpu-not-visible", raised("RuntimeError: Failed to infer device type"), "CUDA_VISIBLE_DEVICES"),
    ("fabric-manager", raised("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"), "fabricmanager"),
    ("kernel-misfit", raised("RuntimeError: CUDA error: no kernel image is available for execution on the device"), "architecture"),
    ("gpu-fault", raised("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "ECC"),
    ("gpu-fault", "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n", "79"),
    ("gpu-illegal-access", raised("torch.AcceleratorError: CUDA error: an illegal memory access was encountered"), "CUDA_LAUNCH_BLOCKING"),
    ("nccl", raised("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2, unhandled system error, NCCL version 2.27.3"), "NCCL_DEBUG"),
    ("nccl", vllm("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"), "NCCL"),
    ("nccl-timeout", "[rank1]:[E1130 01:25:26.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)\n", "time-out"),
    ("shared-memory-full", raised("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1f'"), "--shm-size"),
    ("disk-full", raised("OSError: [Errno 28] No space left on device: '/data/out/hs_7.safetensors'"), "/data/out/hs_7.safetensors"),
    ("disk-full", raised("safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)"), "free some space"),
    ("disk-full", "cp: error writing '/data/x': Disk quota exceeded\n", "another disk"),
    ("permission-denied", raised("PermissionError: [Errno 13] Permission denied: '/data/out'"), "/data/out"),
    ("permission-denied", "bash: /data/run.sh: Permission denied\n", "/data/run.sh"),
    ("too-many-files", raised("OSError: [Errno 24] Too many open files: '/proc/1/stat'"), "ulimit"),
    ("oom-killer", "[12.5] Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB, anon-rss:1kB\n", "4242"),
    ("host-out-of-memory", raised("RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."), "machine's memory"),
    ("host-out-of-memory", raised("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 90.0 GiB for an array"), "90.0 GiB"),
    ("cuda-in-fork", raised("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"), "spawn"),
    ("crashed", "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n  File \"/a.py\", line 3 in f\n", "Segmentation fault"),
    ("crashed", "run.sh: line 4:  812 Segmentation fault      (core dumped) vllm serve m\n", "compiled code"),
    ("killed-by-sigkill", "run.sh: line 4:  812 Killed                  vllm serve m\n", "SIGKILL"),
    ("killed-by-sigkill", raised("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  train.py FAILED\n  exitcode  : -9 (pid: 812)\n  traceback : Signal 9 (SIGKILL) received by PID 812"), "SIGKILL"),
    ("killed-by-sigkill", raised("RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed. "), "SIGKILL"),
    ("hidden-states-not-written", "(Worker pid=7) ERROR 11-30 01:41:02 [example_hidden_states_connector.py:312] Hidden-states write failed for req_id=cmpl-1-0-a: PermissionError(13, 'Permission denied')\n", "hs-connectors"),
    ("disk-full", "(Worker pid=7) ERROR 11-30 01:41:02 [example_hidden_states_connector.py:312] Hidden-states write failed for req_id=cmpl-1-0-a: SafetensorError('I/O error: No space left on device (os error 28)')\n", "free some space"),
    ("process-died", "(EngineCore pid=7) ERROR 11-30 01:41:02 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly (exit code: 1), shutting down executor.\n", "VllmWorker-1"),
    ("connection-lost", raised("ConnectionResetError: [Errno 104] Connection reset by peer"), "server"),
    ("engine-died", raised("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."), "does not show"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("id_", "log", "words"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)]
)
def test_a_known_failure_is_named_with_what_it_names(id_: str, log: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("starting\n" + log)
    found = find.diagnose(str(path))
    assert found["failed"]
    assert found["cause"]["id"] == id_
    told = json.dumps([found["cause"], found["remedy"]], ensure_ascii=False)
    assert words in told
    assert "{" not in found["cause"]["text"] + found["remedy"]
    assert found["cause"]["quote"] in (" ".join(line.split()) for line in path.read_text().splitlines())


def test_every_row_of_the_tables_has_such_a_log_and_says_where_its_words_were_seen() -> None:
    seen = {id_ for id_, _, _ in CASES}
    of_recordings = {row.id for row in all_rows() if row.known_from.startswith("recording")}
    assert {row.id for row in all_rows()} == (seen | of_recordings) - {"engine-died"}
    for row in all_rows():
        assert row.known_from and row.remedy and row.text, row.id
        assert len(row.text) + len(row.remedy) < 500, row.id


def lines_of_plain_rows() -> Iterator[tuple[str, str]]:
    plain = {row.id for row in all_rows() if row.plain}
    for id_, log, _ in CASES:
        if id_ in plain and "Traceback" not in log:
            yield id_, log


def test_a_line_that_a_row_knows_is_not_passed_over_for_want_of_a_word() -> None:
    cases = list(lines_of_plain_rows())
    assert len(cases) > 10
    for id_, log in cases:
        assert any(word in log.lower() for word in WORDS), id_


def test_what_a_harmless_line_says_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for id_, log, _ in CASES:
        if "Traceback" in log:
            said = log.splitlines()[-1]
            for head in (
                "INFO 11-30 01:25:26 [a.py:1] ",
                "WARNING:root:",
                "2026-11-30 01:25:26,123 - name - WARNING - ",
            ):
                path.write_text(f"{head}{said}\n")
                assert not find.diagnose(str(path))["failed"], (id_, head)
