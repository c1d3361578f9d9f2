"""A link without a node: a test tells it what the node says and how it answers. Time is the test's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

from textual import events
from textual.app import App
from textual.notifications import SeverityLevel
from textual.pilot import Pilot
from textual.screen import Screen

from dflash_tui.app.app import ConsoleApp
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import (
    AgentGreeted,
    BeatArrived,
    Checkup,
    Diagnosis,
    Disk,
    Fact,
    Gpu,
    GpuProcess,
    HostMetrics,
    Job,
    JobsArrived,
    JobState,
    LinkChanged,
    LinkState,
    Metrics,
    MetricsArrived,
    Progress,
)
from dflash_tui.fleet.source import SourceText
from dflash_tui.fleet.started import StartedWith
from dflash_tui.link import LinkError
from dflash_tui.link.requests import NOTHING, FilePosition
from dflash_tui.node.protocol import Launch

PLANNED: Mapping[str, Any] = {
    "ok": True, "error": None, "remedy": None, "warnings": ["the longest sample has 9000 tokens"],
    "layer_ids": [2, 10, 18, 26, 34, 36], "num_layers": 36, "hidden_size": 4096, "family": "qwen3", "dtype": "bfloat16",
    "bytes_per_token": 49160, "samples": 7473, "tokens": 1_400_000, "bytes_total": 68_824_000_000, "already_done": 100,
    "disk_free_bytes": 900 * 2**30, "samples_that_fit": 7473, "memory_bytes_per_worker": 18 * 2**30, "workers": 2,
    "device": "cuda", "packing": "packs", "versions": {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.17.0"},
}  # fmt: skip
REFUSED: Mapping[str, Any] = {
    "ok": False, "error": "the family 'gpt_oss' is not supported", "remedy": "choose a Qwen3 or Llama model", "warnings": [],
}  # fmt: skip
NOW = 1_796_000_000.0
GIB = 2**30


@dataclass
class Clock:
    time: float = NOW

    def __call__(self) -> float:
        return self.time


@dataclass
class ScriptedTail:
    id: int
    acked: int = 0
    closed: bool = False

    def ack(self, nbytes: int) -> None:
        self.acked += nbytes

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedLink:
    """Emits the facts of `script` when it is started and answers what is asked of it from the fields below."""

    host: str
    script: Sequence[Fact] = ()
    plan_answer: Mapping[str, Any] | Exception = field(default_factory=dict)
    launch_answer: Job | Exception | None = None
    stop_answer: Mapping[str, Any] | Exception = field(default_factory=dict)
    doctor_answer: Checkup | Exception | Future[Checkup] | None = None
    diagnose_answer: Diagnosis | Exception | Future[Diagnosis] | None = None
    source_answer: SourceText | Exception | Callable[[str, int], SourceText | Exception] | None = None
    command_answer: StartedWith | Exception = field(default_factory=StartedWith)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    read_answer: Exception | Future[tuple[Any, bytes]] | None = None  # in place of what `files` hold
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    secrets: list[dict[str, str]] = field(default_factory=list)
    started: bool = False
    closed: bool = False
    emit: Callable[[Fact], None] = field(default=lambda fact: None)

    def start(self) -> None:
        self.started = True
        for fact in self.script:
            self.emit(fact)

    def close(self, wait: bool = True) -> None:
        self.closed = True

    def retry(self) -> None:
        self.asked.append(("retry", {}))

    def _answer(self, name: str, answer: Any, **asked: Any) -> Future[Any]:
        self.asked.append((name, asked))
        future: Future[Any] = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    def plan(
        self,
        verb: str,
        spec: Mapping[str, Any],
        *,
        python: str = "",
        gpus: tuple[str, ...] = (),
        share: bool = False,
        timeout: float = 120,
        env: Mapping[str, str] = NOTHING,
        secrets: Mapping[str, str] = NOTHING,
    ) -> Future[Mapping[str, Any]]:
        self.secrets.append(dict(secrets))
        return self._answer("plan", self.plan_answer, verb=verb, spec=dict(spec), python=python, gpus=tuple(gpus))

    def launch(self, job_id: str, launch: Launch, *, secrets: Mapping[str, str] = NOTHING) -> Future[Job]:
        self.secrets.append(dict(secrets))
        answer = self.launch_answer
        if answer is None:
            answer = Job(job_id, launch.name, launch.verb, JobState.STARTING, NOW)
            self.emit(JobsArrived(self.host, (answer,)))
        return self._answer("launch", answer, job_id=job_id, launch=launch)

    def stop(self, job_id: str, force: bool = False) -> Future[Mapping[str, Any]]:
        return self._answer("stop", self.stop_answer, job_id=job_id, force=force)

    def doctor(self, *, write: bool = True) -> Future[Checkup]:
        answer = self.doctor_answer
        if isinstance(answer, Future):
            self.asked.append(("doctor", {"write": write}))
            return answer
        return self._answer("doctor", answer or Checkup(self.host, ()), write=write)

    def diagnose(self, *, job: str | None = None, path: str | None = None) -> Future[Diagnosis]:
        answer = self.diagnose_answer
        if isinstance(answer, Future):
            self.asked.append(("diagnose", {"job": job, "path": path}))
            return answer
        return self._answer("diagnose", answer or Diagnosis(False, None, None, None, 0, 0), job=job, path=path)

    def source(self, *, path: str | None = None, of_job: str | None = None, line: int = 1) -> Future[SourceText]:
        answer = self.source_answer
        if callable(answer):
            answer = answer(path or "", line)
        answer = answer or LinkError("not-found", f"there is no file {path}", "check the path")
        return self._answer("source", answer, path=path, of_job=of_job, line=line)

    def command(self, job: str) -> Future[StartedWith]:
        return self._answer("command", self.command_answer, job=job)

    def read(
        self,
        *,
        job: str | None = None,
        file: str = "log",
        path: str | None = None,
        offset: int = 0,
        length: int = 65536,
    ) -> Future[tuple[Any, bytes]]:
        if isinstance(self.read_answer, Future):
            self.asked.append(("read", {"job": job, "file": file}))
            return self.read_answer
        if self.read_answer is not None:
            return self._answer("read", self.read_answer, job=job, file=file)
        data = self.files.get((job or "", file))
        answer: Any = LinkError("not-found", f"no {file} of {job}")
        if data is not None:
            answer = FilePosition(1, 1, offset, len(data)), data[offset : offset + length]
        return self._answer("read", answer, job=job, file=file)

    def follow(
        self, *, job: str | None = None, file: str = "log", path: str | None = None, offset: int = -65536
    ) -> ScriptedTail:
        self.asked.append(("follow", {"job": job, "file": file}))
        return ScriptedTail(len(self.questions("follow")))

    def questions(self, name: str) -> list[dict[str, Any]]:
        return [asked for what, asked in self.asked if what == name]


def live(host: str, *, hostname: str = "", at: float = NOW, python: str = "/usr/bin/python3") -> list[Fact]:
    return [
        LinkChanged(host, LinkState.LIVE, at),
        AgentGreeted(
            host, hostname or f"{host}.cluster", "b00t", 4242, "3.11.7", python, "ops", "/home/ops/.local/state", 0.0
        ),
        BeatArrived(host, at),
    ]


def host_metrics() -> HostMetrics:
    return HostMetrics(
        cpu_count=64,
        cpu_percent=12.4,
        load_1=3.21,
        load_5=2.5,
        load_15=1.9,
        memory_used_bytes=110 * GIB,
        memory_total_bytes=512 * GIB,
        swap_used_bytes=0,
        swap_total_bytes=0,
        disks=(Disk("/", 1200 * GIB, 3500 * GIB), Disk("/data", 9000 * GIB, 14000 * GIB)),
        disk_read_bytes_per_s=12e6,
        disk_write_bytes_per_s=900e6,
        net_receive_bytes_per_s=1.2e6,
        net_send_bytes_per_s=340e3,
        uptime_s=86400 * 12 + 3 * 3600,
    )


def h200(index: int, use: float | None, *, job: str | None = None, temperature: float = 54) -> Gpu:
    busy = bool(use)
    processes = (
        (GpuProcess(31_000 + index, 70 * GIB, "python -u backends extract spec.json", "ops", job),) if busy else ()
    )
    return Gpu(
        index=index,
        uuid=f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd",
        name="NVIDIA H200",
        utilisation_percent=use,
        memory_used_bytes=(71 * GIB if busy else GIB // 2),
        memory_total_bytes=141 * GIB,
        power_watts=612 if busy else 76,
        power_limit_watts=700,
        temperature_celsius=temperature,
        sm_clock_mhz=1980 if busy else 345,
        memory_clock_mhz=3201,
        processes=processes,
    )


def gpu_node(host: str, *, job: str | None = None, seconds: int = 60) -> list[Fact]:
    """A live node with a busy, an idle, a lost and a MIG card, and a minute of its past."""
    facts = live(host)
    for second in range(seconds):
        use = float((second * 7) % 101)
        gpus = (
            h200(0, 100.0 - use / 4, job=job, temperature=87),
            h200(1, 0.0),
            Gpu(2, name="NVIDIA H200", error="GPU is lost: unplugged or fell off the bus"),
            Gpu(3, "GPU-00000003-mig", "NVIDIA H200 MIG 1g.18gb", None, 5 * GIB, 16 * GIB, processes=None),
        )
        facts.append(MetricsArrived(host, Metrics(NOW - seconds + second, host_metrics(), gpus, "nvml")))
    return facts


def cpu_node(host: str) -> list[Fact]:
    return [*live(host), MetricsArrived(host, Metrics(NOW, host_metrics()))]


def refused_node(host: str) -> list[Fact]:
    return [
        LinkChanged(
            host,
            LinkState.REFUSED,
            NOW,
            detail="the host key changed (SHA256:abc)",
            remedy="run `ssh-keygen -R gpu-9` if you know why",
        )
    ]


def lost_node(host: str) -> list[Fact]:
    facts = [
        *live(host, at=NOW - 95),
        MetricsArrived(host, Metrics(NOW - 95, host_metrics(), (h200(0, 40.0),), "nvml")),
    ]
    facts.append(LinkChanged(host, LinkState.LOST, NOW - 80))
    facts.append(LinkChanged(host, LinkState.RETRYING, NOW - 2, detail="connection refused", retry_in_s=6.0))
    return facts


def running_job(job: str = "20261130-025500-extract-3f9a", **more: Any) -> Job:
    progress = Progress(
        done=520, total=1000, tokens=455_000, bytes=22_000_000_000, elapsed_s=60, samples_per_s=8.7, tokens_per_s=7600,
        bytes_per_s=373e6, eta_s=55.2, phase="extracting",
    )  # fmt: skip
    values: dict[str, Any] = {
        "id": job, "name": "qwen3-8b gsm8k", "verb": "extract", "state": JobState.RUNNING, "created": NOW - 70,
        "started": NOW - 69, "progress": progress, "directory": f"/home/ops/.local/state/dflash-tui/jobs/{job}",
        "log_size": 4096, "supervisor_pid": 30_001, "runner_pid": 30_002,
    }  # fmt: skip
    return Job(**{**values, **more})


def launch_file(job: Job, **spec: Any) -> bytes:
    wanted = {"model": "/models/qwen3-8b", "dataset": "/data/gsm8k", "output": "/data/states", **spec}
    launch = Launch(job.name, job.verb, "/opt/worker/bin/python", wanted)
    return json.dumps(launch._asdict()).encode()


class HeardConsole(ConsoleApp):
    """The real console; keeps every line that it told the user."""

    told: list[str]

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        self.told.append(text)
        super().say(text, severity)


def console(*links: ScriptedLink, clock: Clock | None = None, **settings: Any) -> HeardConsole:
    """The real console over links of a script, with a clock that stands still."""
    values = {"refresh": 0.1, **settings}
    app = HeardConsole(links, Settings(**values), clock=clock or Clock(), zone=UTC)
    app.told = []
    return app


def shown(app: App[Any]) -> str:
    """What stands on the screen, line by line."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def until(pilot: Pilot[Any], condition: Callable[[], Any], what: str = "", *, limit_s: float = 30.0) -> None:
    """Waits until `condition` holds; a slow machine may take its time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}\n{shown(pilot.app)}"
        await pilot.pause(0.02)


async def until_shown(pilot: Pilot[Any], *texts: str) -> None:
    """Waits until every text stands on the screen."""
    await until(pilot, lambda: all(text in shown(pilot.app) for text in texts), f"{texts} on the screen")


async def until_open(pilot: Pilot[Any], kind: type[Screen[Any]], *, limit_s: float = 30.0) -> None:
    """Waits until a screen of this kind is on top, with all that it is composed of."""
    app = pilot.app
    await until(pilot, lambda: isinstance(app.screen, kind) and app.screen.is_mounted, kind.__name__, limit_s=limit_s)


async def until_told(pilot: Pilot[Any], *texts: str) -> None:
    """Waits until one line that the user was told holds every text."""
    app = pilot.app
    assert isinstance(app, HeardConsole)
    await until(
        pilot, lambda: any(all(text in line for text in texts) for line in app.told), f"{texts}, but {app.told}"
    )


async def type_text(pilot: Pilot[Any], text: str) -> None:
    """Pastes a text and types its last letter: each key costs a turn of the screen."""
    if not text:
        return
    pilot.app.post_message(events.Paste(text[:-1]))
    names = {"/": "slash", "-": "minus", ".": "full_stop", ",": "comma", "_": "underscore", " ": "space"}
    await pilot.press(names.get(text[-1], text[-1]))
