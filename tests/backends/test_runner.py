"""Real extraction jobs that are killed, stopped and starved: no sample is lost, none is done twice."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from extraction_jobs import Job, alive, check_all_done_once, check_whole, identities, make_dataset, until

from backends.store import read_manifest

SAMPLES = 400


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough samples that a job has a middle."""
    return make_dataset(tmp_path_factory.mktemp("many") / "data", [16 + (7 * row) % 40 for row in range(SAMPLES)])


@pytest.fixture
def job(models: dict[str, Path], many: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**spec: Any) -> Job:
        defaults = {"model": str(models["qwen3"]), "dataset": str(many), "output": str(tmp_path / "out")}
        jobs.append(Job(tmp_path / "job", **{**defaults, **spec}))
        return jobs[-1]

    yield make
    for made in jobs:
        made.end()


def test_a_job_writes_every_sample_once_and_its_last_event_says_finished(
    job: Callable[..., Job], models: dict[str, Path], dataset: Path
) -> None:
    done = job(model=str(models["llama"]), dataset=str(dataset), dtype="bfloat16")
    assert done.run() == 0, done.stderr
    check_all_done_once(done.output, dataset)
    samples = len(done.files())
    started, last = done.events("started")[0], done.events()[-1]
    assert started["verb"] == "extract"
    assert (started["total"], started["already_done"], started["hidden_size"]) == (samples, 0, 64)
    assert started["layer_ids"] == [2, 3, 4, 5, 6, 8]
    assert started["bytes_per_token"] == 6 * 64 * 2 + 8
    assert last["event"] == "finished"
    assert (last["done"], last["total"], last["packing"]) == (samples, samples, "packs")
    assert last["bytes"] == sum((done.output / name).stat().st_size for name in done.files())
    states = [event["state"] for event in done.events("worker")]
    assert states == ["starting", "ready", "ended"]
    progress = done.events("progress")[-1]
    assert progress["done"] == samples
    assert progress["samples_per_s"] > 0
    header = read_manifest(done.output).header
    assert header["dtype"] == "bfloat16"
    assert header["dataset_rows"] == samples

    before = identities(done.output)
    again = job(model=str(models["llama"]), dataset=str(dataset), dtype="bfloat16")
    assert again.run() == 0
    assert again.events("started")[0]["already_done"] == samples
    assert again.events("worker") == []
    assert identities(done.output) == before
    check_all_done_once(done.output, dataset)


def test_a_worker_killed_in_the_middle_is_replaced_and_nothing_is_lost_or_done_twice(
    job: Callable[..., Job], many: Path
) -> None:
    running = job().start()
    running.until_files(20)
    before = identities(running.output)
    os.kill(running.worker_pids()[0], signal.SIGKILL)
    assert running.wait() == 0, running.stderr
    check_all_done_once(running.output, many)
    lost = [event for event in running.events("worker") if event["state"] == "lost"]
    assert len(lost) == 1
    assert lost[0]["detail"] == "killed by signal 9"
    assert len(running.worker_pids()) == 2
    after = identities(running.output)
    assert {name: after[name] for name in before} == before
    assert running.events()[-1]["done"] == SAMPLES


def test_sigterm_drains_and_commits_and_a_killed_runner_loses_nothing_and_the_job_goes_on_after_both(
    job: Callable[..., Job], many: Path
) -> None:
    running = job().start()
    running.until_files(20)
    assert running.process is not None
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 3
    last = running.events()[-1]
    assert last["event"] == "interrupted"
    assert 20 <= last["done"] < last["total"] == SAMPLES
    # What has a final name is listed, and nothing is half-written.
    assert len(running.files()) == check_whole(running.output, many) == last["done"]
    assert list(running.output.glob(".tmp-*")) == []
    assert not any(map(alive, running.worker_pids()))
    before = identities(running.output)

    killed = job().start()
    killed.until_files(len(before) + 20)
    worker = killed.worker_pids()[0]
    killed.kill()
    until(lambda: not alive(worker), "the end of a worker whose runner is gone")
    more = identities(running.output)
    assert len(before) < len(more) < SAMPLES
    listed = check_whole(running.output, many)
    assert len(before) < listed <= len(more)

    resumed = job()
    assert resumed.run() == 0, resumed.stderr
    check_all_done_once(running.output, many)
    after = identities(running.output)
    assert {name: after[name] for name in before} == before
    assert {name: after[name] for name in more} == more
    started, last = resumed.events("started")[0], resumed.events()[-1]
    assert started["already_done"] == len(more)
    # Samples count from the first run on, tokens and bytes from this one.
    made = [(running.output / name).stat().st_size for name in after.keys() - more.keys()]
    assert (last["done"], last["total"], last["bytes"]) == (SAMPLES, SAMPLES, sum(made))


def test_a_job_resumed_while_workers_of_the_killed_one_live_waits_for_them(job: Callable[..., Job], many: Path) -> None:
    running = job().start()
    running.until_files(20)
    worker = running.worker_pids()[0]
    os.kill(worker, signal.SIGSTOP)
    try:
        running.kill()
        resumed = job().start()
        until(lambda: resumed.events("phase"), "the second job's start")
        assert resumed.events("started") == []
        assert resumed.process is not None
        assert resumed.process.poll() is None
    finally:
        os.kill(worker, signal.SIGCONT)
    assert resumed.wait() == 0, resumed.stderr
    check_all_done_once(running.output, many)


def test_sigterm_while_the_model_loads_stops_at_once(job: Callable[..., Job]) -> None:
    running = job().start()
    until(running.worker_pids, "a worker")
    assert running.process is not None
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 3
    assert running.events()[-1]["event"] == "interrupted"
    assert not any(map(alive, running.worker_pids()))


def test_workers_that_die_too_often_fail_the_job_with_one_line(job: Callable[..., Job], many: Path) -> None:
    running = job(worker_restarts=0).start()
    running.until_files(20)
    os.kill(running.worker_pids()[0], signal.SIGKILL)
    assert running.wait() == 1
    last = running.events()[-1]
    assert last["event"] == "failed"
    assert last["message"] == "worker 0 was lost (killed by signal 9) after 0 restarts"
    assert "Traceback" not in running.stderr
    assert check_whole(running.output, many) >= 20
    assert list(running.output.glob(".tmp-*")) == []


def test_two_jobs_on_one_folder_the_second_is_refused_and_the_first_unharmed(
    job: Callable[..., Job], many: Path
) -> None:
    first = job().start()
    first.until_files(5)
    assert first.process is not None
    # Its worker waits meanwhile: the second job may take longer to begin than the first one needs to end.
    (worker,) = first.worker_pids()
    os.kill(worker, signal.SIGSTOP)
    try:
        second = job()
        assert second.run() == 2
    finally:
        os.kill(worker, signal.SIGCONT)
    assert f"another job (pid {first.process.pid}) is writing to" in second.events()[-1]["message"]
    assert second.events("worker") == []
    assert first.wait() == 0, first.stderr
    check_all_done_once(first.output, many)


def test_leftovers_and_garbage_of_earlier_jobs_are_swept_or_made_again(
    job: Callable[..., Job], dataset: Path, extraction: Path, tmp_path: Path
) -> None:
    shutil.copytree(extraction, tmp_path / "out")
    done = job(dataset=str(dataset))
    manifest = done.output / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    rows = list(read_manifest(done.output).entries)
    garbled, swapped, listed_but_gone, adopted = (done.output / f"hs_{row}.safetensors" for row in rows[-4:])
    before = identities(done.output)
    # Four files lose their lines: one is garbage, one holds another sample, one is gone, one is whole.
    manifest.write_bytes(b"".join(lines[:-4]) + lines[-4][:20])
    garbled.write_bytes(b"\0" * 5000)
    shutil.copyfile(done.output / f"hs_{rows[0]}.safetensors", swapped)
    listed_but_gone.unlink()
    (done.output / ".tmp-1-2-3-hs_0.safetensors").write_bytes(b"half")

    assert done.run() == 0, done.stderr
    check_all_done_once(done.output, dataset)
    after = identities(done.output)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {garbled.name, swapped.name, listed_but_gone.name}
    assert adopted.name not in changed
    warnings = " ".join(event["message"] for event in done.events("warning"))
    assert garbled.name in warnings
    assert f"{swapped.name}: " in warnings


def test_a_disk_that_takes_no_more_fails_clearly_and_the_job_goes_on_after_it(
    job: Callable[..., Job], tmp_path: Path, models: dict[str, Path]
) -> None:
    # Rows of 20 tokens fit under the limit of a file's size, the last rows do not.
    uneven = make_dataset(tmp_path / "uneven", [20] * 40 + [400] * 4)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    starved = job(dataset=str(uneven))
    assert starved.run(preexec=limit) == 2
    last = starved.events()[-1]
    assert last["event"] == "failed"
    assert str(starved.output) in last["message"]
    assert "File too large" in last["message"]
    assert "free some space" in last["remedy"]
    assert "Traceback" not in starved.stderr
    check_whole(starved.output, uneven)
    assert not any(map(alive, starved.worker_pids()))

    resumed = job(dataset=str(uneven))
    assert resumed.run() == 0
    check_all_done_once(starved.output, uneven)


if os.geteuid() == 0:  # mounting is root's

    @pytest.fixture
    def small_disk(tmp_path: Path) -> Iterator[Path]:
        folder = tmp_path / "disk"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", str(folder)], check=True)
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)

    def test_a_disk_that_fills_below_its_floor_ends_the_job_between_packs(
        job: Callable[..., Job], small_disk: Path, tmp_path: Path
    ) -> None:
        # 300 files of 3.3 kB are planned as 0.93 MB; in pages of 4 KiB they take 1.2 MB.
        tiny = make_dataset(tmp_path / "tiny", [2] * 300)
        full = job(dataset=str(tiny), output=str(small_disk / "out"), pack_tokens=20)
        assert full.run() == 2, full.stderr
        last = full.events()[-1]
        assert last["event"] == "failed"
        assert "disk" in last["message"] or "cannot be written" in last["message"]
        assert "Traceback" not in full.stderr
        assert 0 < check_whole(full.output, tiny) < 300
        assert list(full.output.glob(".tmp-*")) == []
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        resumed = job(dataset=str(tiny), output=str(small_disk / "out"))
        assert resumed.run() == 0
        check_all_done_once(full.output, tiny)
