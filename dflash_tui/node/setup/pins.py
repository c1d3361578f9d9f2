"""What goes into each environment, and how much room that takes. The only place where versions are pinned for nodes.

The extras of pyproject.toml give the ranges that the code works with; a test sees that these pins lie in them.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from typing import List, Tuple

from dflash_tui.node.setup.spec import SetupSpec

OLDEST_PYTHON = (3, 11)  # what `backends` is written for
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.19.0"  # speculators 0.9.0 takes none newer
WORKER = (TORCH, TRANSFORMERS, "datasets==5.1.0", "safetensors==0.8.0", "numpy==2.4.6")
KERNELS = ("flash-linear-attention==0.6.0",)
TRAINER = (TORCH, TRANSFORMERS, "speculators==0.9.0", "tensorboard>=2.20")
# Torch's wheels on PyPI since 2.11 are built for CUDA 13, which needs this driver.
OLDEST_DRIVER = 580

_GB = 10**9
# Unpacked and downloaded together, measured and rounded up.
_BYTES = {"worker": (2 * _GB, 10 * _GB), "trainer": (3 * _GB, 11 * _GB), "vllm": (14 * _GB, 14 * _GB)}
_BYTES_OF_OWN_PINS = 64 * 10**6
_SMI_S = 10.0


@dataclass(frozen=True)
class Wanted:
    """An environment as it shall be. bytes: what it may take of the disk while it is made."""

    name: str
    requirements: Tuple[str, ...]
    bytes: int

    @property
    def leaves_torchvision(self) -> bool:
        """Whether torchvision may stay beside a CPU build of torch: where vLLM needs it, or somebody asked for it."""
        return self.name.startswith("vllm") or any(name_of(pin).startswith("torchvision") for pin in self.requirements)


def wanted(spec: SetupSpec, driver: str) -> List[Wanted]:
    """The environments of a spec on a node with that NVIDIA driver ("" where there is none)."""
    cuda = bool(driver)
    pins = {
        "worker": WORKER + (KERNELS if cuda else ()),
        "trainer": TRAINER,
        "vllm-%s" % spec.vllm: ("vllm==%s" % spec.vllm,),
    }
    found = []
    for name in spec.names:
        if name in spec.pins:
            found.append(Wanted(name, tuple(spec.pins[name]), _BYTES_OF_OWN_PINS))
            continue
        requirements = tuple(_torch(spec) if pin == TORCH else pin for pin in pins[name])
        found.append(Wanted(name, requirements, _BYTES[name.partition("-")[0]][cuda]))
    return found


def _torch(spec: SetupSpec) -> str:
    if not spec.torch:
        return TORCH
    return spec.torch if spec.torch.startswith("torch") else "torch==%s" % spec.torch


def name_of(requirement: str) -> str:
    """The distribution that a requirement names, as PEP 503 writes it."""
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else requirement


def driver_version() -> str:
    """The NVIDIA driver's version, as 580.95.05; "" where this node has no GPU that can be seen."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SMI_S,
            check=False,
        )
        first = asked.stdout.decode("utf-8", "replace").strip().splitlines()[:1]
        if asked.returncode == 0 and first and re.match(r"\d+\.", first[0]):
            return first[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        pass  # then the kernel's own word counts
    try:
        # A container without GPUs sees the host's driver too, but none of its devices.
        if any(re.match(r"nvidia\d+\Z", name) for name in os.listdir("/dev")):
            with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
                found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", file.read())
            return found.group(1) if found else ""
    except OSError:
        pass
    return ""
