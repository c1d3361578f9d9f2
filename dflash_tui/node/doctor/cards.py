"""The GPUs as the driver tells of them: driver, its CUDA, every card, compute mode and MIG.

`read` runs in a process of its own, for a driver that hangs hangs whoever asks it; `judge` makes checks of what it said.
"""

import os
import subprocess
import xml.etree.ElementTree as xml
from typing import Any, Dict, List, Optional, Tuple

from dflash_tui.node import smi
from dflash_tui.node.doctor.checks import OK, PROBLEM, UNKNOWN, WARNING, Check, size
from dflash_tui.node.metrics import Gpus
from dflash_tui.node.nvml import Nvml, load

Facts = Dict[str, Any]

_XML_LIMIT_S = 15.0
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor and class
_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}  # nvml.h


class _Opened:
    """NVML opened once, for the cards and for the questions about the driver."""

    def __init__(self) -> None:
        self.module: Any = None

    def open(self) -> Nvml:
        module = load()
        found = Nvml(module)
        self.module = module
        return found


def read() -> Facts:
    """driver, cuda ([major, minor]), cards (as `metrics` tells them), modes ([[index, compute mode, MIG on]]), source,
    error, hardware (cards on the bus), module (the kernel has a driver). None where the driver does not say.
    """
    opened = _Opened()
    gpus = Gpus(open_nvml=opened.open)
    reading = gpus.read()
    gpus.close()
    facts: Facts = {
        "driver": None,
        "cuda": None,
        "cards": reading.gpus,
        "modes": [],
        "source": reading.source,
        "error": reading.error,
        "hardware": hardware(),
        "module": os.path.exists("/proc/driver/nvidia/version"),
    }
    if reading.source == "nvml" and opened.module is not None:
        ask_nvml(opened.module, facts)
    elif reading.source == "nvidia-smi":
        ask_smi(facts)
    return facts


def hardware(root: str = "/") -> Optional[int]:
    """NVIDIA's display and compute cards on the PCI bus, with a driver or without; None where the bus cannot be seen."""
    folder = os.path.join(root, "sys/bus/pci/devices")
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    found = 0
    for name in names:
        try:
            with open(os.path.join(folder, name, "vendor"), encoding="ascii") as vendor:
                if vendor.read().strip().lower() != _NVIDIA:
                    continue
            with open(os.path.join(folder, name, "class"), encoding="ascii") as kind:
                found += kind.read().strip().lower().startswith(_DISPLAY)
        except (OSError, ValueError):
            continue
    return found


def ask_nvml(module: Any, facts: Facts) -> None:
    """Adds what NVML says of the driver and of each card's modes; what it cannot say stays None."""

    failures = (module.NVMLError, AttributeError, getattr(module, "NVMLLibraryMismatchError", AttributeError))

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(module, name)(*arguments)
        except failures:
            return None

    driver = ask("nvmlSystemGetDriverVersion")
    facts["driver"] = driver.decode("ascii", "replace") if isinstance(driver, bytes) else driver
    version = ask("nvmlSystemGetCudaDriverVersion_v2") or ask("nvmlSystemGetCudaDriverVersion")
    facts["cuda"] = [version // 1000, version % 1000 // 10] if isinstance(version, int) else None
    for card in facts["cards"]:
        handle = ask("nvmlDeviceGetHandleByIndex", card["index"])
        mode = None if handle is None else ask("nvmlDeviceGetComputeMode", handle)
        mig = None if handle is None else ask("nvmlDeviceGetMigMode", handle)
        compute = None if mode is None else _COMPUTE_MODES.get(mode)
        facts["modes"].append([card["index"], compute, None if mig is None else bool(mig[0])])


def ask_smi(facts: Facts) -> None:
    """The same from `nvidia-smi -q -x`."""
    program = smi.find()
    if program is None:
        return
    try:
        done = subprocess.run(
            [program, "-q", "-x"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_XML_LIMIT_S, check=False
        )
        log = xml.fromstring(done.stdout)
    except (OSError, subprocess.TimeoutExpired, xml.ParseError):
        return
    facts["driver"] = log.findtext("driver_version")
    numbers = (log.findtext("cuda_version") or "").split(".")
    facts["cuda"] = [int(number) for number in numbers[:2]] if all(map(str.isdigit, numbers[:2])) else None
    by_uuid = {gpu.findtext("uuid"): gpu for gpu in log.iter("gpu")}
    for card in facts["cards"]:
        gpu = by_uuid.get(card.get("uuid"))
        if gpu is not None:
            mig = gpu.findtext("mig_mode/current_mig")
            sliced = {"Enabled": True, "Disabled": False}.get(mig or "")
            facts["modes"].append([card["index"], gpu.findtext("compute_mode"), sliced])


def usable(facts: Facts) -> Optional[int]:
    """How many cards answer; None where nobody could say."""
    if facts.get("cards") is None:
        return None
    cards = [card for card in facts["cards"] if not card.get("error")]
    return None if facts.get("error") and not cards else len(cards)


def judge(facts: Facts, late_s: Optional[float]) -> List[Check]:
    """The checks of what `read` said; `late_s`: it had not answered by then."""
    if "cards" not in facts:
        if late_s is not None:
            remedy = "see `dmesg` for NVRM and Xid lines; a driver that hangs needs a reboot"
            return [Check("GPUs", PROBLEM, "the NVIDIA driver did not answer within %g s" % late_s, remedy)]
        return [Check("GPUs", UNKNOWN, "the GPUs could not be asked: %s" % (facts.get("failed") or "no answer"))]
    return [*_driver(facts), _count(facts), *_modes(facts["modes"])]


def _driver(facts: Facts) -> List[Check]:
    if not facts["driver"]:
        return []
    cuda = facts["cuda"]
    about = "NVIDIA %s, for CUDA up to %d.%d" % (facts["driver"], *cuda) if cuda else "NVIDIA %s" % facts["driver"]
    return [Check("driver", OK, about)]


def _count(facts: Facts) -> Check:
    cards, error, hardware_count = facts["cards"], facts["error"], facts["hardware"]
    if error:
        remedy = (
            "reboot the node, or load the driver's module anew"
            if "mismatch" in error.lower()
            else ("see `nvidia-smi` and `dmesg` on the node")
        )
        return Check("GPUs", PROBLEM, error, remedy)
    if cards:
        kinds: Dict[Tuple[str, str], int] = {}
        for card in cards:
            memory = card.get("memory_total_bytes")
            kind = card.get("name") or "unnamed", size(memory) if memory else "memory N/A"
            kinds[kind] = kinds.get(kind, 0) + 1
        found = ", ".join("%d x %s (%s)" % (count, name, memory) for (name, memory), count in kinds.items())
        if hardware_count is not None and hardware_count > len(cards):
            # A container that was given a part of the node's cards sees the others there, too.
            found += "; %d are on the bus" % hardware_count
        return Check("GPUs", OK, found)
    if hardware_count or facts["module"]:
        remedy = "install NVIDIA's driver, or start the container with --gpus all"
        return Check(
            "GPUs",
            PROBLEM,
            "%s NVIDIA cards on the bus, and no driver to use" % (hardware_count or "there are"),
            remedy,
        )
    return Check("GPUs", WARNING, "no GPU: CPU only", "fine for small models; for more take a node that has GPUs")


def _modes(modes: List[List[Any]]) -> List[Check]:
    checks = []
    for mode in ("Prohibited", "Exclusive_Process", "Exclusive_Thread"):
        indices = [str(index) for index, compute, _ in modes if compute == mode]
        if not indices:
            continue
        remedy = "`nvidia-smi -i %s -c DEFAULT` as root" % ",".join(indices)
        found = "GPU %s: %s" % (", ".join(indices), mode)
        if mode == "Prohibited":
            checks.append(Check("compute mode", PROBLEM, found + ", no program may use it", remedy))
        else:
            checks.append(Check("compute mode", WARNING, found + ", one process a card", remedy))
    sliced = [str(index) for index, _, mig in modes if mig]
    if sliced:
        found = "on for GPU %s: a job can take whole cards only" % ", ".join(sliced)
        remedy = "`nvidia-smi -i %s -mig 0` as root, or use others" % ",".join(sliced)
        checks.append(Check("MIG", WARNING, found, remedy))
    return checks
