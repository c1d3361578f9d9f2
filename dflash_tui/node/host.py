"""The machine itself: processor, memory, load, file systems, disks and network, from /proc and cgroups.

Formats: proc(5), the kernel's admin-guide/iostats and cgroup-v2. A field whose source is missing is None; a rate is None
until there are two readings, and where a counter went backwards.
"""

import os
import re
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from dflash_tui.node.disks import Disks

SECTOR = 512  # of /proc/diskstats, whatever the device has
PARTITION = re.compile(r"p?\d+$")
STACKED = ("dm-", "md", "loop", "ram", "zram", "sr", "fd")  # these count what another device counts too, or no disk
V1_NO_LIMIT = 1 << 60

Value = TypeVar("Value")
Rates = Tuple[Optional[float], Optional[float]]


def _or_none(nothing: Any, ask: Callable[[], Value]) -> Value:
    """The answer, or `nothing` where the source is not as we know it: an odd file must not hide the others."""
    try:
        return ask()
    except (ValueError, IndexError):
        return nothing  # type: ignore[no-any-return]  # the caller's own


class Host:
    """Reads the machine under `root`; keeps the last counters, for the rates."""

    def __init__(
        self,
        root: str = "/",
        disks: Optional[Disks] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._disks = disks if disks is not None else Disks(root)
        self._clock = clock
        self._cpu: Optional[Tuple[float, float]] = None
        self._counters: Dict[str, Tuple[float, Optional[Tuple[float, float]]]] = {}

    def read(self) -> Dict[str, Any]:
        """The fields of `fleet.facts.HostMetrics`."""
        count, percent = _or_none((None, None), self._processor)
        load = _or_none([None, None, None], self._load)
        used, total = _or_none((None, None), self._memory)
        swap_used, swap_total = _or_none((None, None), self._swap)
        disk_read, disk_write = self._rates("disk", _or_none(None, self._disk_bytes))
        receive, send = self._rates("net", _or_none(None, self._net_bytes))
        return {
            "cpu_count": count,
            "cpu_percent": percent,
            "load_1": load[0],
            "load_5": load[1],
            "load_15": load[2],
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "swap_used_bytes": swap_used,
            "swap_total_bytes": swap_total,
            "disks": self._disks.read(),
            "disk_read_bytes_per_s": disk_read,
            "disk_write_bytes_per_s": disk_write,
            "net_receive_bytes_per_s": receive,
            "net_send_bytes_per_s": send,
            "uptime_s": _or_none(None, self._uptime),
        }

    def _text(self, path: str) -> str:
        """The file's text, "" where it cannot be read."""
        try:
            with open(os.path.join(self._root, path), "rb") as file:
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _processor(self) -> Tuple[Optional[int], Optional[float]]:
        lines = self._text("proc/stat").splitlines()
        count = sum(1 for line in lines if re.match(r"cpu\d", line)) or None
        fields = lines[0].split()[1:9] if lines and lines[0].startswith("cpu ") else []
        if len(fields) < 5:
            return count, None
        # user nice system idle iowait irq softirq steal; guests are counted in user already.
        ticks = [float(field) for field in fields]
        all_ticks, idle = sum(ticks), ticks[3] + ticks[4]
        before, self._cpu = self._cpu, (all_ticks, idle)
        if before is None or all_ticks <= before[0]:
            return count, None
        busy = 1.0 - (idle - before[1]) / (all_ticks - before[0])
        return count, round(min(max(100.0 * busy, 0.0), 100.0), 2)

    def _load(self) -> List[Optional[float]]:
        fields = self._text("proc/loadavg").split()
        return [float(field) for field in fields[:3]] if len(fields) >= 3 else [None, None, None]

    def _uptime(self) -> Optional[float]:
        fields = self._text("proc/uptime").split()
        return float(fields[0]) if fields else None

    def _meminfo(self) -> Dict[str, int]:
        found = {}
        for line in self._text("proc/meminfo").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                found[name] = int(words[0]) * 1024
        return found

    def _memory(self) -> Tuple[Optional[int], Optional[int]]:
        info = self._meminfo()
        total = info.get("MemTotal")
        available = info.get("MemAvailable")
        used = total - available if total is not None and available is not None else None
        limit, inside = self._container_memory()
        if limit is not None and (total is None or limit < total):
            return inside, limit
        return used, total

    def _swap(self) -> Tuple[Optional[int], Optional[int]]:
        info = self._meminfo()
        total, free = info.get("SwapTotal"), info.get("SwapFree")
        return (None if total is None or free is None else total - free), total

    def _container_memory(self) -> Tuple[Optional[int], Optional[int]]:
        """(the lowest limit over us, what is used under it without the cache that can be dropped)."""
        lowest: Tuple[Optional[int], Optional[int]] = (None, None)
        for folder, names in self._memory_groups():
            limit = self._number(os.path.join(folder, names[0]))
            if limit is None or limit >= V1_NO_LIMIT or (lowest[0] is not None and limit >= lowest[0]):
                continue
            used = self._number(os.path.join(folder, names[1]))
            if used is not None:
                for line in self._text(os.path.join(folder, "memory.stat")).splitlines():
                    if line.startswith(names[2] + " "):
                        used = max(used - int(line.split()[1]), 0)
            lowest = (limit, used)
        return lowest

    def _memory_groups(self) -> List[Tuple[str, Tuple[str, str, str]]]:
        """Our cgroup and all above it, with the names of its files in version 2 or 1."""
        groups = []
        for line in self._text("proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                base, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                base = "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            # In a container the path may be the host's: what is missing is passed over, the top is always asked.
            parts = [part for part in path.split("/") if part and part != ".."]
            groups += [(os.path.join(base, *parts[:length]), names) for length in range(len(parts), -1, -1)]
        return groups

    def _number(self, path: str) -> Optional[int]:
        text = self._text(path).strip()
        return int(text) if text.isdigit() else None

    def _rates(self, name: str, totals: Optional[Tuple[float, float]]) -> Rates:
        now = self._clock()
        before = self._counters.get(name)
        self._counters[name] = (now, totals)
        if before is None or before[1] is None or totals is None or now <= before[0]:
            return None, None
        rates = [(after - earlier) / (now - before[0]) for after, earlier in zip(totals, before[1])]
        return (
            rates[0] if rates[0] >= 0 else None,
            rates[1] if rates[1] >= 0 else None,
        )

    def _disk_bytes(self) -> Optional[Tuple[float, float]]:
        """Bytes read and written by whole disks since boot."""
        rows = [line.split() for line in self._text("proc/diskstats").splitlines()]
        rows = [row for row in rows if len(row) >= 10]
        names = {row[2] for row in rows}
        if not names:
            return None
        read = written = 0
        for row in rows:
            name = row[2]
            whole = PARTITION.sub("", name) not in names - {name}
            if whole and not name.startswith(STACKED):
                read += int(row[5]) * SECTOR
                written += int(row[9]) * SECTOR
        return float(read), float(written)

    def _net_bytes(self) -> Optional[Tuple[float, float]]:
        """Bytes received and sent by real interfaces, or by all but lo where none is real (containers)."""
        found = {}
        for line in self._text("proc/net/dev").splitlines():
            name, colon, rest = line.partition(":")
            fields = rest.split()
            if colon and len(fields) >= 9 and name.strip() != "lo":
                found[name.strip()] = (float(fields[0]), float(fields[8]))
        if not found:
            return None
        # A bridge, a bond or a tunnel counts once more what its device counts.
        real = [name for name in found if os.path.exists(os.path.join(self._root, "sys/class/net", name, "device"))]
        chosen = [found[name] for name in real or found]
        return sum(pair[0] for pair in chosen), sum(pair[1] for pair in chosen)
