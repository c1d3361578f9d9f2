"""GPUs by `nvidia-smi`, for nodes where NVML cannot be loaded.

It is a program of its own with a time limit of its own: a hung one is killed, and no second one is started while the first
is still there (one that hangs inside the driver does not even obey SIGKILL).
"""

import os
import re
import shutil
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from dflash_tui.node import smihealth
from dflash_tui.node.nvml import blank_card

TIME_LIMIT_S = 5.0
REAP_LIMIT_S = 1.0
PR_SET_PDEATHSIG = 1  # prctl(2)
MEBIBYTE = 1024 * 1024
FORMAT = "--format=csv,noheader,nounits"
GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks.sm",
    "clocks.mem",
)
GPU_QUERY = ("--query-gpu=" + ",".join(GPU_FIELDS), FORMAT)
HEALTH_S = 10.0  # what changes slowly is asked for less often
PROCESS_QUERY = ("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", FORMAT)
# Not on every PATH of a login without a terminal.
FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/opt/bin", "/usr/lib/wsl/lib")

# "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU"
LOST_CARD = re.compile(r"device handle for (?:GPU|gpu)?\s*(\d?[0-9A-Fa-f:.]+\.[0-9A-Fa-f])\s*:\s*(.+)")
FAULTS = ("GPU is lost", "Unknown Error", "ERR!", "GPU requires reset")


class SmiUnavailable(Exception):
    """nvidia-smi gives nothing. `installed` is False where there is none; `hung` where it did not answer in time."""

    def __init__(self, message: str, installed: bool = True, hung: bool = False) -> None:
        super().__init__(message)
        self.installed = installed
        self.hung = hung


class Answer(NamedTuple):
    exit: int
    stdout: str
    stderr: str


def find(path: Optional[str] = None) -> Optional[str]:
    """Where `nvidia-smi` is, or None."""
    search = os.pathsep.join([path if path is not None else os.environ.get("PATH", os.defpath), *FOLDERS])
    return shutil.which("nvidia-smi", path=search)


def _ends_with_us() -> Optional[Callable[[], None]]:
    """What a child does before it runs, so that it is killed when we are; None where the system does not offer it."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None

    def before() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    return before


def bus_ids(root: str = "/") -> List[str]:
    """The cards that the kernel's driver knows, lost ones too, in the order of nvidia-smi's indices."""
    try:
        names = os.listdir(os.path.join(root, "proc/driver/nvidia/gpus"))
    except OSError:
        return []
    return sorted(name.lower() for name in names)


class Smi:
    """Asks nvidia-smi, one process at a time. Nothing is started before `read`."""

    def __init__(
        self,
        program: Optional[str] = None,
        time_limit_s: float = TIME_LIMIT_S,
        buses: Callable[[], List[str]] = bus_ids,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._time_limit_s = time_limit_s
        self._buses = buses
        self._before = _ends_with_us()
        self._running: Optional["subprocess.Popen[bytes]"] = None
        self._known: Dict[int, Dict[str, Any]] = {}
        self._clock = clock
        self._query: Optional[smihealth.Query] = smihealth.Query()
        self._health: Dict[int, Dict[str, Any]] = {}
        self._health_due = clock()

    def read(self) -> List[Dict[str, Any]]:
        """Every card, in order. Raises SmiUnavailable."""
        answer = self._ask(GPU_QUERY)
        cards, lost = parse_cards(answer.stdout + "\n" + answer.stderr)
        if not cards and not lost:
            raise SmiUnavailable("nvidia-smi: %s" % _said(answer))
        buses = self._buses()
        cards += _place(lost, [card["index"] for card in cards], buses)
        if lost:
            cards += self._after_lost({card["index"] for card in cards}, buses)
        if any(card["uuid"] for card in cards):
            self._add_processes(cards)
        if self._clock() >= self._health_due and self._read_health():
            self._health_due = self._clock() + HEALTH_S
        for card in cards:
            if card["error"] is None:
                card.update(self._health.get(card["index"], {}))
        return [self._remember(card) for card in sorted(cards, key=lambda card: int(card["index"]))]

    def _after_lost(self, heard: Set[int], buses: List[str]) -> List[Dict[str, Any]]:
        """Some versions stop at the lost card: the others are asked for by name."""
        names = {index: known["uuid"] for index, known in self._known.items() if "uuid" in known}
        names.update(enumerate(buses))
        unheard = [names[index] for index in sorted(names) if index not in heard]
        if not unheard:
            return []
        found = parse_cards(self._ask(("--id=" + ",".join(unheard), *GPU_QUERY)).stdout)[0]
        return [card for card in found if card["index"] not in heard]

    def close(self) -> None:
        """Ends what still runs, without waiting for it."""
        if self._running is not None:
            self._kill(self._running)

    def _add_processes(self, cards: List[Dict[str, Any]]) -> None:
        answer = self._ask(PROCESS_QUERY)
        if answer.exit != 0 and not answer.stdout.strip():
            return
        processes = parse_processes(answer.stdout)
        for card in cards:
            if card["uuid"] is not None:
                card["processes"] = processes.get(card["uuid"], [])

    def _read_health(self) -> bool:
        """What cannot be had is None and costs the cards nothing else. False: a field was refused, so ask again soon."""
        self._health = {}
        if self._query is None:
            return True
        try:
            answer = self._ask((self._query.argument, FORMAT))
        except SmiUnavailable:
            return True
        rows = self._query.rows(answer.stdout)
        if answer.exit == 0 or rows:
            self._health = {int(row["index"]): smihealth.health(row) for row in rows}
            return True
        said = answer.stdout + answer.stderr
        if smihealth.REFUSED.search(said) is None:
            return True  # some other trouble, which may pass
        self._query = self._query.without(said)
        return False

    def _remember(self, card: Dict[str, Any]) -> Dict[str, Any]:
        known = {key: card[key] for key in ("uuid", "name", "memory_total_bytes") if card[key] is not None}
        self._known.setdefault(card["index"], {}).update(known)
        return dict(card, **self._known[card["index"]])

    def _ask(self, arguments: Sequence[str]) -> Answer:
        if self._running is not None:
            if self._running.poll() is None:
                raise SmiUnavailable(
                    "nvidia-smi (process %d) hangs and cannot be ended; the driver needs help" % self._running.pid,
                    hung=True,
                )
            self._running = None
        program = self._program or find()
        if program is None:
            raise SmiUnavailable("no nvidia-smi on this node", installed=False)
        try:
            # A session of its own: where nvidia-smi is a wrapper, what it started is killed with it.
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(os.environ, LC_ALL="C"),
                start_new_session=True,
                preexec_fn=self._before,
            )
        except OSError as error:
            raise SmiUnavailable("%s cannot be run: %s" % (program, error.strerror)) from error
        self._running = process
        try:
            stdout, stderr = process.communicate(timeout=self._time_limit_s)
        except subprocess.TimeoutExpired:
            self._end_hung(process)
            raise SmiUnavailable("nvidia-smi did not answer in %g s" % self._time_limit_s, hung=True) from None
        self._running = None
        return Answer(process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))

    def _end_hung(self, process: "subprocess.Popen[bytes]") -> None:
        self._kill(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        end = time.monotonic() + REAP_LIMIT_S
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        if process.poll() is not None:
            self._running = None

    @staticmethod
    def _kill(process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended between the two lines


def parse_cards(text: str) -> Tuple[List[Dict[str, Any]], List[Tuple[str, str]]]:
    """The rows of a GPU query, and (bus id, reason) of each card that could not be opened."""
    cards: List[Dict[str, Any]] = []
    lost: List[Tuple[str, str]] = []
    for line in text.splitlines():
        match = LOST_CARD.search(line)
        if match:
            lost.append((match.group(1), match.group(2).split(".")[0].strip()))
            continue
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(GPU_FIELDS) and values[0].isdigit():
            cards.append(_card(values))
    return cards, lost


def parse_processes(text: str) -> Dict[str, List[Dict[str, Any]]]:
    """The rows of a process query by the UUID of the card; a process may stand in several rows of one card (MIG)."""
    found: Dict[str, Dict[int, Optional[int]]] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]  # the name in the middle may hold commas
        if len(values) < 4 or not values[1].isdigit():
            continue
        used = _number(values[-1])
        memory = None if used is None else int(used * MEBIBYTE)
        of_card = found.setdefault(values[0], {})
        pid = int(values[1])
        before = of_card.get(pid)
        of_card[pid] = memory if before is None else before if memory is None else before + memory
    return {
        uuid: [{"pid": pid, "memory_bytes": memory} for pid, memory in sorted(of_card.items())]
        for uuid, of_card in found.items()
    }


def _card(values: List[str]) -> Dict[str, Any]:
    row = dict(zip(GPU_FIELDS, values))
    numbers = {name: _number(row[name]) for name in GPU_FIELDS[3:]}
    faults = [fault for fault in FAULTS if any(fault.lower() in value.lower() for value in values)]
    where = [name for name in GPU_FIELDS[3:] if any(fault.lower() in row[name].lower() for fault in faults)]
    error = None
    if faults:
        error = faults[0] if faults[0] == "GPU is lost" else "%s: %s" % (", ".join(where), faults[0])
    return blank_card(
        int(row["index"]),
        error=error,
        uuid=_word(row["uuid"]),
        name=_word(row["name"]),
        utilisation_percent=numbers["utilization.gpu"],
        memory_used_bytes=_whole(numbers["memory.used"], MEBIBYTE),
        memory_total_bytes=_whole(numbers["memory.total"], MEBIBYTE),
        power_watts=numbers["power.draw"],
        power_limit_watts=numbers["power.limit"],
        temperature_celsius=numbers["temperature.gpu"],
        sm_clock_mhz=_whole(numbers["clocks.sm"]),
        memory_clock_mhz=_whole(numbers["clocks.mem"]),
    )


def _place(lost: List[Tuple[str, str]], taken: List[int], buses: List[str]) -> List[Dict[str, Any]]:
    """Cards for the lost ones: at the index of their bus id where that is known, else in the gaps of the others."""
    places = {bus: index for index, bus in enumerate(buses)}
    used = set(taken)
    cards = []
    for bus, reason in lost:
        index = places.get(_bus(bus), -1)
        if index < 0 or index in used:
            index = next(number for number in range(len(used) + 1) if number not in used)
        used.add(index)
        cards.append(blank_card(index, error="%s (%s)" % (reason, bus)))
    return cards


def _bus(text: str) -> str:
    """nvidia-smi writes 8 digits of domain, /proc writes 4; both mean the same card."""
    domain, _, rest = text.lower().partition(":")
    return "%04x:%s" % (int(domain, 16), rest)


def _number(text: str) -> Optional[float]:
    """None for "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!" and whatever else is no number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def _word(text: str) -> Optional[str]:
    return None if not text or text.startswith("[") or text in ("N/A", "ERR!") or "lost" in text else text


def _whole(value: Optional[float], unit: int = 1) -> Optional[int]:
    return None if value is None else int(value * unit)


def _said(answer: Answer) -> str:
    lines = (answer.stdout + "\n" + answer.stderr).split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[0] if said else "exit status %d and not a word" % answer.exit
