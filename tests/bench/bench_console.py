"""What the console costs: first paint, CPU on the Fleet and on the Logs screen, and how long a key takes.

    python -m tests.bench.bench_console [SECONDS]

Each console runs in a process of its own on a terminal that this one reads, of 200x60 where nothing else is said. Its nodes
are scripted: they tell in threads of that process what a link would tell, at its pace, so that the figures are those of the
console alone, without SSH, frames or JSON. CPU is the process's user and system time over SECONDS (default 15) as a share of one core; a key is
timed from its write until the first byte of what it changes on the screen is read. Prints a table; asserts nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil

from dflash_tui.app.app import ConsoleApp
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import (
    AgentGreeted,
    BeatArrived,
    Disk,
    Gpu,
    GpuProcess,
    HostMetrics,
    Job,
    JobsArrived,
    JobState,
    LinkChanged,
    LinkState,
    LogArrived,
    Metrics,
    MetricsArrived,
    Progress,
)

ROOT = Path(__file__).parents[2]
GIB = 2**30
LINES_PER_S, BATCHES_PER_S = 1000, 10
KEYS = 20
LIMIT_S = 60.0
SIZE = (200, 60)
START = "import sys; from dflash_tui.cli import main; sys.exit(main())"


class PacedLink:
    """A node with 8 GPUs and one job that runs; it tells of itself once a second, and of a log where that is followed."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.emit = lambda fact: None
        self.following = 0

    def start(self) -> None:
        now = time.time()
        self.emit(
            AgentGreeted(self.host, f"{self.host}.cluster", "boot", 1, "3.11", "/usr/bin/python3", "ops", "/tmp", 0)
        )
        self.emit(LinkChanged(self.host, LinkState.LIVE, now))
        threading.Thread(target=self._tell, daemon=True).start()

    def close(self, wait: bool = True) -> None:
        self.following = 0

    def read(self, **_: object) -> Future[tuple[object, bytes]]:
        answer: Future[tuple[object, bytes]] = Future()
        answer.set_result((None, b"{}"))
        return answer

    def follow(self, **_: object) -> PacedTail:
        self.following += 1
        threading.Thread(target=self._print, args=(self.following,), daemon=True).start()
        return PacedTail(self.following)

    def _tell(self) -> None:
        begun = time.monotonic()
        offset = hash(self.host) % 1000 / 1000  # nodes do not tick together
        for second in range(10**9):
            time.sleep(max(0.0, begun + second + offset - time.monotonic()))
            now, busy = time.time(), second * 7 % 100
            host = HostMetrics(64, busy, 3.0, 3.0, 3.0, 110 * GIB, 512 * GIB, disks=(Disk("/", GIB << 10, GIB << 11),))
            process = (GpuProcess(4242, 70 * GIB, "python -u backends extract", "ops"),)
            gpus = tuple(
                Gpu(k, f"GPU-{k}", "NVIDIA H200", (busy + k * 9) % 100, 70 * GIB, 141 * GIB, 600 + busy, 700, 60, 1980, 3201, process)
                for k in range(8)
            )  # fmt: skip
            self.emit(BeatArrived(self.host, now))
            self.emit(MetricsArrived(self.host, Metrics(now, host, gpus, "nvml")))
            progress = Progress(second, 10**6, 0, second * 875, second << 20, second, 9.0 + busy / 100, 8000, 4e8, 3600)
            job = Job(
                "20261130-025500-extract-3f9a",
                "bench",
                "extract",
                JobState.RUNNING,
                now - second,
                now - second,
                progress=progress,
            )
            self.emit(JobsArrived(self.host, (job,)))

    def _print(self, tail: int) -> None:
        begun, offset = time.monotonic(), 0
        for batch in range(10**9):
            time.sleep(max(0.0, begun + batch / BATCHES_PER_S - time.monotonic()))
            if tail != self.following:
                return
            first = batch * LINES_PER_S // BATCHES_PER_S
            numbers = range(first, first + LINES_PER_S // BATCHES_PER_S)
            data = "".join(
                f"INFO 11-30 02:55:{k % 60:02d} [worker.py:{k % 1000}] sample {k}: 875 tokens, 42.1 MB\n"
                for k in numbers
            )
            self.emit(LogArrived(self.host, tail, offset, data.encode()))
            offset += len(data)


class PacedTail:
    def __init__(self, number: int) -> None:
        self.id = number

    def ack(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


class BenchConsole(ConsoleApp):
    """The console; `opens_log`: it opens the log of the first node's job by itself."""

    opens_log = False

    def on_ready(self) -> None:
        if self.opens_log:
            self.open_log(self.hosts[0], "20261130-025500-extract-3f9a")


def child(nodes: int, log: bool) -> None:
    links = [PacedLink(f"node-{number:02d}") for number in range(nodes)]
    app = BenchConsole(links, Settings())  # no more of a link than the bench needs
    app.opens_log = log
    app.run()


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, command: list[str], home: str, columns: int, rows: int) -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "HOME": home, "COLORTERM": "truecolor"}
        env.update({f"XDG_{name}_HOME": f"{home}/{name}" for name in ("CONFIG", "CACHE", "STATE")})
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT, start_new_session=True
        )
        os.close(theirs)

    def read_for(self, seconds: float, until: bytes = b"") -> float:
        """Reads for so long, or until `until` has come; returns how long that was. Raises TimeoutError where it never came."""
        begun, seen = time.monotonic(), b""
        while (left := begun + seconds - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                seen = (seen + os.read(self.fd, 65536))[-200_000:]
                if until and until in re.sub(rb"\x1b\[[0-9;]*m", b"", seen):
                    return time.monotonic() - begun
        if until:
            raise TimeoutError(f"{until!r} was not shown within {seconds:g} s")
        return seconds

    def key(self, key: bytes, shows: bytes) -> float:
        """Milliseconds from a key to what it shows."""
        os.write(self.fd, key)
        return 1000 * self.read_for(LIMIT_S, shows)

    def cpu(self, seconds: float) -> float:
        """CPU time of the process meanwhile, in percent of one core."""
        process = psutil.Process(self.process.pid)
        before, begun = sum(process.cpu_times()[:2]), time.monotonic()
        self.read_for(seconds)
        return 100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)


@contextlib.contextmanager
def terminal(*command: str, size: tuple[int, int] = SIZE) -> Iterator[Terminal]:
    with tempfile.TemporaryDirectory() as home:
        opened = Terminal([sys.executable, *command], home, *size)
        try:
            yield opened
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(opened.process.pid, signal.SIGKILL)
            opened.process.wait()
            os.close(opened.fd)


def consoles(nodes: int, log: bool, size: tuple[int, int] = SIZE) -> contextlib.AbstractContextManager[Terminal]:
    return terminal("-m", "tests.bench.bench_console", "--child", str(nodes), "log" if log else "fleet", size=size)


def keys(console: Terminal, key: bytes, shows: bytes) -> str:
    taken = []
    for _ in range(KEYS):
        console.read_for(0.3)
        taken.append(console.key(key, shows))
    return f"median {statistics.median(taken):.0f} ms, worst {max(taken):.0f} ms"


def main(seconds: float) -> None:
    print(f"load of this machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    paints, computed = [], []
    for _ in range(5):
        with terminal("-c", START, "--host", "local") as console:
            console.read_for(LIMIT_S, b"[1 Fleet]")
            paints.append(time.monotonic() - console.begun)
            computed.append(sum(psutil.Process(console.process.pid).cpu_times()[:2]))
    row("first paint", f"median {statistics.median(paints):.2f} s, worst {max(paints):.2f} s", "0.6 s")
    row("CPU time of it, which a busy machine does not stretch", f"median {statistics.median(computed):.2f} s", "0.6 s")
    for size in ((80, 24), SIZE):
        with consoles(1, log=True, size=size) as console:
            console.read_for(LIMIT_S, b"sample")
            console.read_for(3.0)
            what = f"8 GPUs at 1 Hz and 1,000 log lines/s, Logs at {size[0]}x{size[1]}"
            row(what, f"{console.cpu(seconds):.1f} % of a core", "5 %")
            console.key(b"1", b"[1 Fleet]")
            row("the same, Fleet shown", f"{console.cpu(seconds):.1f} % of a core", "5 %")
    with consoles(64, log=False) as console:
        console.read_for(LIMIT_S, b"64/64")
        console.read_for(3.0)
        row("64 nodes of 8 GPUs at 1 Hz, Fleet shown", f"{console.cpu(seconds):.1f} % of a core", "25 %")
        row("the same, cursor down", keys(console, b"\x1b[B", "▌".encode()), "100 ms")
        console.key(b"2", b"[2 Jobs]")
        row("the same, Jobs shown", f"{console.cpu(seconds):.1f} % of a core", "25 %")


def row(what: str, value: str, budget: str) -> None:
    print(f"{what:56} {value:32} budget {budget}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), sys.argv[3] == "log")
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 15.0)
