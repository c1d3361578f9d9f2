"""What NVML knows of a card beside its load: clocks held back, memory errors, its links, MIG, limits.

Each group is None where the card does not have it, and each is read as often as it changes and costs. Measured on an H200:
most calls take 2 to 10 us; the energy counter 3 ms, NVLink's counters 1 ms each, its error counters 0.7 ms a link and kind,
modes and limits 0.2 ms each; PCIe's traffic 21 ms a way, spent waiting.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

from dflash_tui.node.nvmlask import Field, Questions

SLOW_S = 10.0
RARE_S = 60.0
VERY_RARE_S = 120.0

# Bits of nvmlDeviceGetCurrentClocksEventReasons, nvml.h; the names are those of nvidia-smi.
CLOCK_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clocks_setting",
    "board_limit",
    "reliability",
)
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
NO_P_STATE = 32
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
SHUTDOWN, SLOWDOWN, MEMORY_MAX = 0, 1, 2  # kinds of nvmlDeviceGetTemperatureThreshold
SEND, RECEIVE = 0, 1  # of nvmlDeviceGetPcieThroughput, as the card sees it: it sends to the host
NVLINK_ACTIVE = 1

# Fields, NVML_FI_DEV_*.
RETIRED_SINGLE, RETIRED_DOUBLE, RETIRED_PENDING = (29, 0), (30, 0), (31, 0)
MEMORY_TEMPERATURE, ENERGY = (82, 0), (83, 0)
ALL_LINKS = 0xFFFFFFFF
NVLINK_SENT, NVLINK_RECEIVED = (138, ALL_LINKS), (139, ALL_LINKS)  # KiB of data since the driver was loaded
LINK_COUNT = (91, 0)
LINK_CRC_FLIT, LINK_CRC_DATA, LINK_REPLAY, LINK_RECOVERY = (38, 0), (45, 0), (52, 0), (59, 0)  # totals of all links
LINK_REPLAY_OF, LINK_RECOVERY_OF, LINK_CRC_OF = 161, 162, 163  # of one link, from Hopper on
KIBIBYTE = 1024


class Health:
    """Reads the groups of one card, each when its time has come, and keeps them between."""

    def __init__(self, ask: Questions, index: int, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._spread = (index % 8 + 1) / 8.0  # the cards of a node take turns
        self._kept: Dict[str, Any] = {}
        self._due: Dict[str, float] = {}
        self._rates = Rates()

    def fill(self, card: Dict[str, Any], pcie_turn: bool) -> None:
        """Adds every group to `card`. At its turn the card is also asked for its PCIe traffic, which blocks 20 ms a way."""
        ask = self._ask
        card["clock_reasons"] = clock_reasons(ask)
        card["performance_state"] = performance_state(ask)
        heat = ask.fields("memory temperature", (MEMORY_TEMPERATURE,))[MEMORY_TEMPERATURE]
        card["memory_temperature_celsius"] = _positive(heat)
        counted = self._keep("counters", SLOW_S, self._counters)
        card["energy_joules"] = counted["energy_joules"]
        card.update(self._keep("limits", RARE_S, limits) or {})
        card.update(self._keep("settings", SLOW_S, settings) or {})
        for key, period, read in (
            ("ecc", SLOW_S, ecc),
            ("remapped_rows", SLOW_S, remapped_rows),
            ("retired_pages", RARE_S, retired_pages),
        ):
            card[key] = self._keep(key, period, read)
        card["pcie"] = self._pcie(pcie_turn)
        card["nvlink"] = self._nvlink(counted)
        card["mig"] = self._mig()
        card["faults"] = list(ask.faults)

    def _keep(self, key: str, period: float, read: Callable[[Questions], Any]) -> Any:
        now = self._clock()
        due = self._due.get(key)
        if due is None or now >= due:
            # At the start, and after a pause, all cards are due at once.
            together = due is None or now > due + period / 2
            self._due[key] = now + period * (self._spread if together else 1.0)
            self._kept[key] = read(self._ask)
        return self._kept[key]

    def _pcie(self, turn: bool) -> Optional[Dict[str, Any]]:
        link = self._keep("pcie", SLOW_S, pcie_link)
        most = self._keep("pcie most", RARE_S, pcie_most)
        if turn:
            self._kept["pcie rates"] = pcie_rates(self._ask)
        rates = self._kept.get("pcie rates")
        known = {**(most or PCIE_MOST), **(link or PCIE_LINK), **(rates or PCIE_RATES)}
        return known if any(value is not None for value in known.values()) else None

    def _counters(self, ask: Questions) -> Dict[str, Any]:
        found = ask.fields("counters", (ENERGY, NVLINK_SENT, NVLINK_RECEIVED))
        now, energy = self._clock(), found[ENERGY]
        return {
            "energy_joules": None if energy is None else energy / 1000.0,
            "send_bytes_per_s": self._rates.of("sent", found[NVLINK_SENT], now, KIBIBYTE),
            "receive_bytes_per_s": self._rates.of("received", found[NVLINK_RECEIVED], now, KIBIBYTE),
        }

    def _nvlink(self, counted: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        count = self._keep("nvlink count", RARE_S, nvlink_count)
        links = self._keep("nvlink", SLOW_S, lambda ask: nvlink_states(ask, count))
        if links is None:
            return None
        rates = {key: counted[key] if any(links) else None for key in ("send_bytes_per_s", "receive_bytes_per_s")}
        errors = self._keep("nvlink errors", VERY_RARE_S, lambda ask: nvlink_errors(ask, links))
        return {"links": links, **rates, **errors}

    def _mig(self) -> Optional[Dict[str, Any]]:
        found = self._keep("mig", SLOW_S, mig)
        if found is None:
            return None
        instances = []
        for handle, instance in found["instances"]:
            memory = self._ask.ask("memory of a MIG instance", ("nvmlDeviceGetMemoryInfo",), of=handle)
            used = None if memory is None else int(memory.used)
            total = instance["memory_total_bytes"] if memory is None else int(memory.total)
            instances.append(dict(instance, memory_used_bytes=used, memory_total_bytes=total))
        return dict(found, instances=instances)


class Rates:
    """Counters as rates: what came since the last reading, over the time between."""

    def __init__(self) -> None:
        self._last: Dict[str, Tuple[int, float]] = {}

    def of(self, name: str, count: Optional[int], now: float, unit: int = 1) -> Optional[float]:
        """Units a second, or None at the first reading, after a reset of the counter, and where there is none."""
        before = self._last.pop(name, None)
        if count is None:
            return None
        self._last[name] = (count, now)
        if before is None or count < before[0] or now <= before[1]:
            return None
        return (count - before[0]) * unit / (now - before[1])


def reason_names(bits: int) -> List[str]:
    return [name for place, name in enumerate(CLOCK_REASONS) if bits >> place & 1]


def clock_reasons(ask: Questions) -> Optional[List[str]]:
    bits = ask.ask(
        "clock reasons",
        ("nvmlDeviceGetCurrentClocksEventReasons",),
        ("nvmlDeviceGetCurrentClocksThrottleReasons",),  # its name before driver 535
    )
    return None if bits is None else reason_names(bits)


def performance_state(ask: Questions) -> Optional[int]:
    state = ask.ask("performance state", ("nvmlDeviceGetPerformanceState",))
    return None if state is None or state >= NO_P_STATE else int(state)


def limits(ask: Questions) -> Dict[str, Any]:
    """Watts and degrees that the card is made for; a threshold of 0 degrees is one that it does not tell."""
    default = ask.ask("default power limit", ("nvmlDeviceGetPowerManagementDefaultLimit",))
    span = ask.ask("power limits", ("nvmlDeviceGetPowerManagementLimitConstraints",))
    found: Dict[str, Any] = {
        "power_limit_default_watts": None if default is None else default / 1000.0,
        "power_limit_max_watts": None if span is None else span[1] / 1000.0,
    }
    for name, kind in (("slowdown", SLOWDOWN), ("shutdown", SHUTDOWN), ("memory_max", MEMORY_MAX)):
        degrees = ask.ask("temperature limits", ("nvmlDeviceGetTemperatureThreshold", kind))
        found["temperature_%s_celsius" % name] = _positive(degrees)
    return found


def settings(ask: Questions) -> Dict[str, Any]:
    persistence = ask.ask("persistence mode", ("nvmlDeviceGetPersistenceMode",))
    mode = ask.ask("compute mode", ("nvmlDeviceGetComputeMode",))
    fan = ask.ask("fan", ("nvmlDeviceGetFanSpeed",))
    return {
        "persistence": None if persistence is None else bool(persistence),
        "compute_mode": COMPUTE_MODES[mode] if mode in range(len(COMPUTE_MODES)) else None,
        "fan_percent": None if fan is None else float(fan),
    }


def ecc(ask: Questions) -> Optional[Dict[str, Any]]:
    """Errors since the driver was loaded (volatile) and in the card's life (aggregate)."""
    mode = ask.ask("ECC mode", ("nvmlDeviceGetEccMode",))

    def total(kind: int, since: int) -> Any:
        return ask.ask("ECC errors", ("nvmlDeviceGetTotalEccErrors", kind, since))

    return _or_none(
        {
            "enabled": None if mode is None else bool(mode[0]),
            "pending": None if mode is None else bool(mode[1]),
            "volatile_corrected": total(CORRECTED, VOLATILE),
            "volatile_uncorrected": total(UNCORRECTED, VOLATILE),
            "aggregate_corrected": total(CORRECTED, AGGREGATE),
            "aggregate_uncorrected": total(UNCORRECTED, AGGREGATE),
        }
    )


def remapped_rows(ask: Questions) -> Optional[Dict[str, Any]]:
    """Rows of memory replaced by spare ones, from Ampere on."""
    rows = ask.ask("remapped rows", ("nvmlDeviceGetRemappedRows",))
    if rows is None:
        return None
    return {
        "correctable": int(rows[0]),
        "uncorrectable": int(rows[1]),
        "pending": bool(rows[2]),
        "failure": bool(rows[3]),
    }


def retired_pages(ask: Questions) -> Optional[Dict[str, Any]]:
    """Pages of memory taken out of use, before Ampere."""
    found = ask.fields("retired pages", (RETIRED_SINGLE, RETIRED_DOUBLE, RETIRED_PENDING))
    pending = found[RETIRED_PENDING]
    return _or_none(
        {
            "single_bit": found[RETIRED_SINGLE],
            "double_bit": found[RETIRED_DOUBLE],
            "pending": None if pending is None else bool(pending),
        }
    )


PCIE_LINK = {"generation": None, "width": None, "replays": None}
PCIE_MOST = {"generation_max": None, "width_max": None}
PCIE_RATES = {"send_bytes_per_s": None, "receive_bytes_per_s": None}


def pcie_link(ask: Questions) -> Dict[str, Any]:
    return {
        "generation": ask.ask("PCIe generation", ("nvmlDeviceGetCurrPcieLinkGeneration",)),
        "width": ask.ask("PCIe width", ("nvmlDeviceGetCurrPcieLinkWidth",)),
        "replays": ask.ask("PCIe replays", ("nvmlDeviceGetPcieReplayCounter",)),
    }


def pcie_most(ask: Questions) -> Dict[str, Any]:
    """The most that the card and its slot can do together."""
    return {
        "generation_max": ask.ask("PCIe generation", ("nvmlDeviceGetMaxPcieLinkGeneration",)),
        "width_max": ask.ask("PCIe width", ("nvmlDeviceGetMaxPcieLinkWidth",)),
    }


def pcie_rates(ask: Questions) -> Dict[str, Any]:
    """Bytes a second over 20 ms, told in KB."""
    send = ask.ask("PCIe traffic", ("nvmlDeviceGetPcieThroughput", SEND))
    receive = ask.ask("PCIe traffic", ("nvmlDeviceGetPcieThroughput", RECEIVE))
    return {
        "send_bytes_per_s": None if send is None else send * 1000.0,
        "receive_bytes_per_s": None if receive is None else receive * 1000.0,
    }


def nvlink_count(ask: Questions) -> int:
    return int(ask.fields("NVLink", (LINK_COUNT,))[LINK_COUNT] or 0)


def nvlink_states(ask: Questions, count: int) -> Optional[List[Optional[bool]]]:
    """Whether each link is up; None where the card has none."""
    links = []
    for link in range(count):
        state = ask.ask("NVLink", ("nvmlDeviceGetNvLinkState", link))
        links.append(None if state is None else state == NVLINK_ACTIVE)
    return links if any(link is not None for link in links) else None


def nvlink_errors(ask: Questions, links: List[Optional[bool]]) -> Dict[str, Any]:
    """Sums over all links; from Hopper on each link has counters of its own."""
    kinds = {
        "replay_errors": ((LINK_REPLAY,), LINK_REPLAY_OF),
        "recovery_errors": ((LINK_RECOVERY,), LINK_RECOVERY_OF),
        "crc_errors": ((LINK_CRC_FLIT, LINK_CRC_DATA), LINK_CRC_OF),
    }
    up = [number for number, active in enumerate(links) if active]
    wanted: List[Field] = []
    for totals, of_one in kinds.values():
        wanted += [*totals, *((of_one, link) for link in up)]
    found = ask.fields("NVLink errors", wanted)
    sums: Dict[str, Any] = {}
    for name, (totals, of_one) in kinds.items():
        single = [value for link in up for value in (found[of_one, link],) if value is not None]
        whole = [found[field] for field in totals if found[field] is not None]
        sums[name] = sum(single) if single else sum(whole) if whole else None
    return sums


def mig(ask: Questions) -> Optional[Dict[str, Any]]:
    """The mode, and each instance with its handle."""
    mode = ask.ask("MIG mode", ("nvmlDeviceGetMigMode",))
    if mode is None:
        return None
    instances = []
    if mode[0]:
        for place in range(ask.ask("MIG instances", ("nvmlDeviceGetMaxMigDeviceCount",)) or 0):
            handle = ask.ask("MIG instances", ("nvmlDeviceGetMigDeviceHandleByIndex", place))
            if handle is not None:
                instances.append((handle, _instance(ask, handle)))
    return {"enabled": bool(mode[0]), "pending": bool(mode[1]), "instances": instances}


def _instance(ask: Questions, handle: Any) -> Dict[str, Any]:
    name = _text(ask.ask("name of a MIG instance", ("nvmlDeviceGetName",), of=handle))
    return {
        "uuid": _text(ask.ask("UUID of a MIG instance", ("nvmlDeviceGetUUID",), of=handle)),
        # "NVIDIA H200 MIG 1g.18gb": the profile stands last.
        "profile": name.rpartition("MIG ")[2] if name is not None and "MIG " in name else name,
        "gpu_instance": ask.ask("id of a MIG instance", ("nvmlDeviceGetGpuInstanceId",), of=handle),
        "compute_instance": ask.ask("id of a MIG instance", ("nvmlDeviceGetComputeInstanceId",), of=handle),
        "memory_total_bytes": None,
    }


def _text(value: Any) -> Optional[str]:
    """Old pynvml gives bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def _positive(value: Any) -> Optional[float]:
    return None if value is None or value <= 0 else float(value)


def _or_none(group: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    return group if any(value is not None for value in group.values()) else None
