"""GPUs by NVML, through `pynvml`: what the driver says, card by card and field by field.

`pynvml` is one pure-Python file of the bundle; the library behind it, `libnvidia-ml.so.1`, comes with the driver and may
be missing. A field that a card cannot give is None. A card that is lost stays in the list, with `error`.
"""

import os
from typing import Any, Callable, Dict, List, Optional, Tuple

Attempt = Tuple[Any, ...]

# NVML's return codes, nvml.h.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 25
DEPRECATED = 26

# Another entry point may know: the driver and pynvml are of different ages.
OTHER_ENTRY_POINT = (INVALID_ARGUMENT, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED)
# The card has no such thing, or hides it: "not available" and no fault.
NOT_AVAILABLE = (NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, *OTHER_ENTRY_POINT)
CARD_GONE = (GPU_IS_LOST, RESET_REQUIRED)

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

    def __init__(self, module: Any = None) -> None:
        self._nvml = module if module is not None else load()
        self._known: Dict[int, Dict[str, Any]] = {}
        try:
            self._init()
        except self._nvml.NVMLError as error:
            installed = error.value not in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)
            raise NvmlUnavailable("NVML: %s" % error, installed) from error

    def _init(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if error.value != LIBRARY_NOT_FOUND:
                raise
            _load_library_from_odd_folders()
            self._nvml.nvmlInit()

    def close(self) -> None:
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
        return [self._card(index) for index in range(count)]

    def _card(self, index: int) -> Dict[str, Any]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            return blank_card(index, error=str(error), **self._known.get(index, {}))
        card = _Questions(self._nvml, handle).card(index)
        # A lost card no longer tells its name; it had one.
        known = {key: card[key] for key in ("uuid", "name", "memory_total_bytes") if card[key] is not None}
        self._known.setdefault(index, {}).update(known)
        return dict(card, **self._known[index])


def blank_card(index: int, error: Optional[str] = None, **known: Any) -> Dict[str, Any]:
    """A card of which nothing is known but `known`: the fields of `fleet.facts.Gpu`."""
    card: Dict[str, Any] = {
        "index": index,
        "uuid": None,
        "name": None,
        "utilisation_percent": None,
        "memory_used_bytes": None,
        "memory_total_bytes": None,
        "power_watts": None,
        "power_limit_watts": None,
        "temperature_celsius": None,
        "sm_clock_mhz": None,
        "memory_clock_mhz": None,
        "processes": None,
        "error": error,
    }
    card.update(known)
    return card


class _Questions:
    """The questions to one card. The first fault is kept; a card that is gone is asked no further."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._gone = False
        self.error: Optional[str] = None

    def ask(self, what: str, *attempts: Attempt) -> Any:
        """The answer of the first entry point that this driver has, or None."""
        for name, *arguments in attempts:
            function: Optional[Callable[..., Any]] = getattr(self._nvml, name, None)
            if function is None or self._gone:
                continue
            try:
                return function(self._handle, *arguments)
            except self._nvml.NVMLError as error:
                if error.value in OTHER_ENTRY_POINT:
                    continue
                self._note(what, error)
                return None
            except getattr(self._nvml, "NVMLLibraryMismatchError", ()):
                continue  # what pynvml says instead of "function not found"
        return None

    def _note(self, what: str, error: Any) -> None:
        if error.value in CARD_GONE:
            self._gone = True
            self.error = str(error)
        elif error.value not in NOT_AVAILABLE and self.error is None:
            self.error = "%s: %s" % (what, error)

    def card(self, index: int) -> Dict[str, Any]:
        nvml = self._nvml
        card = blank_card(index)
        card["uuid"] = _text(self.ask("uuid", ("nvmlDeviceGetUUID",)))
        card["name"] = _text(self.ask("name", ("nvmlDeviceGetName",)))
        rates = self.ask("utilisation", ("nvmlDeviceGetUtilizationRates",))
        card["utilisation_percent"] = None if rates is None else float(rates.gpu)
        memory = self.ask("memory", *self._memory_attempts())
        if memory is not None:
            card["memory_used_bytes"] = int(memory.used)
            card["memory_total_bytes"] = int(memory.total)
        card["power_watts"] = _watts(self.ask("power", ("nvmlDeviceGetPowerUsage",)))
        limit = self.ask("power limit", ("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",))
        card["power_limit_watts"] = _watts(limit)
        sensor = nvml.NVML_TEMPERATURE_GPU
        heat = self.ask("temperature", ("nvmlDeviceGetTemperature", sensor), ("nvmlDeviceGetTemperatureV", sensor))
        card["temperature_celsius"] = None if heat is None else float(heat)
        card["sm_clock_mhz"] = self.ask("SM clock", ("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM))
        card["memory_clock_mhz"] = self.ask("memory clock", ("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM))
        card["processes"] = self._processes()
        card["error"] = self.error
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
            found = self.ask("processes", (name + "_v3",), (name + "_v2",), (name,))
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
