"""A node on this machine whose jobs run a real vLLM: what they started, what they wrote, and what is left of them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from backends.hsfile import TMP_PREFIX
from backends.store import LOCK, read_manifest
from dflash_tui.node import processes
from dflash_tui.node.processes import Identity
from dflash_tui.node.protocol import ENDED
from tests.node.client import REPOSITORY, Client
from tests.node.conftest import kill_all

# A start takes half a minute alone on two cores, and many on a machine that others use.
LIMIT_S = 1500.0
T = TypeVar("T")
LAYERS = [2, 3, 4, 5, 6, 8]
# What the CPU needs, and no GPU does: memory for the KV cache, in GiB. And no compiler.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
# By default it starts only where nearly all of the machine's memory is free.
EAGER = ["--enforce-eager", "--gpu-memory-utilization", "0.2"]


def poll(look: Callable[[], T], what: str) -> T:
    """What `look` returns once it is true. Looks seldom: the servers need the cores. Raises AssertionError."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s in vain for {what}"
        time.sleep(0.1)
    return found


@dataclass(frozen=True, slots=True)
class Data:
    """Model folders and a prepared dataset. narrow: with heads of a width that vLLM's attention on a CPU has no kernel for."""

    dense: str
    hybrid: str
    narrow: str
    conversations: str
    samples: int


@dataclass(frozen=True, slots=True)
class Server:
    """The processes of a server as they were when they were looked at, by what they are."""

    api: Identity
    engine: Identity
    worker: Identity
    tracker: Identity
    port: int

    @property
    def all(self) -> tuple[Identity, ...]:
        return self.api, self.engine, self.worker, self.tracker

    def alive(self) -> list[Identity]:
        return [one for one in self.all if processes.alive(one)]


@dataclass
class Job:
    """A job of the site. seen: processes of it that were seen; shared: its segments of shared memory; ports: of its servers."""

    site: Site
    id: str
    spec: dict[str, Any]
    seen: set[Identity] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    temporary_before: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary_before = self.site.temporary_files()

    @property
    def output(self) -> Path:
        return Path(self.spec["output"])

    @property
    def folder(self) -> Path:
        return self.site.state / "jobs" / self.id

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def record(self) -> dict[str, Any]:
        return self.site.agent.job(self.id)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def files(self) -> int:
        """Samples that have their final name."""
        return len(list(self.output.glob("hs_*.safetensors")))

    def wait(self, *states: str) -> dict[str, Any]:
        """The record once it is in one of the states, or in a final one: the log's end is told where that is another."""

        def look() -> dict[str, Any] | None:
            record = self.record
            return record if record["state"] in states or record["state"] in ENDED else None

        record = poll(look, f"{self.id} to be {states}")
        assert record["state"] in states, f"{json.dumps(record, indent=1)}\n{self.log[-6000:]}"
        return record

    def until_written(self, more: int) -> int:
        """Waits for `more` samples than there are now; how many there are then."""
        wanted = self.files() + more
        poll(lambda: self.files() >= wanted or self._failed(), f"{wanted} files of {self.id}")
        return self.files()

    def _failed(self) -> bool:
        state = self.record["state"]
        assert state not in ENDED, f"{self.id} is {state}\n{self.log[-6000:]}"
        return False

    def processes(self) -> list[processes.Stat]:
        """Those that live now, the supervisor among them; kept in `seen`."""
        log = (self.folder / "log").stat()
        supervisor = processes.identity_of(self.record.get("supervisor"))
        found = processes.of_job(
            str(self.folder), {"dev": log.st_dev, "ino": log.st_ino}, [supervisor] if supervisor else []
        )
        for stat in found:
            self.seen.add(stat.identity)
            self.shared |= _shared_memory(stat.pid)
        return found

    def server(self) -> Server:
        """The server that lives now, waited for until its engine and its worker are there."""

        def look() -> Server | None:
            found: dict[str, processes.Stat] = {}
            port = 0
            every = {stat: processes.command(stat.pid) for stat in self.processes()}
            for stat, command in every.items():
                if " serve " in command and (told := re.search(r"--port (\d+)", command)):
                    found["api"], port = stat, int(told[1])
                for name, mark in (("engine", "VLLM::EngineCore"), ("worker", "VLLM::Worker")):
                    if command.startswith(mark):
                        found[name] = stat
            for stat, command in every.items():
                if "resource_tracker" in command and "api" in found and stat.parent == found["api"].pid:
                    found["tracker"] = stat
            if len(found) < 4:
                return None
            self.ports.add(port)
            return Server(**{name: stat.identity for name, stat in found.items()}, port=port)

        return poll(lambda: look() or (self._failed() and None), f"the server of {self.id}")

    def client(self) -> Identity:
        """The process that feeds the server."""
        found = next(stat for stat in self.processes() if "vllm-worker" in processes.command(stat.pid))
        return found.identity

    def nothing_is_left(self, *, staging: bool = False) -> None:
        """No process, no port, no shared memory, no temporary file, no lock that is held; no file that is none of the manifest's.

        staging: whether the server's own folder may have stayed, as after a job that nobody was left to clean up for.
        """
        assert self.processes() == []
        assert [one for one in self.seen if processes.alive(one)] == []
        assert [port for port in self.ports if _listens(port)] == []
        assert [name for name in self.shared if Path(name).exists()] == []
        new = [path.name for path in self.site.temporary_files() if path not in self.temporary_before]
        assert staging or new == [], new
        listed = {entry.file for entry in read_manifest(self.output).entries.values()}
        names = {path.name for path in self.output.iterdir()}
        assert not {name for name in names if name.startswith(TMP_PREFIX) or name.endswith(f"safetensors{LOCK}")}
        assert names - listed <= {"manifest.jsonl", LOCK, "parity.json", *([".vllm"] if staging else [])}
        assert listed <= names
        with (self.output / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Site:
    """The node: its agent, its jobs, and `dflash-tui` on it."""

    def __init__(self, folder: Path, vllm_python: str, data: Data) -> None:
        self.folder = folder
        self.python = vllm_python
        self.data = data
        home = folder / "home"
        home.mkdir()
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        # Of a short name: sockets lie below it.
        self.temporary = Path(tempfile.mkdtemp())
        places = {"XDG_STATE_HOME": home / "state", "XDG_CACHE_HOME": home / "cache", "TMPDIR": self.temporary}
        self.env = {
            **kept,
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            **{name: str(path) for name, path in places.items()},
        }
        self.state = home / "state" / "dflash-tui"
        self.agent = Client(REPOSITORY, self.env)
        self._count = 0

    def close(self) -> None:
        """Ends what a failed test left; kindly, for the memory that killed processes share is nobody's."""
        going = [
            record for record in self.agent.ask("list")["jobs"] if record["state"] not in ENDED or record["strays"]
        ]
        for record in going:
            self.agent.ask("stop", job=record["job"], force=True)
        for record in going:
            poll(lambda job=record["job"]: self.agent.job(job)["state"] in ENDED, f"the end of {record['job']}")
        self.agent.close()
        kill_all(self.state)
        shutil.rmtree(self.temporary)

    def extract(self, name: str, model: str, dataset: str, **spec: Any) -> Job:
        """A launched extraction by vLLM, or by what `spec` says; `output` a folder of its own unless it says one."""
        given = {
            "model": model,
            "dataset": dataset,
            "output": str(self.folder / name),
            "backend": "vllm",
            "device": "cpu",
            "min_free_bytes": 0,
            **spec,
        }
        if given["backend"] == "vllm" and "server_url" not in given:
            given = {"vllm_python": self.python, "extra_args": EAGER, **given}
        return self.launch("extract", name, given)

    def launch(self, verb: str, name: str, spec: Mapping[str, Any], **fields: Any) -> Job:
        self._count += 1
        job = Job(self, f"{self._count:02}-{verb}-{name}", dict(spec))
        self.agent.launch(job.id, spec, verb=verb, env=ENVIRONMENT, **fields)
        return job

    def run(self, verb: str, name: str, **spec: Any) -> dict[str, Any]:
        """A job to its end; its result."""
        result = self.launch(verb, name, spec).wait("done")["result"]
        assert isinstance(result, dict)
        return result

    def verify(self, job: Job, recompute: int = 0) -> dict[str, Any]:
        return self.run("verify", job.id, output=str(job.output), recompute=recompute, device="cpu")

    def temporary_files(self) -> list[Path]:
        """All but what torch keeps for the next time, whoever loads it."""
        return [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`dflash-tui`, with the same node as "local"."""
        env = {**self.env, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
        return subprocess.Popen(
            [sys.executable, "-m", "dflash_tui.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=self.folder,
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`dflash-tui` to its end."""
        with self.start(*words) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _shared_memory(pid: int) -> set[str]:
    """Files of /dev/shm that the process has mapped: queues between the parts of vLLM."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")}
