"""This Python and its devices: what is installed, what is missing, whether CUDA can be had. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from backends.errors import JobError
from backends.spec import ExtractSpec, VerifySpec

PACKAGES = ("numpy", "torch", "transformers", "datasets", "safetensors")
# Packed attention needs this Transformers' names for the boundaries, and this torch's grouped attention.
_OLDEST = {"transformers": (5, 16), "torch": (2, 6)}
_INSTALL = "install torch, transformers, datasets and safetensors into it, or name another Python for workers"
_TORCHVISION = "uninstall torchvision (nothing here needs it) or install the build that belongs to this torch"


def versions() -> dict[str, str | None]:
    """Versions of this Python and of what it has installed, from their metadata alone."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def require_packages() -> None:
    """Raises JobError where this Python lacks a package or has one too old. Imports none of them."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise JobError(f"the Python {sys.executable} has no {name}", _INSTALL)
    for name, oldest in _OLDEST.items():
        version = versions()[name] or ""
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers and numbers < oldest:
            least = ".".join(map(str, oldest))
            raise JobError(
                f"the Python {sys.executable} has {name} {version}", f"install {name} {least} or later into it"
            )


def import_remedy(error: BaseException) -> tuple[str, str]:
    """What an import that failed means to the user, and what to do, one line each."""
    for cause in _causes(error):
        if "torchvision" in str(cause):
            return f"torchvision does not fit this torch in the Python {sys.executable} ({cause})", _TORCHVISION
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the Python {sys.executable} has no {error.name.partition('.')[0]}", _INSTALL
    return f"the Python {sys.executable} cannot import what the job needs: {error}", _INSTALL


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def torchvision_warnings() -> list[str]:
    """A torchvision built for another torch makes every model class of Transformers fail to import."""
    try:
        vision, torch = (importlib.metadata.version(name) for name in ("torchvision", "torch"))
    except importlib.metadata.PackageNotFoundError:
        return []
    if vision.partition("+")[2] == torch.partition("+")[2]:
        return []
    return [f"torchvision {vision} beside torch {torch} may keep every model from loading: {_TORCHVISION}"]


def device_of(spec: ExtractSpec | VerifySpec) -> str:
    """ "cuda" or "cpu". Raises JobError where CUDA is asked for and cannot be."""
    if spec.device == "cpu":
        if spec.gpus:
            raise JobError("device is cpu but GPUs were chosen", "leave one of the two out")
        return "cpu"
    if spec.device == "auto" and not spec.gpus:
        return "cpu"
    remedy = "choose device cpu, or a node and a Python with CUDA"
    if _torch_cuda() is None:
        raise JobError(f"the torch {versions()['torch']} of {sys.executable} was built without CUDA", remedy)
    if not cuda_devices():
        raise JobError("no CUDA device is visible on this machine", remedy)
    return "cuda"


def _torch_cuda() -> str | None:
    """CUDA's version that torch was built for, read from torch/version.py; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        text = Path(folder, "version.py").read_text(encoding="utf-8")
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        if match:
            return match.group(1)
    return None


def cuda_devices() -> int:
    """CUDA devices that the driver shows, asked of the driver itself; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return 0
    return number.value


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver takes, None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < 1000:
        return None
    return version.value // 1000, version.value % 1000 // 10


def cuda_cards(uuids: Sequence[str] = ()) -> tuple[tuple[int, int], ...]:
    """Compute capability of each card that the driver shows; of those with these UUIDs where some are given and seen."""
    found = cards_by_uuid()
    return tuple(found[one] for one in uuids if one in found) or tuple(found.values())


def cards_by_uuid() -> dict[str, tuple[int, int]]:
    """Compute capability of each card that the driver shows, in its order."""
    shown = cuda_devices()
    if not shown:
        return {}
    driver = ctypes.CDLL("libcuda.so.1")
    found: dict[str, tuple[int, int]] = {}
    for index in range(shown):
        device, number = ctypes.c_int(0), ctypes.c_int(0)
        name = ctypes.create_string_buffer(16)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid(name, device):
            continue
        numbers = [
            number.value
            for attribute in (75, 76)  # compute capability, major and minor: cuda.h
            if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0
        ]
        if len(numbers) == 2:
            found[f"GPU-{uuid.UUID(bytes=name.raw)}"] = (numbers[0], numbers[1])
    return found
