"""GPUs by NVML, through `pynvml`: what the driver says, card by card and field by field.

`pynvml` is one pure-Python file of the bundle; the library behind it, `libnvidia-ml.so.1`, comes with the driver and may
be missing. A field that a card cannot give is None. A card that is lost stays in the list, with `error`.
Load is read each time; `nvmlhealth.py` reads what changes slowly, and `xids.py` hears what the driver reports by itself.
"""

import os
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from dflash_tui.node.nvmlask import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, Attempt, Questions
from dflash_tui.node.nvmlhealth import RARE_S, Health
from dflash_tui.node.xids import XidEvents

# Where drivers put the library when the loader's own path does not have it: container mounts, WSL.
LIBRARY_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib64-nvidia", "/usr/lib/wsl/lib")
NO_MEMORY_FIGURE = 1 << 63  # NVML says "not available" by all bits set


class NvmlUnavailable(Exception):
    """NVML cannot be used. `installed` is False where there is simply no driver here."""

    def __init__(self, message: str, installed: bool) -> None:
        super().__init__(message)
        self.installed = installed


def load() -> Any:
    """The `pynvml` module. Raises NvmlUnavailable where there is none."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable("pynvml cannot be imported: %s" % error, False) from error
    return pynvml


def _load_library_from_odd_folders() -> None:
    """Once loaded from a folder, the library answers to its bare name, which is all that pynvml asks for."""
    try:
        import ctypes
    except ImportError:
        return  # a Python built without it has no pynvml either
    for folder in LIBRARY_FOLDERS:
        path = os.path.join(folder, "libnvidia-ml.so.1")
        if os.path.exists(path):
            try:
                ctypes.CDLL(path)
                return
            except OSError:
                continue


class Nvml:
    """An open NVML. Raises NvmlUnavailable; `module` is `pynvml` or something that answers like it."""

    def __init__(self, module: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = module if module is not None else load()
        self._clock = clock
        self._cards: Dict[int, _Card] = {}
        self._known: Dict[int, Dict[str, Any]] = {}
        self._turn = 0
        try:
            self._init()
        except self._nvml.NVMLError as error:
            installed = error.value not in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)
            raise NvmlUnavailable("NVML: %s" % error, installed) from error
        self._xids = XidEvents(self._nvml)

    def _init(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if error.value != LIBRARY_NOT_FOUND:
                raise
            _load_library_from_odd_folders()
            self._nvml.nvmlInit()

    def close(self) -> None:
        self._xids.close()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass  # it is broken or was shut before: there is nothing left to close

    def read(self) -> List[Dict[str, Any]]:
        """Every card, in the order of the bus. Raises NvmlUnavailable where NVML as a whole has failed."""
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise NvmlUnavailable("NVML: %s" % error, True) from error
        self._turn = (self._turn + 1) % max(count, 1)
        cards = [self._card(index) for index in range(count)]
        self._xids.describe(cards)
        return cards

    def _card(self, index: int) -> Dict[str, Any]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            return blank_card(index, error=str(error), **self._known.get(index, {}))
        if index not in self._cards:
            self._cards[index] = _Card(self._nvml, index, self._clock)
        # What blocks for a while is asked of one card at a time.
        card = self._cards[index].read(handle, self._turn == index)
        self._xids.watch(index, handle)
        for key in ("uuid", "name", "pci_bus_id", "memory_total_bytes"):
            if card[key] is not None:
                self._known.setdefault(index, {})[key] = card[key]
        return dict(card, **self._known.get(index, {}))


def blank_card(index: int, error: Optional[str] = None, **known: Any) -> Dict[str, Any]:
    """A card of which nothing is known but `known`: the fields of `fleet.facts.Gpu`."""
    card: Dict[str, Any] = dict.fromkeys(CARD_FIELDS)
    card.update(index=index, error=error, faults=[])
    card.update(known)
    return card


CARD_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci_bus_id",
    "utilisation_percent",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "power_limit_watts",
    "power_limit_default_watts",
    "power_limit_max_watts",
    "energy_joules",
    "temperature_celsius",
    "temperature_slowdown_celsius",
    "temperature_shutdown_celsius",
    "memory_temperature_celsius",
    "temperature_memory_max_celsius",
    "fan_percent",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "clock_reasons",
    "performance_state",
    "persistence",
    "compute_mode",
    "ecc",
    "remapped_rows",
    "retired_pages",
    "pcie",
    "nvlink",
    "mig",
    "xid",
    "xid_source",
    "processes",
    "faults",
    "error",
)


class _Card:
    """One card from reading to reading."""

    def __init__(self, nvml: Any, index: int, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._index = index
        self._clock = clock
        self._ask = Questions(nvml, clock)
        self._health = Health(self._ask, index, clock)
        self._known: Dict[str, Any] = {"uuid": None}
        self._identity_due = clock()

    def _identity(self) -> Dict[str, Any]:
        """What a card is; asked again once a minute, and until it is known."""
        now = self._clock()
        if now >= self._identity_due or not all(self._known.values()):
            uuid = self._ask.ask("uuid", ("nvmlDeviceGetUUID",))
            name = self._ask.ask("name", ("nvmlDeviceGetName",))
            bus = self._ask.ask("bus id", ("nvmlDeviceGetPciInfo_v3",), ("nvmlDeviceGetPciInfo",))
            self._known = {
                "uuid": _text(uuid),
                "name": _text(name),
                "pci_bus_id": None if bus is None else (_text(bus.busId) or "").lower() or None,
            }
            self._identity_due = now + RARE_S
        return self._known

    def read(self, handle: Any, pcie_turn: bool) -> Dict[str, Any]:
        """Its fields now. At `pcie_turn` it is also asked for its PCIe traffic, which blocks 40 ms."""
        nvml = self._nvml
        self._ask.begin(handle)
        card = blank_card(self._index, **self._identity())
        rates = self._ask.ask("utilisation", ("nvmlDeviceGetUtilizationRates",))
        card["utilisation_percent"] = None if rates is None else float(rates.gpu)
        memory = self._ask.ask("memory", *self._memory_attempts())
        if memory is not None:
            card["memory_used_bytes"] = int(memory.used)
            card["memory_total_bytes"] = int(memory.total)
        card["power_watts"] = _watts(self._ask.ask("power", ("nvmlDeviceGetPowerUsage",)))
        limit = self._ask.ask(
            "power limit", ("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",)
        )
        card["power_limit_watts"] = _watts(limit)
        sensor = nvml.NVML_TEMPERATURE_GPU
        heat = self._ask.ask("temperature", ("nvmlDeviceGetTemperature", sensor), ("nvmlDeviceGetTemperatureV", sensor))
        card["temperature_celsius"] = None if heat is None else float(heat)
        card["sm_clock_mhz"] = self._ask.ask("SM clock", ("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM))
        card["memory_clock_mhz"] = self._ask.ask("memory clock", ("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM))
        card["processes"] = self._processes()
        if self._ask.gone:
            self._health = Health(self._ask, self._index, self._clock)  # what was true of it is not any more
        else:
            self._ask.lenient()
            self._health.fill(card, pcie_turn)
        card["error"] = self._ask.error
        return card

    def _memory_attempts(self) -> List[Attempt]:
        # Version 2 leaves the driver's own reserve out of `used`, as nvidia-smi does.
        attempts: List[Attempt] = [("nvmlDeviceGetMemoryInfo",)]
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is not None:
            attempts.insert(0, ("nvmlDeviceGetMemoryInfo", version))
        return attempts

    def _processes(self) -> Optional[List[Dict[str, Any]]]:
        """Compute and graphics together: a process that does both is listed in both with the same memory."""
        parts: Dict[Tuple[int, Any, Any], Optional[int]] = {}
        answered = False
        for kind in ("Compute", "Graphics"):
            name = "nvmlDeviceGet%sRunningProcesses" % kind
            found = self._ask.ask("processes", (name + "_v3",), (name + "_v2",), (name,))
            if found is None:
                continue
            answered = True
            for process in found:
                # Under MIG one process holds memory in several instances.
                key = (
                    int(process.pid),
                    getattr(process, "gpuInstanceId", None),
                    getattr(process, "computeInstanceId", None),
                )
                parts[key] = _larger(parts.get(key), _process_memory(process.usedGpuMemory))
        if not answered:
            return None
        memory: Dict[int, Optional[int]] = {}
        for (pid, _, _), used in parts.items():
            before = memory.get(pid)
            memory[pid] = used if before is None else before if used is None else before + used
        return [{"pid": pid, "memory_bytes": used} for pid, used in sorted(memory.items())]


def _text(value: Any) -> Optional[str]:
    """Old pynvml gives bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def _watts(milliwatts: Any) -> Optional[float]:
    return None if milliwatts is None else milliwatts / 1000.0


def _process_memory(value: Any) -> Optional[int]:
    return None if value is None or value >= NO_MEMORY_FIGURE else int(value)


def _larger(one: Optional[int], other: Optional[int]) -> Optional[int]:
    known = [value for value in (one, other) if value is not None]
    return max(known) if known else None
