"""What the runner does with packs that do not fit, states that are not finite, and several workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from extraction_jobs import InProcess, alive, check_all_done_once, check_whole, make_dataset
from safetensors.torch import load_file, save_file

from backends.errors import Interrupted, JobError, WorkerError
from backends.hf.extractor import Extractor, is_out_of_memory
from backends.plan.extract import ExtractPlan
from backends.progress import Progress
from backends.recompute import PlainForward
from backends.runner import extract
from backends.spec import ExtractSpec
from backends.store import Entry, Store, read_manifest
from backends.workers import LocalWorkers, usable_cores

# A token that neither the random datasets nor the proof at start use.
RARE = 1999


def spec_of(model: Path, dataset: Path, output: Path, **fields: Any) -> ExtractSpec:
    defaults: dict[str, Any] = {"dtype": "float32", "min_free_bytes": 0, "pack_tokens": 256}
    return ExtractSpec(model=str(model), dataset=str(dataset), output=str(output), **{**defaults, **fields})


def never() -> bool:
    return False


@pytest.fixture
def some(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "some", [10 + row for row in range(40)])


@pytest.fixture
def broken_for_one_token(models: dict[str, Path], tmp_path: Path) -> Path:
    """A model whose embedding of RARE is not finite."""
    folder = tmp_path / "broken"
    shutil.copytree(models["qwen3"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][RARE] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_rare_token(folder: Path, rows: Sequence[int], total: int) -> Path:
    import datasets

    ids = [[3 + (row + place) % 900 for place in range(6)] for row in range(total)]
    for row in rows:
        ids[row][2] = RARE
    columns = {"input_ids": ids, "loss_mask": [[1] * 6] * total, "seq_len": [6] * total}
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    return folder


def test_a_pack_that_does_not_fit_into_memory_comes_again_in_halves(
    models: dict[str, Path], some: Path, tmp_path: Path, events: Any
) -> None:
    made: list[InProcess] = []

    def make(plan: ExtractPlan, store: Store) -> InProcess:
        made.append(InProcess(plan, store, most_tokens=100))
        return made[-1]

    done = extract(spec_of(models["qwen3"], some, tmp_path / "out"), events, never, make_workers=make)
    assert done["done"] == 40
    assert max(made[0].sizes) <= 100
    assert any("does not fit into memory and is split" in warning["message"] for warning in events.of("warning"))
    check_all_done_once(tmp_path / "out", some)


def test_what_is_written_by_the_time_of_a_commit_is_committed_together(
    models: dict[str, Path], some: Path, tmp_path: Path, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    commit = Store.commit

    def noted(store: Store, entries: Iterable[Entry]) -> None:
        added = list(entries)
        commits.append(len(added))
        commit(store, added)

    monkeypatch.setattr(Store, "commit", noted)
    made: list[InProcess] = []

    def make(plan: ExtractPlan, store: Store) -> InProcess:
        made.append(InProcess(plan, store, most_tokens=10_000))
        return made[-1]

    extract(spec_of(models["qwen3"], some, tmp_path / "out", pack_tokens=100), events, never, make_workers=make)
    # These workers answer every pack before anybody listens.
    assert len(made[0].sizes) > 5
    assert [number for number in commits if number] == [40]
    check_all_done_once(tmp_path / "out", some)


def test_a_stop_that_comes_when_everything_is_done_is_no_interruption(
    models: dict[str, Path], some: Path, tmp_path: Path, events: Any
) -> None:
    def once_all_is_handed_out() -> bool:
        return bool(made and made[0].sizes)

    made: list[InProcess] = []

    def make(plan: ExtractPlan, store: Store) -> InProcess:
        made.append(InProcess(plan, store, most_tokens=10_000))
        return made[-1]

    done = extract(spec_of(models["qwen3"], some, tmp_path / "out"), events, once_all_is_handed_out, make_workers=make)
    assert (done["done"], done["total"]) == (40, 40)


def test_cores_are_those_of_the_affinity_or_fewer_by_the_containers_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == cores
    for text, found in (("max 100000", cores), ("50000 100000", 1), ("99900000 100000", cores)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert usable_cores(tmp_path) == found


def test_one_sample_that_does_not_fit_into_memory_ends_the_job_naming_the_row(
    models: dict[str, Path], some: Path, tmp_path: Path, events: Any
) -> None:
    with pytest.raises(JobError, match=r"row 39 \(49 tokens\) does not fit into memory: no room"):
        extract(
            spec_of(models["qwen3"], some, tmp_path / "out"),
            events,
            never,
            make_workers=lambda plan, store: InProcess(plan, store, most_tokens=48),
        )


def test_kernels_that_do_not_work_are_told_once(models: dict[str, Path], tmp_path: Path, events: Any) -> None:
    class Slow(InProcess):
        fallback = "not kernels 1.0: ptxas is missing"

    extract(
        spec_of(models["qwen3"], make_dataset(tmp_path / "data", [5, 9]), tmp_path / "out"),
        events,
        never,
        make_workers=Slow,
    )
    (warning,) = events.of("warning")
    assert warning["message"] == "gated delta nets by PyTorch, which is slower: not kernels 1.0: ptxas is missing"


def test_torchs_own_error_is_known_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_one_sample_in_two_hundred_that_is_not_finite_is_skipped_and_spoils_no_other_of_its_pack(
    broken_for_one_token: Path, tmp_path: Path, events: Any
) -> None:
    dataset = with_rare_token(tmp_path / "data", [77], 200)
    spec = spec_of(broken_for_one_token, dataset, tmp_path / "out")
    done = extract(spec, events, never, make_workers=InProcess)
    assert (done["done"], done["skipped"], done["total"]) == (199, 1, 200)
    messages = [warning["message"] for warning in events.of("warning")]
    assert messages == ["row 77 is skipped: slot 0 of token 0 holds a value that is not finite", done["message"]]
    assert done["message"].startswith("1 of 200 samples have no file, row 77 first (slot 0 of token 0 holds")
    assert done["skipped_rows"] == [77]
    assert set(read_manifest(tmp_path / "out").entries) == set(range(200)) - {77}
    assert check_whole(tmp_path / "out", dataset) == 199
    assert not (tmp_path / "out" / "hs_77.safetensors").exists()


def test_more_than_one_in_a_hundred_that_are_not_finite_end_the_job(
    broken_for_one_token: Path, tmp_path: Path, events: Any
) -> None:
    dataset = with_rare_token(tmp_path / "data", [0, 3], 40)
    spec = spec_of(broken_for_one_token, dataset, tmp_path / "out")
    with pytest.raises(JobError, match=r"row \d: slot 0 of token 0 holds a value that is not finite"):
        extract(spec, events, never, make_workers=InProcess)


def test_token_ids_outside_the_vocabulary_end_the_job_naming_the_rows(
    models: dict[str, Path], tmp_path: Path, events: Any
) -> None:
    dataset = make_dataset(tmp_path / "data", [30] * 3, vocab=90_000)
    with pytest.raises(JobError, match=r"rows 0 to 2: token id \d+ is outside the model's vocabulary of \d+"):
        extract(spec_of(models["qwen3"], dataset, tmp_path / "out"), events, never)


BLOCK = "model.layers.3.mlp.down_proj"
MISFITS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a tensor is missing": (lambda w: w.pop(f"{BLOCK}.weight"), "lack 1 tensors"),
    "a tensor has another shape": (
        lambda w: w.update({f"{BLOCK}.weight": torch.ones(64, 7)}),
        "have another shape than config.json says in 1",
    ),
    "a bias that the config does not know": (lambda w: w.update({f"{BLOCK}.bias": torch.ones(64)}), "hold, unknown to"),
    "a block that the config does not know": (
        lambda w: w.update({"model.layers.8.mlp.down_proj.weight": torch.ones(64, 192)}),
        "hold, unknown to",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_are_not_those_of_the_config_are_refused_by_backend_and_reference(
    misfit: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["llama"], folder)
    weights = load_file(folder / "model.safetensors")
    change, words = MISFITS[misfit]
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match=rf"{words}.*layers\.\d\.mlp\.down_proj"):
        Extractor.open(folder, (2, 8), dtype="float32", device="cpu", output=tmp_path)
    with pytest.raises(JobError, match=r"differ in 1 tensors, such as .*layers\.\d\.mlp\.down_proj"):
        PlainForward(folder)


def test_weights_that_came_half_are_refused_in_one_line_by_backend_and_reference(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    os.truncate(folder / "model.safetensors", 100_000)
    with pytest.raises(JobError, match=r"cannot be loaded: .*: fetch model\.safetensors again"):
        Extractor.open(folder, (2, 8), dtype="float32", device="cpu", output=tmp_path)
    with pytest.raises(JobError, match=r"cannot be loaded: .*: see that its weights are whole"):
        PlainForward(folder)


def test_two_workers_share_one_queue_and_one_of_them_may_die(
    models: dict[str, Path], tmp_path: Path, events: Any
) -> None:
    dataset = make_dataset(tmp_path / "data", [16 + row % 40 for row in range(300)])
    output = tmp_path / "out"
    killed: list[int] = []

    def make(plan: ExtractPlan, store: Store) -> LocalWorkers:
        order = {"spec": plan.spec.to_json(), "layer_ids": list(plan.layer_ids), "device": "cpu"}
        return LocalWorkers(order, [[""], [""]], most=2, keep_open=[store.lock_fd])

    def kill_one() -> bool:
        ready = [event["worker"] for event in events.of("worker") if event["state"] == "ready"]
        if not killed and len(set(ready)) == 2 and len(list(output.glob("hs_*"))) >= 10:
            pid = next(event["pid"] for event in events.of("worker") if event.get("pid") and event["worker"] == 1)
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return False

    done = extract(spec_of(models["qwen3"], dataset, output, pack_tokens=64), events, kill_one, make_workers=make)
    assert done["done"] == 300
    check_all_done_once(output, dataset)
    pids = [event["pid"] for event in events.of("worker") if event["state"] == "starting"]
    assert not any(map(alive, pids))
    # A fast machine may be done before the second worker is ready; then there was nobody to kill.
    assert [event["worker"] for event in events.of("worker") if event["state"] == "lost"] == [1] * len(killed)


def test_a_model_that_cannot_be_loaded_is_one_line_and_no_restart(
    models: dict[str, Path], some: Path, tmp_path: Path, events: Any
) -> None:
    folder = tmp_path / "garbled"
    shutil.copytree(models["qwen3"], folder)
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises((JobError, WorkerError)) as caught:
        extract(spec_of(folder, some, tmp_path / "out"), events, never)
    assert "\n" not in caught.value.message
    assert [event["state"] for event in events.of("worker")].count("starting") == 1


def test_a_stop_before_the_first_pack_is_an_interruption(
    models: dict[str, Path], some: Path, tmp_path: Path, events: Any
) -> None:
    with pytest.raises(Interrupted) as caught:
        extract(spec_of(models["qwen3"], some, tmp_path / "out"), events, lambda: True)
    assert (caught.value.done, caught.value.total) == (0, 40)


def test_progress_is_told_at_once_and_then_once_a_second_with_rates_of_this_run(events: Any) -> None:
    now = [100.0]
    progress = Progress(events, total=50, already_done=10, clock=lambda: now[0])
    progress.tell()
    assert events.of("progress")[0]["eta_s"] is None
    now[0] = 102.0
    progress.begin()
    progress.add(samples=5, tokens=500, nbytes=4000)
    for _ in range(12):
        now[0] += 0.25
        progress.tell()
    told = events.of("progress")[1:]
    assert len(told) == 3
    assert told[-1] | {"t": 0} == {
        "t": 0,
        "done": 15,
        "total": 50,
        "skipped": 0,
        "tokens": 500,
        "bytes": 4000,
        "elapsed_s": told[-1]["elapsed_s"],
        "phase": "",
        "samples_per_s": round(5 / told[-1]["elapsed_s"], 3),
        "tokens_per_s": round(500 / told[-1]["elapsed_s"], 1),
        "bytes_per_s": round(4000 / told[-1]["elapsed_s"], 1),
        "eta_s": round(35 * told[-1]["elapsed_s"] / 5, 1),
    }
    assert json.dumps(told)
