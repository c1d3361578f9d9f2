"""What a node is doing, as one line of JSON a second on standard output: the agent's child, so that a driver that hangs
stalls no heartbeat.

A line is `{"time", "host": {…}, "gpus": [{…}], "gpu_source", "gpu_error"}`; the keys are the field names of `fleet.facts`
(`Metrics`, `HostMetrics`, `Disk`, `Gpu` and the groups in it) and null means "not available". The cards are read in a thread of
their own: the host's line goes out each second whatever the driver does, with the last cards and `gpu_error` saying since
when they are stale.
"""

import argparse
import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from dflash_tui.node import paths
from dflash_tui.node.disks import Disks
from dflash_tui.node.host import Host
from dflash_tui.node.nvml import Nvml, NvmlUnavailable
from dflash_tui.node.owners import Owners
from dflash_tui.node.smi import Smi, SmiUnavailable
from dflash_tui.node.xids import KernelLog

INTERVAL_S = 1.0
FIRST_WAIT_S = 3.0  # opening the driver takes seconds where nothing keeps it awake
OVERDUE_S = 10.0
RETRY_S = 30.0  # a driver may be installed or loaded while we run
DRIVER = "/dev/nvidiactl"


class Reading(NamedTuple):
    """The cards at one moment. `at` is monotonic, `time` is since 1970; both None before the first reading."""

    gpus: List[Dict[str, Any]]
    source: str
    error: Optional[str]
    at: Optional[float] = None
    time: Optional[float] = None


class Gpus:
    """NVML first, else nvidia-smi, else none. Never raises; what fails stands in `error`."""

    def __init__(
        self,
        open_nvml: Callable[[], Nvml] = Nvml,
        smi: Optional[Smi] = None,
        owners: Optional[Owners] = None,
        clock: Callable[[], float] = time.monotonic,
        kernel_log: Optional[KernelLog] = None,
    ) -> None:
        self._kernel_log = kernel_log if kernel_log is not None else KernelLog()
        self._open_nvml = open_nvml
        self._smi = smi if smi is not None else Smi()
        self._owners = owners if owners is not None else Owners()
        self._clock = clock
        self._nvml: Optional[Nvml] = None
        self._nvml_error: Optional[str] = None
        self._nvml_retry = clock()
        self._smi_retry = clock()
        self._last = Reading([], "none", None)

    def read(self) -> Reading:
        """The cards now, or the last ones with the reason why there are no newer."""
        try:
            cards, source = self._read_nvml(), "nvml"
            if cards is None:
                cards, source = self._read_smi(), "nvidia-smi"
        except SmiUnavailable as error:
            return self._without(str(error) if error.installed or error.hung else self._nvml_error)
        if cards is None:
            return self._without(self._nvml_error)
        self._kernel_log.describe(cards)
        self._owners.describe(cards)
        self._last = Reading(cards, source, None, self._clock(), time.time())
        return self._last

    def close(self) -> None:
        self._smi.close()
        self._kernel_log.close()

    def _read_nvml(self) -> Optional[List[Dict[str, Any]]]:
        try:
            if self._nvml is None:
                if self._clock() < self._nvml_retry:
                    return None
                self._nvml = self._open_nvml()
            cards = self._nvml.read()
        except NvmlUnavailable as error:
            if self._nvml is not None:
                self._nvml.close()
            self._nvml = None
            self._nvml_error = str(error) if error.installed else None
            self._nvml_retry = self._clock() + RETRY_S
            return None
        self._nvml_error = None
        return cards

    def _read_smi(self) -> Optional[List[Dict[str, Any]]]:
        if self._clock() < self._smi_retry:
            return None
        try:
            return self._smi.read()
        except SmiUnavailable as error:
            if not error.installed:
                self._smi_retry = self._clock() + RETRY_S
            raise

    def _without(self, error: Optional[str]) -> Reading:
        if error is None and (self._last.gpus or os.path.exists(DRIVER)):
            error = "there is an NVIDIA driver, but neither NVML nor nvidia-smi can be used"
        if error is not None and self._last.time is not None:
            error = "%s; stale since %s" % (error, clock_text(self._last.time))
        return self._last._replace(error=error)


def clock_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class GpuThread:
    """Reads the cards again and again beside the main thread; `latest` never waits for a driver that hangs."""

    def __init__(self, gpus: Gpus, interval_s: float = INTERVAL_S, overdue_s: float = OVERDUE_S) -> None:
        self._gpus = gpus
        self._interval_s = interval_s
        self._overdue_s = overdue_s
        self._stop = threading.Event()
        self._first = threading.Event()
        self._asked: Optional[Tuple[float, float]] = None  # monotonic and since 1970; None between readings
        self._reading = Reading([], "none", None)
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends a running nvidia-smi; a call inside the driver is left to itself."""
        self._stop.set()
        self._gpus.close()
        self._thread.join(0.5)

    def wait_first(self, seconds: float) -> None:
        self._first.wait(seconds)

    def latest(self) -> Reading:
        reading, asked = self._reading, self._asked
        if asked is None:
            return reading
        waited = time.monotonic() - asked[0]
        if not self._first.is_set():
            return reading._replace(error="the NVIDIA driver has not answered yet, asked %.0f s ago" % waited)
        if waited > self._overdue_s:
            since = reading.time if reading.time is not None else asked[1]
            error = "the NVIDIA driver has not answered for %.0f s; stale since %s" % (waited, clock_text(since))
            return reading._replace(error=error)
        return reading

    def _run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self._asked = (started, time.time())
            try:
                self._reading = self._gpus.read()
            except Exception as error:  # one odd answer must not end the reading of cards for good
                self._reading = self._reading._replace(error="the GPUs cannot be read: %r" % error)
            self._asked = None
            self._first.set()
            self._stop.wait(max(started + self._interval_s - time.monotonic(), 0.0))


def line(host: Dict[str, Any], reading: Reading) -> Dict[str, Any]:
    return {
        "time": time.time(),
        "host": host,
        "gpus": reading.gpus,
        "gpu_source": reading.source,
        "gpu_error": reading.error,
    }


def collect(host: Optional[Host] = None, gpus: Optional[Gpus] = None) -> Dict[str, Any]:
    """One reading of everything, here and now. Rates are None unless `host` has been read before."""
    state = _state_dir()
    if host is None:
        host = Host(disks=_disks(state))
    if gpus is None:
        gpus = Gpus(owners=Owners(state))
    return line(host.read(), gpus.read())


def _state_dir() -> Optional[str]:
    try:
        return paths.state_dir()
    except OSError:
        return None  # the agent says so to its console; metrics go on without it


def _disks(state: Optional[str]) -> Disks:
    return Disks(extra=() if state is None else (state,))


def _reader_gone(seconds: float) -> bool:
    """Waits; True as soon as nobody reads our output any more."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)  # errors and hang-ups are always told
    return bool(watch.poll(max(seconds, 0.0) * 1000.0))


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)


def main(argv: List[str]) -> int:
    """`metrics [--interval S] [--count N]`: lines until the reader or the parent is gone."""
    parser = argparse.ArgumentParser(prog="metrics", description="One line of JSON a second about this node.")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between lines")
    parser.add_argument("--count", type=int, default=0, help="end after so many lines; 0: never")
    options = parser.parse_args(argv)
    if not 0.0 < options.interval < 3600.0:
        parser.error("--interval %g: give seconds, more than 0 and less than 3600" % options.interval)
    parent = os.getppid()
    signal.signal(signal.SIGTERM, _end)
    state = _state_dir()
    host = Host(disks=_disks(state))
    cards = GpuThread(Gpus(owners=Owners(state)), options.interval)
    cards.start()
    try:
        cards.wait_first(FIRST_WAIT_S)
        return _print_lines(host, cards, parent, options.interval, options.count)
    except KeyboardInterrupt:
        return 130
    finally:
        cards.stop()


def _print_lines(host: Host, cards: GpuThread, parent: int, interval_s: float, count: int) -> int:
    printed = 0
    due = time.monotonic()
    while True:
        text = json.dumps(line(host.read(), cards.latest()), separators=(",", ":"), allow_nan=False)
        try:
            _write(text.encode("ascii") + b"\n")
        except OSError:
            return 0  # nobody reads any more: that is how a child like this ends
        printed += 1
        if printed == count:
            return 0
        due = max(due + interval_s, time.monotonic())  # after a pause go on from now, with no burst
        if _reader_gone(due - time.monotonic()) or os.getppid() != parent:
            return 0


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]
