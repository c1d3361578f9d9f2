"""What is said of the memory of a job's GPUs after its end: in the screens, and by `jobs` and `stop`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dflash_tui.app.widgets.job_detail import job_detail
from dflash_tui.commands.jobs import jobs_table
from dflash_tui.fleet.facts import GpuProcess, Job, JobGpuMemory, JobState, LinkChanged, LinkState
from dflash_tui.fleet.gpumemory import gpu_memory_line, undecided
from dflash_tui.fleet.state import NodeView

GIB = 1 << 30
ZERO = JobGpuMemory(0, "GPU-0", 5, 5, True)
ONE = JobGpuMemory(1, "GPU-1", 5, 5, True)
ENGINE = GpuProcess(4242, 71 * GIB, "VLLM::EngineCore")
HELD = JobGpuMemory(1, "GPU-1", round(71.7 * GIB), GIB // 2, False, (ENGINE,))
OUTSIDE = JobGpuMemory(1, "GPU-1", round(71.2 * GIB), 0, False, note="held by a process outside this container")
LOST = JobGpuMemory(2, "GPU-2", None, 0, None, note="the card cannot be read: GPU is lost")


def job(*entries: JobGpuMemory) -> Job:
    return Job("j-1", "n", "extract", JobState.DONE, 1.0, gpu_memory=entries)


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        ((), ""),
        ((ZERO, ONE), "freed on GPU 0, 1"),
        ((HELD,), "GPU 1: 71.2 GiB still held by pid 4242 (VLLM::EngineCore)"),
        ((ZERO, OUTSIDE), "freed on GPU 0; GPU 1: 71.2 GiB still held by a process outside this container"),
        ((LOST,), "GPU 2: not known whether it is freed: the card cannot be read: GPU is lost"),
        ((JobGpuMemory(None, "GPU-x"),), "GPU GPU-x: not known whether it is freed"),
        (
            (JobGpuMemory(0, "GPU-0", 5, 5, False, note="2 of its processes live on"),),
            "GPU 0: not freed: 2 of its processes live on",
        ),
        (
            (JobGpuMemory(0, "GPU-0", GIB, 0, False, tuple(GpuProcess(pid, job="j-2") for pid in range(1, 6))),),
            "GPU 0: 1.0 GiB still held by pid 1 of job j-2, pid 2 of job j-2, pid 3 of job j-2 and 2 more",
        ),
    ],
)
def test_the_line_says_what_is_freed_and_who_holds_the_rest(entries: tuple[JobGpuMemory, ...], line: str) -> None:
    assert gpu_memory_line(job(*entries)) == line


def test_only_a_card_of_which_nothing_is_known_is_undecided() -> None:
    assert undecided(job(ZERO, LOST))
    assert not undecided(job(ZERO, HELD, OUTSIDE))


def test_the_table_of_jobs_and_the_detail_of_one_show_the_line() -> None:
    told = job(ZERO, HELD)
    out = io.StringIO()
    Console(file=out, width=400).print(jobs_table([("local", told)], with_host=False))
    assert "(GPU memory: freed on GPU 0; GPU 1: 71.2 GiB still held by pid 4242 (VLLM::EngineCore))" in out.getvalue()
    node = NodeView("local", LinkChanged("local", LinkState.LIVE, 1.0))
    lines = job_detail(node, told, None, now=2.0, clock=str).plain.splitlines()
    assert "GPU memory freed on GPU 0; GPU 1: 71.2 GiB still held by pid 4242 (VLLM::EngineCore)" in lines
    quiet = job_detail(node, job(), None, now=2.0, clock=str).plain
    assert "GPU memory" not in quiet
