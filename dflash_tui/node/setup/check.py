"""Whether an environment can do what it is for: every package is whole on the disk, and what matters can be imported."""

import csv
import glob
import json
import os
import shutil
from typing import Any, Dict, List, Optional, Sequence, Set

from dflash_tui.node.setup.pins import name_of
from dflash_tui.node.setup.pip import Programs
from dflash_tui.node.setup.places import python_in
from dflash_tui.node.setup.spec import Refusal

_LIMIT_S = 600.0  # the first import of torch and transformers on a network disk takes minutes

# What is run for a distribution; the others need only be there. A model class loads what a lazy import would not.
IMPORTS = {
    "torch": "import torch; assert float(torch.ones(2, 2).sum()) == 4",
    "transformers": "from transformers import AutoTokenizer, Qwen3ForCausalLM",
    "datasets": "import datasets",
    "safetensors": "from safetensors import safe_open",
    "numpy": "import numpy; numpy.ones(2)",
    "speculators": "import speculators; from speculators import SpeculatorModel",
    "flash-linear-attention": "import fla",
    "tensorboard": "import tensorboard",
}

_SCRIPT = """
import importlib.metadata, json, sys
names, imports = json.loads(sys.argv[1])
found = {"versions": {}, "error": None, "package": None}
for name in names:
    try:
        found["versions"][name] = importlib.metadata.version(name)
        exec(imports.get(name, ""), {})
        if name == "torch":
            import torch
            found["versions"]["cuda"] = torch.version.cuda
            found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        while error.__cause__ or error.__context__:
            error = error.__cause__ or error.__context__
        found["package"], found["error"] = name, " ".join(("%s: %s" % (type(error).__name__, error)).split())[:400]
        break
print("dflash-tui-check " + json.dumps(found))
"""


def site_packages(folder: str) -> str:
    """The folder of an environment's packages; "" where it has none."""
    found = sorted(glob.glob(os.path.join(folder, "lib", "python3.*", "site-packages")))
    return found[0] if found else ""


def installed(folder: str) -> List[str]:
    """The names of the packages that lie in an environment, whole or not."""
    names = os.listdir(site_packages(folder)) if site_packages(folder) else []
    return [name_of(name[: -len(".dist-info")].rpartition("-")[0]) for name in names if name.endswith(".dist-info")]


def broken(folder: str) -> List[str]:
    """The dist-info folders of packages that a killed pip or a power loss left in pieces."""
    site = site_packages(folder)
    found = sorted(glob.glob(os.path.join(glob.escape(site), "*.dist-info"))) if site else []
    listed = {dist_info: _listed(dist_info) for dist_info in found}
    sizes: Dict[str, Set[int]] = {}
    for files in listed.values():
        for path, size in (files or {}).items():
            sizes.setdefault(path, set()).add(size)
    return [
        dist_info
        for dist_info, files in listed.items()
        if not files or not all(_there(os.path.join(site, path), sizes[path]) for path in files)
    ]


def mend(folder: str) -> List[str]:
    """Forgets what is in pieces, so that pip installs it anew; the names and versions, as numpy-2.4.6.

    pip takes a package for installed once its METADATA is there, whatever is missing of the rest.
    """
    found = broken(folder)
    for dist_info in found:
        shutil.rmtree(dist_info, ignore_errors=True)
    return [os.path.basename(dist_info)[: -len(".dist-info")] for dist_info in found]


def _listed(dist_info: str) -> Optional[Dict[str, int]]:
    """Path -> size (-1: not told) of the files of a package; None where pip did not come to the end of it."""
    try:
        with open(os.path.join(dist_info, "RECORD"), encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row and not row[0].endswith(".pyc")]
        # INSTALLER is pip's own, written after the files.
        if not os.path.isfile(os.path.join(dist_info, "INSTALLER")):
            return None
        return {row[0]: int(row[2]) if len(row) > 2 and row[2] else -1 for row in rows}
    except (OSError, ValueError):
        return None


def _there(path: str, sizes: Set[int]) -> bool:
    """Whether the file has one of the sizes: packages may bring the same file, and the last one's is there."""
    try:
        size = os.stat(path).st_size
    except OSError:
        return False
    return size in sizes or -1 in sizes


def check(programs: Programs, folder: str, name: str, requirements: Sequence[str], driver: str) -> Dict[str, Any]:
    """Versions of what was asked for. Raises Refusal with the cause, Interrupted."""
    names = [name_of(requirement) for requirement in requirements]
    python = python_in(folder)
    argument = json.dumps([names, IMPORTS])
    ended = programs.run([python, "-I", "-c", _SCRIPT, argument], limit_s=_LIMIT_S, quiet=True)
    told = [line for line in ended.lines if line.startswith("dflash-tui-check ")]
    if not told:
        last = ended.lines[-1] if ended.lines else "it ended with status %d" % ended.code
        raise Refusal(
            "the environment %s does not work: %s" % (name, last), "remove %s and run the setup again" % folder
        )
    found = json.loads(told[-1][len("dflash-tui-check ") :])
    versions: Dict[str, Any] = found["versions"]
    if found["error"]:
        raise _broken(folder, name, str(found["package"]), str(found["error"]), versions)
    if driver and versions.get("cuda") and not found.get("gpus"):
        raise Refusal(
            "torch %s of the environment %s is built for CUDA %s, and cannot use a GPU with driver %s"
            % (versions["torch"], name, versions["cuda"], driver),
            "name a build for an older CUDA with --torch (its index in the node's pip.conf), or renew the driver",
        )
    if "vllm" in names:
        _check_vllm(programs, folder, name)
    return versions


def _broken(folder: str, name: str, package: str, error: str, versions: Dict[str, Any]) -> Refusal:
    remedy = "name another version (--torch, --vllm, --pins); then only what changes is installed anew"
    if "torchvision" in error or "torchaudio" in error:
        remedy = "torchvision and torchaudio must fit torch %s: leave them out of --pins" % versions.get("torch", "")
    elif "cannot open shared object file" in error:
        remedy = "this system lacks that library: install its package (as root), then run the setup again"
    return Refusal("%s cannot be used in the environment %s: %s" % (package, name, error), remedy)


def _check_vllm(programs: Programs, folder: str, name: str) -> None:
    program = os.path.join(folder, "bin", "vllm")
    ended = programs.run([program, "--version"], limit_s=_LIMIT_S)
    if ended.code != 0:
        last = ended.lines[-1] if ended.lines else "it said nothing"
        raise Refusal(
            "`vllm --version` of the environment %s ended with status %d: %s" % (name, ended.code, last[:300]),
            "its log says more; another version may fit this node",
        )
