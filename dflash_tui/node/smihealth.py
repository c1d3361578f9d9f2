"""What `nvidia-smi --query-gpu` tells of a card beside its load, for nodes without NVML.

One field that a version does not know makes nvidia-smi refuse the whole query and name it: the field is then asked for by
its other name or left out, and the query is asked again.
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from dflash_tui.node.nvmlhealth import COMPUTE_MODES, reason_names

# Field, and what it is called in other versions.
FIELDS: Tuple[Tuple[str, ...], ...] = (
    ("index",),
    ("pci.bus_id",),
    ("pstate",),
    ("persistence_mode",),
    ("compute_mode",),
    ("fan.speed",),
    ("temperature.memory",),
    ("power.default_limit",),
    ("power.max_limit",),
    ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    ("ecc.mode.current",),
    ("ecc.mode.pending",),
    ("ecc.errors.corrected.volatile.total",),
    ("ecc.errors.uncorrected.volatile.total",),
    ("ecc.errors.corrected.aggregate.total",),
    ("ecc.errors.uncorrected.aggregate.total",),
    ("retired_pages.single_bit_ecc.count", "retired_pages.sbe"),
    ("retired_pages.double_bit.count", "retired_pages.dbe"),
    ("retired_pages.pending",),
    ("remapped_rows.correctable",),
    ("remapped_rows.uncorrectable",),
    ("remapped_rows.pending",),
    ("remapped_rows.failure",),
    ("pcie.link.gen.current", "pcie.link.gen.gpucurrent"),
    ("pcie.link.gen.max",),
    ("pcie.link.width.current",),
    ("pcie.link.width.max",),
    ("mig.mode.current",),
    ("mig.mode.pending",),
)
NEWEST: Tuple[Tuple[str, str], ...] = tuple([(names[0], names[0]) for names in FIELDS])
REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
# Fields that came into nvidia-smi together: where one is not known, none is.
TOGETHER = ("remapped_rows.", "mig.mode.")
YES, NO = ("Yes", "Enabled", "Active"), ("No", "Disabled", "Not Active")
Row = Dict[str, str]


class Query(NamedTuple):
    """The fields that this nvidia-smi knows, as far as we have heard: pairs of our name and the one to ask by."""

    fields: Tuple[Tuple[str, str], ...] = NEWEST

    @property
    def argument(self) -> str:
        return "--query-gpu=" + ",".join(asked for _, asked in self.fields)

    def without(self, said: str) -> Optional["Query"]:
        """The query that avoids the field which `said` names as unknown, or None where it names none of ours."""
        match = REFUSED.search(said)
        if match is None:
            return None
        other = {names[0]: names for names in FIELDS}
        for place, (name, asked) in enumerate(self.fields):
            if asked != match.group(1) or place == 0:
                continue
            names = other[name]
            left = names[names.index(asked) + 1 :]
            new = ((name, left[0]),) if left else ()
            rest = self.fields[place + 1 :]
            for family in TOGETHER:
                if name.startswith(family):
                    rest = tuple(pair for pair in rest if not pair[0].startswith(family))
            return Query(self.fields[:place] + new + rest)
        return None

    def rows(self, text: str) -> List[Row]:
        """The rows of an answer by our names of the fields."""
        found = []
        for line in text.splitlines():
            values = [value.strip() for value in line.split(",")]
            if len(values) == len(self.fields) and values[0].isdigit():
                found.append(dict(zip((name for name, _ in self.fields), values)))
        return found


def health(row: Row) -> Dict[str, Any]:
    """The groups of one card, as `nvmlhealth` gives them; what is not in the row is None."""
    yes, number, count = (_of(row, kind) for kind in (_yes, _number, _count))
    bits = row.get("clocks_event_reasons.active", "")
    state = re.match(r"P(\d+)$", row.get("pstate", ""))
    mode = row.get("compute_mode", "").lower().replace("_", " ")
    enabled, pending = yes("mig.mode.current"), yes("mig.mode.pending")
    bus = row.get("pci.bus_id", "").lower()
    return {
        "pci_bus_id": bus if re.match(r"[0-9a-f]+:[0-9a-f]{2}:", bus) else None,
        "performance_state": int(state.group(1)) if state else None,
        "persistence": yes("persistence_mode"),
        "compute_mode": mode if mode in COMPUTE_MODES else None,
        "fan_percent": number("fan.speed"),
        "memory_temperature_celsius": number("temperature.memory"),
        "power_limit_default_watts": number("power.default_limit"),
        "power_limit_max_watts": number("power.max_limit"),
        "clock_reasons": reason_names(int(bits, 16)) if re.match(r"0x[0-9a-fA-F]+$", bits) else None,
        "ecc": _group(
            enabled=yes("ecc.mode.current"),
            pending=yes("ecc.mode.pending"),
            volatile_corrected=count("ecc.errors.corrected.volatile.total"),
            volatile_uncorrected=count("ecc.errors.uncorrected.volatile.total"),
            aggregate_corrected=count("ecc.errors.corrected.aggregate.total"),
            aggregate_uncorrected=count("ecc.errors.uncorrected.aggregate.total"),
        ),
        "retired_pages": _group(
            single_bit=count("retired_pages.single_bit_ecc.count"),
            double_bit=count("retired_pages.double_bit.count"),
            pending=yes("retired_pages.pending"),
        ),
        "remapped_rows": _group(
            correctable=count("remapped_rows.correctable"),
            uncorrectable=count("remapped_rows.uncorrectable"),
            pending=yes("remapped_rows.pending"),
            failure=yes("remapped_rows.failure"),
        ),
        "pcie": _group(
            generation=count("pcie.link.gen.current"),
            generation_max=count("pcie.link.gen.max"),
            width=count("pcie.link.width.current"),
            width_max=count("pcie.link.width.max"),
            replays=None,
            send_bytes_per_s=None,
            receive_bytes_per_s=None,
        ),
        # Its instances stand in no table of nvidia-smi: None, which is not "there are none".
        "mig": None if enabled is None else {"enabled": enabled, "pending": pending, "instances": None},
    }


def _of(row: Row, kind: Any) -> Any:
    return lambda name: kind(row.get(name, ""))


def _yes(text: str) -> Optional[bool]:
    """nvidia-smi says "Yes" and "Enabled", and counts of pending rows or pages as numbers in some versions."""
    if text in YES or text in NO:
        return text in YES
    return int(text) > 0 if text.isdigit() else None


def _number(text: str) -> Optional[float]:
    return float(text) if re.match(r"-?\d+(\.\d+)?$", text) else None


def _count(text: str) -> Optional[int]:
    return int(text) if text.isdigit() else None


def _group(**values: Any) -> Optional[Dict[str, Any]]:
    return values if any(value is not None for value in values.values()) else None
