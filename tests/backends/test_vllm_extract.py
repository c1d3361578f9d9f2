"""An extraction by vLLM: servers started, fed and ended, every file checked, against a server program that does faults at a word."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_servers import LAYERS, Bench, a_dataset, a_model, first_token

from backends.errors import Interrupted, JobError, WorkerError
from backends.plan import plan

Fault = dict[str, Any]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("inputs")
    return a_model(root / "model"), a_dataset(root / "dataset", 24)


@pytest.fixture
def bench(inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(tmp_path, *inputs, monkeypatch.setenv)


def test_every_sample_is_extracted_by_one_server_that_is_gone_afterwards(bench: Bench, events: Any) -> None:
    bench.set(seconds=0.02)
    done = bench.run(events)
    bench.check()
    assert (done["done"], done["total"], done["skipped"], done["restarts"]) == (24, 24, 0, 0)
    assert done["packing"] == "the server's own batches"
    assert done["versions"]["vllm"] == "0.32.0+cpu"
    (start,) = bench.starts()
    assert start["cwd"] == [], "a server is started in an empty folder"
    assert start["argv"][:2] == ["serve", str(bench.model)]
    assert int((bench.memory / "most-1").read_text()) <= 4, "more requests at a time than `concurrency`"
    phases = [event["phase"] for event in events.of("phase")]
    assert [phase for phase in phases if phase in ("importing vLLM", "healthy", "extracting")] == [
        "importing vLLM",
        "healthy",
        "extracting",
    ]
    ready = next(event for event in events.of("worker") if event["state"] == "ready")
    assert (ready["device"], ready["pid"]) == ("cpu", start["pid"])


def test_what_is_done_is_not_done_again_and_the_rest_is(bench: Bench, events: Any) -> None:
    bench.run(events, last=10)
    bench.check(range(10))
    before = {path.name: path.stat().st_ino for path in bench.output.glob("hs_*")}
    bench.run(events)
    bench.check()
    assert all((bench.output / name).stat().st_ino == inode for name, inode in before.items())


def test_a_stop_finishes_what_is_in_flight_and_ends_the_server(bench: Bench, events: Any) -> None:
    bench.set(seconds=0.05)
    with pytest.raises(Interrupted, match="stopped on request"):
        bench.run(events, lambda: len(list(bench.output.glob("hs_*"))) >= 3)
    files = sorted(int(path.name[3:-12]) for path in bench.output.glob("hs_*"))
    assert 3 <= len(files) < 24
    bench.set()
    bench.run(events)
    bench.check()


def test_an_old_version_writes_without_locks_to_paths_of_its_own(bench: Bench, events: Any) -> None:
    bench.is_version("0.20.1")
    bench.set(locks=False, version="0.20.1")
    bench.run(events)
    bench.check()
    extra = json.loads(bench.starts()[0]["argv"][bench.starts()[0]["argv"].index("--kv-transfer-config") + 1])
    assert extra["kv_connector_extra_config"] == {"shared_storage_path": str(bench.output / ".vllm" / "0" / "states")}


def test_what_goes_wrong_once_or_twice_is_asked_for_again(bench: Bench, events: Any) -> None:
    once: list[Fault] = [
        {"name": "lock", "seconds": 0.3},
        {"name": "status", "status": 503},
        {"name": "reset"},
        {"name": "no file"},
        {"name": "other tokens"},
        {"name": "truncated"},
        {"name": "zeros"},
    ]
    faults = [{**fault, "times": 1, "tokens": [first_token(3 * place)]} for place, fault in enumerate(once)]
    bench.set(*faults, {"name": "reset", "times": 3, "tokens": [first_token(22)]})
    done = bench.run(events)
    bench.check()
    assert (done["restarts"], done["skipped"], len(bench.starts())) == (0, 0, 1)


def test_an_answer_that_did_not_come_and_a_bad_file_are_counted_apart(bench: Bench, events: Any) -> None:
    busy = {"name": "status", "status": 503, "times": 2, "tokens": [first_token(4)]}
    bench.set(busy, {"name": "zeros", "times": 1, "tokens": [first_token(4)]})
    assert bench.run(events)["skipped"] == 0
    bench.check()


def test_a_full_queue_of_requests_is_no_stall_while_samples_come(bench: Bench, events: Any) -> None:
    """The last of those that wait in the server gets its answer long after `stall_s`, and others come meanwhile."""
    bench.set({"name": "one at a time", "seconds": 0.6})
    done = bench.run(events, stall_s=5, concurrency=12, last=12)
    bench.check(range(12))
    assert (done["restarts"], len(bench.starts())) == (0, 1)
    assert int((bench.memory / "most-1").read_text()) == 12
    assert int((bench.memory / "requests-1").read_text()) == 12, "none was asked for twice"


def test_the_command_of_the_plan_is_the_one_that_runs(bench: Bench, events: Any) -> None:
    planned = plan(bench.spec(extra_args=["--enforce-eager"]))["vllm"]["command"]
    bench.run(events, extra_args=["--enforce-eager"])
    (start,) = bench.starts()
    assert [str(start["port"]) if word == "0" else word for word in planned[3:]] == start["argv"]
    (told,) = [event["command"] for event in events.of("worker") if "command" in event]
    assert told[:3] == planned[:3]


def test_a_server_that_was_started_anew_and_delivers_nothing_yet_is_started_once_more(
    bench: Bench, events: Any
) -> None:
    bench.set(
        {"name": "ends", "status": 0, "tokens": [first_token(7)], "starts": [1]},
        {"name": "status", "status": 503, "starts": [2]},
        seconds=0.02,
    )
    done = bench.run(events)
    bench.check()
    assert (done["restarts"], len(bench.starts())) == (2, 3)


@pytest.mark.parametrize(("status", "remedy"), [(401, "VLLM_API_KEY"), (404, "serves the model under this name")])
def test_a_server_that_takes_no_sample_at_all_is_no_fault_of_a_row(
    bench: Bench, events: Any, status: int, remedy: str
) -> None:
    bench.set({"name": "status", "status": status, "words": "not here"})
    with pytest.raises(JobError, match=rf"at http://127.0.0.1:\d+ extracts nothing: {status} not here") as failure:
        bench.run(events)
    assert remedy in failure.value.remedy


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"name": "no file"}, "does not deliver: row .*it answered, and wrote no file"),
        ({"name": "reset"}, "does not deliver: row .*: (RemoteProtocolError|ReadError)"),
        ({"name": "write fails", "words": "SafetensorError('odd')"}, r"it says: SafetensorError\('odd'\)"),
    ],
    ids=["200 without a file", "reset", "a write that fails"],
)
def test_a_server_that_never_delivers_is_given_up_in_one_line(
    bench: Bench, events: Any, fault: Fault, told: str
) -> None:
    bench.set(fault)
    with pytest.raises(WorkerError, match=told) as failure:
        bench.run(events, last=2)
    assert failure.value.remedy == "see the log"
    assert len(bench.starts()) == 1
    assert not list(bench.output.glob("hs_*"))


def test_all_zero_states_end_the_job_with_what_may_mend_it(bench: Bench, events: Any) -> None:
    bench.set({"name": "zeros"})
    with pytest.raises(JobError, match=r"row .*: slot 0 is all zero") as failure:
        bench.run(events)
    assert "use another vLLM or the backend hf" in failure.value.remedy


def test_a_request_that_the_server_refuses_names_the_row_and_its_words(bench: Bench, events: Any) -> None:
    bench.set({"name": "status", "status": 400, "words": "too odd", "tokens": [first_token(5)]})
    with pytest.raises(JobError, match=r"refuses row 5 \(5 tokens\): 400 too odd"):
        bench.run(events)


def test_a_full_disk_that_vllm_only_logs_is_told_as_one(bench: Bench, events: Any) -> None:
    words = "SafetensorError('I/O error: No space left on device (os error 28)')"
    bench.set({"name": "write fails", "words": words, "tokens": [first_token(9)]})
    with pytest.raises(JobError, match=r"cannot be written: .*No space left on device.* row 9") as failure:
        bench.run(events)
    assert "free some space" in failure.value.remedy
    bench.set()
    bench.run(events)
    bench.check()


def test_a_server_that_ends_is_started_anew_and_its_samples_are_done_again(bench: Bench, events: Any) -> None:
    bench.set(
        {"name": "ends", "status": 0, "tokens": [first_token(7)], "starts": [1]},
        {"name": "ends", "status": 1, "tokens": [first_token(20)], "starts": [2], "words": "MemoryError: of no kind"},
        seconds=0.02,
    )
    done = bench.run(events)
    bench.check()
    assert (done["restarts"], len(bench.starts())) == (2, 3)
    assert [event["detail"] for event in events.of("worker") if event["state"] == "lost"] == [
        "the vLLM server ended with exit status 0",
        "the vLLM server ended with exit status 1: MemoryError: of no kind",
    ]


def test_a_server_that_stalls_with_a_good_health_is_started_anew(bench: Bench, events: Any) -> None:
    bench.set({"name": "stalls", "tokens": [first_token(7)], "starts": [1]}, {"name": "ignores SIGTERM", "starts": [1]})
    done = bench.run(events, stall_s=2)
    bench.check()
    assert (done["restarts"], len(bench.starts())) == (1, 2)
    (lost,) = [event for event in events.of("worker") if event["state"] == "lost"]
    assert "finished no sample for 2 s with" in lost["detail"]


def test_one_that_dies_each_time_is_given_up_after_the_restarts(bench: Bench, events: Any) -> None:
    bench.set({"name": "ends", "status": 0, "tokens": [first_token(7)]}, seconds=0.02)
    with pytest.raises(
        WorkerError, match=r"worker 0 was lost \(the vLLM server ended with exit status 0\) after 1 restarts"
    ):
        bench.run(events, worker_restarts=1)
    bench.set()
    bench.run(events)
    bench.check()


def test_a_server_that_cannot_start_says_why_in_its_own_words(bench: Bench, events: Any) -> None:
    words = (
        "(EngineCore pid=PID) ERROR 11-30 12:00:00 [core.py:9] ValueError: the root\n"
        "(APIServer pid=PID) RuntimeError: Engine core initialization failed. See root cause above."
    )
    bench.set({"name": "fails to start", "words": words})
    with pytest.raises(
        WorkerError, match=r"ended with exit status 1 before it was healthy: ValueError: the root: see the log$"
    ):
        bench.run(events)
    assert len(bench.starts()) == 1


def test_a_server_that_never_ends_after_its_worker_failed_is_given_up_with_the_workers_words(
    bench: Bench, events: Any
) -> None:
    words = (
        "(Worker_TP0 pid=PID) ERROR 11-30 12:00:00 [multiproc_executor.py:1007] WorkerProc hit an exception.\n"
        "(Worker_TP0 pid=PID) ERROR 11-30 12:00:00 [multiproc_executor.py:1007] RuntimeError: CUDA error: an illegal access"
    )
    bench.set({"name": "fails to start", "words": words, "seconds": 3600})
    with pytest.raises(
        WorkerError,
        match=r"hangs at its start, after a worker of it failed: RuntimeError: CUDA error: an illegal access",
    ):
        bench.run(events)
    assert len(bench.starts()) == 1


def test_arguments_that_vllm_rejects_are_told_in_its_own_words(bench: Bench, events: Any) -> None:
    with pytest.raises(JobError, match=r"ended with exit status 2 .*: unrecognized arguments: --mystery") as failure:
        bench.run(events, extra_args=["--enforce-eager", "--mystery"])
    assert failure.value.status == 2
    assert failure.value.remedy == "mend what stands after --, or see the log"


def test_a_server_that_never_gets_healthy_is_given_up(
    bench: Bench, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TUI_VLLM_START_S", "3")
    bench.set({"name": "not healthy"})
    with pytest.raises(WorkerError, match="did not become healthy within 3 s") as failure:
        bench.run(events)
    assert "DFLASH_TUI_VLLM_START_S" in failure.value.remedy


def test_a_port_that_another_program_took_meanwhile_is_changed(bench: Bench, events: Any) -> None:
    bench.set({"name": "port is taken", "starts": [1], "seconds": 1})
    try:
        bench.run(events)
    finally:
        os.kill(int((bench.memory / "other").read_text()), 9)
    bench.check()
    first, second = bench.starts()
    assert first["port"] != second["port"]


def test_processes_that_outlive_the_server_are_ended_with_it(bench: Bench, events: Any) -> None:
    bench.set({"name": "leaves a process"}, {"name": "ends", "status": 0, "tokens": [first_token(7)], "starts": [1]})
    bench.run(events)  # which looks for them
    bench.check()
    assert (bench.memory / "helper").exists()


def test_a_file_outside_of_the_servers_own_folder_is_not_touched(bench: Bench, events: Any, tmp_path: Path) -> None:
    precious = tmp_path / "precious.safetensors"
    precious.write_text("mine")
    bench.set({"name": "elsewhere", "path": str(precious)}, {"name": "no file"})
    with pytest.raises(JobError, match="which is not where it was told to write"):
        bench.run(events)
    assert precious.read_text() == "mine"


def test_a_sample_too_long_for_the_kv_cache_is_refused_by_its_row(bench: Bench, events: Any) -> None:
    bench.set(kv_tokens=8)
    with pytest.raises(JobError, match=r"row 4 has 9 tokens, .* its KV cache holds 8 tokens"):
        bench.run(events)
    assert not list(bench.output.glob("hs_*"))


def test_files_of_other_layers_than_asked_for_end_the_job(bench: Bench, events: Any) -> None:
    bench.set({"name": "layer missing"})
    with pytest.raises(JobError, match="writes 2 layers of width 64 in float32, and this job wants 3 of width 64"):
        bench.run(events)


def test_a_group_of_gpus_is_what_its_server_sees_and_each_group_has_one(
    bench: Bench, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cards are asked of the driver, and there is none here.
    monkeypatch.setattr("backends.vllm.planning.cuda_cards", lambda uuids=(): ((9, 0),) * len(uuids))
    bench.is_version("0.32.0", torch="2.13.0+cu130")
    bench.set(seconds=0.05)
    bench.run(events, gpus=["GPU-a", "GPU-b", "GPU-c", "GPU-d"], tensor_parallel=2)
    bench.check()
    starts = bench.starts()
    assert sorted(start["cuda"] for start in starts) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    assert all("--tensor-parallel-size 2" in " ".join(start["argv"]) for start in starts)
    assert len({start["port"] for start in starts}) == 2
    assert sorted({event["device"] for event in events.of("worker") if event["state"] == "ready"}) == [
        "GPU-a, GPU-b",
        "GPU-c, GPU-d",
    ]


def test_the_layers_are_those_of_the_spec(bench: Bench, events: Any) -> None:
    bench.run(events, last=1)
    argv = bench.starts()[0]["argv"]
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
