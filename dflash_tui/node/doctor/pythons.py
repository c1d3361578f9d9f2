"""What a Python's probe said, as checks: is it one for workers, does torch see the GPUs, do the packages fit."""

import shlex
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from dflash_tui.node.doctor.checks import OK, PROBLEM, UNKNOWN, WARNING, Check
from dflash_tui.node.launching import WORKER_PYTHON

Facts = Dict[str, Any]

NEEDED = ("torch", "transformers", "datasets", "safetensors")
# The oldest that `backends` takes; the oldest and the first too new of the "worker" extra.
OLDEST = {"torch": (2, 6), "transformers": (5, 16)}
TRIED_FROM = {"torch": (2, 11), "transformers": (5, 16, 1), "datasets": (4, 8), "safetensors": (0, 7)}
TOO_NEW = {"transformers": (5, 20)}
_OLDEST_VLLM_FOR_HYBRIDS = (0, 22)
# The driver that NVIDIA asks for by the major version of CUDA, and the build of torch for a driver of that major version.
_DRIVERS = {11: "450", 12: "525", 13: "580"}
_BUILDS = {11: "cu118", 12: "cu126", 13: "cu130"}


class Probed(NamedTuple):
    """facts: the lines of the probe, together. stage: the last that began. late_s: its limit, where it ran into it.

    code: its exit status, None where it was late. said: the last line of its errors.
    """

    python: str
    facts: Facts
    stage: str = ""
    late_s: Optional[float] = None
    code: Optional[int] = 0
    said: str = ""


class Node(NamedTuple):
    """What the checks of a Python must know of the node. gpus: how many answer, None where nobody knows."""

    gpus: Optional[int]
    cuda: Optional[Sequence[int]]
    setup: str  # the command that makes environments


def judge(probed: Probed, node: Node) -> List[Check]:
    """Every check of the worker Python; of one that is too old nothing more is said, for nothing in it would do."""
    python = _python(probed, node)
    if python.status == PROBLEM:
        return [python]
    packages = probed.facts.get("packages", {})
    missing = [name for name in NEEDED if not packages.get(name)]
    checks = [python]
    if missing:
        found = "%s has no %s" % (probed.python, ", ".join(missing))
        checks.append(Check("packages", PROBLEM, found, "%s, or %s" % (_install(probed, *missing), node.setup)))
    if packages.get("torch"):
        checks += _torch(probed, node)
    checks += _torchvision(probed)
    checks += [_package(name, probed) for name in NEEDED[1:] if packages.get(name)]
    return checks + (_kernels(probed, node) if packages.get("torch") else [])


def numbers(version: str) -> Tuple[int, ...]:
    """ "2.11.0+cu130" as (2, 11, 0)."""
    found: List[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _python(probed: Probed, node: Node) -> Check:
    name, facts = "worker Python", probed.facts
    remedy = "name another with --python, or make one: %s" % node.setup
    if "python" not in facts:
        if probed.late_s is not None:
            return Check(name, PROBLEM, "%s did not answer within %g s" % (probed.python, probed.late_s), remedy)
        why = probed.said or "it ended with status %s and said nothing" % probed.code
        return Check(name, PROBLEM, "%s does not run: %s" % (probed.python, why), remedy)
    version = tuple(facts["python"])
    found = "%s (%s)" % (dotted(version), probed.python)
    if version[:2] < WORKER_PYTHON:
        return Check(
            name, PROBLEM, "%s is too old: %s is the oldest that works" % (found, dotted(WORKER_PYTHON)), remedy
        )
    return Check(name, OK, found)


def _install(probed: Probed, *names: str) -> str:
    """The command that puts packages into that Python, in versions that were tried."""
    wanted = []
    for name in names:
        least, most = TRIED_FROM.get(name), TOO_NEW.get(name)
        text = name + (">=%s" % dotted(least) if least else "") + (",<%s" % dotted(most) if most else "")
        wanted.append(shlex.quote(text))
    return "%s -m pip install %s" % (shlex.quote(probed.python), " ".join(wanted))


def _package(name: str, probed: Probed) -> Check:
    """Imported without an error, of a version that was tried."""
    version, stage = str(probed.facts["packages"][name]), probed.facts.get(name)
    if stage is None:
        return _unfinished(name, version, probed)
    if stage.get("error"):
        if "torchvision" in stage["error"]:
            found = "%s cannot load a model: %s" % (version, stage["error"])
            return Check(name, PROBLEM, found, _no_torchvision(probed))
        return Check(name, PROBLEM, "%s cannot be imported: %s" % (version, stage["error"]), _install(probed, name))
    has = numbers(version)
    if has < OLDEST.get(name, ()):
        return Check(name, PROBLEM, "%s is too old" % version, _install(probed, name))
    if has < TRIED_FROM.get(name, ()):
        return Check(name, WARNING, "%s is older than what was tried" % version, _install(probed, name))
    if name in TOO_NEW and has >= TOO_NEW[name]:
        return Check(name, WARNING, "%s is newer than what was tried" % version, _install(probed, name))
    return Check(name, OK, version)


def _unfinished(stage: str, version: str, probed: Probed) -> Check:
    """Its import did not come to an end, or its turn never came."""
    what = "importing %s %s" % (stage, version)
    if probed.stage != stage:
        return Check(stage, UNKNOWN, "%s, not tried: importing %s did not end" % (version, probed.stage or "another"))
    if probed.late_s is not None:
        remedy = "is its disk slow? run doctor again, or with a longer --limit"
        return Check(stage, PROBLEM, "%s had not ended after %g s" % (what, probed.late_s), remedy)
    code = probed.code or 0
    how = "signal %d" % -code if code < 0 else "status %d" % code
    why = ": %s" % probed.said if probed.said else ""
    return Check(stage, PROBLEM, "%s ended the Python with %s%s" % (what, how, why), _install(probed, stage))


def _torch(probed: Probed, node: Node) -> List[Check]:
    check = _package("torch", probed)
    facts = probed.facts.get("torch") or {}
    if check.status == PROBLEM or not facts or facts.get("error"):
        return [check]
    # Imported, its own word counts: metadata may lack the build.
    build = "CUDA %s" % facts["cuda"] if facts.get("cuda") else "ROCm" if facts.get("hip") else "the CPU"
    found = "%s for %s" % (facts.get("version"), build) + check.found[len(probed.facts["packages"]["torch"]) :]
    return [check._replace(found=found), *_torch_gpus(facts, probed, node)]


def _torch_gpus(facts: Facts, probed: Probed, node: Node) -> List[Check]:
    """Whether torch can use the cards that the driver has."""
    name = "torch on GPUs"
    if node.gpus == 0:
        return []
    if not facts.get("cuda"):
        if node.gpus is None:
            return []
        remedy = "install the %s build of torch, or %s" % (_build_for(node.cuda), node.setup)
        return [Check(name, PROBLEM, "torch was built for the CPU, and there are %d GPUs" % node.gpus, remedy)]
    built = numbers(facts["cuda"])
    # From CUDA 11 on a driver runs every minor version of its major version.
    if node.cuda and built and built[0] > node.cuda[0]:
        needed = _DRIVERS.get(built[0])
        driver = "install driver %s or newer" % needed if needed else "install a newer driver"
        found = "torch is built for CUDA %s, the driver supports %s" % (facts["cuda"], dotted(node.cuda))
        return [Check(name, PROBLEM, found, "%s, or the %s build of torch" % (driver, _build_for(node.cuda)))]
    seen = facts.get("gpus") or []
    if facts.get("gpu_error"):
        if node.gpus is None:
            return [Check(name, UNKNOWN, facts["gpu_error"])]
        return [Check(name, PROBLEM, facts["gpu_error"], "see `nvidia-smi`; the driver or the container is at fault")]
    if node.gpus is not None and len(seen) < node.gpus:
        remedy = "is CUDA_VISIBLE_DEVICES set for the node's logins, or MIG on?"
        return [
            Check(name, PROBLEM if not seen else WARNING, "torch sees %d of %d GPUs" % (len(seen), node.gpus), remedy)
        ]
    foreign = _without_kernels(facts)
    if foreign:
        remedy = "install a newer torch, one built for these cards"
        return [Check(name, PROBLEM, "this torch has no kernels for %s" % ", ".join(foreign), remedy)]
    old = sorted({gpu["name"] for gpu in seen if gpu["capability"][0] < 8})
    if old:
        remedy = "use --dtype float16 or float32 there"
        return [Check(name, WARNING, "no bfloat16 in hardware on %s" % ", ".join(old), remedy)]
    return [Check(name, OK, "sees %d, bfloat16" % len(seen))] if seen else []


def _build_for(cuda: Optional[Sequence[int]]) -> str:
    return _BUILDS.get(cuda[0] if cuda else 12, "CUDA")


def _without_kernels(facts: Facts) -> List[str]:
    """Cards whose architecture torch was not built for: binaries run within a major version, PTX on what is newer."""
    built: List[Tuple[int, int]] = []
    newest_ptx = None
    for name in facts.get("architectures") or []:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        capability = int(digits[:-1]), int(digits[-1])
        if kind == "sm":
            built.append(capability)
        elif kind == "compute":
            newest_ptx = max(newest_ptx or capability, capability)
    if not built:
        return []
    found = []
    for gpu in facts["gpus"]:
        has = tuple(gpu["capability"])
        runs = any(one[0] == has[0] and one[1] <= has[1] for one in built)
        if not runs and not (newest_ptx and newest_ptx <= has):
            found.append("%s (sm_%d%d)" % (gpu["name"], *has))
    return sorted(set(found))


def _no_torchvision(probed: Probed) -> str:
    return "%s -m pip uninstall torchvision (nothing here needs it)" % shlex.quote(probed.python)


def _torchvision(probed: Probed) -> List[Check]:
    """One that does not fit its torch makes every model class of Transformers fail; without it all is well."""
    version, stage = probed.facts["packages"].get("torchvision"), probed.facts.get("torchvision")
    if not version:
        return []
    if stage is None:
        return [_unfinished("torchvision", version, probed)]
    if stage.get("error"):
        found = "%s does not fit this torch: %s" % (version, stage["error"])
        return [Check("torchvision", PROBLEM, found, _no_torchvision(probed))]
    return [Check("torchvision", OK, version)]


def _kernels(probed: Probed, node: Node) -> List[Check]:
    """What makes packs fast; of no use without a GPU."""
    if node.gpus == 0:
        return []
    checks = []
    facts = probed.facts.get("torch")
    if facts and not facts.get("error"):
        varlen = facts.get("varlen_attn") or {}
        if varlen.get("window_size"):
            checks.append(Check("varlen_attn", OK, "attention over packs, from torch"))
        else:
            why = varlen.get("error") or "this torch's does not take window_size"
            remedy = "install torch %s or later" % dotted(TRIED_FROM["torch"])
            checks.append(Check("varlen_attn", WARNING, "attention over packs is slower without it: %s" % why, remedy))
    checks += _fla(probed)
    return checks + _causal_conv1d(probed)


def _fla(probed: Probed) -> List[Check]:
    packages, stage = probed.facts["packages"], probed.facts.get("fla")
    name = "flash-linear-attention"
    version, remedy = packages.get(name) or packages.get("fla-core"), _install(probed, name)
    slower = "Qwen3-Next and Qwen3.5 are slower without it"
    if not version:
        return [Check(name, WARNING, "not installed: %s" % slower, remedy)]
    if stage is None:
        return [_unfinished("fla", version, probed)._replace(name=name)]
    if stage.get("error"):
        return [Check(name, WARNING, "%s cannot be used: %s; %s" % (version, stage["error"], slower), remedy)]
    return [Check(name, OK, version)]


def _causal_conv1d(probed: Probed) -> List[Check]:
    """Nothing here needs it, but Transformers takes it where it is."""
    name = "causal-conv1d"
    version, stage = probed.facts["packages"].get(name), probed.facts.get("causal_conv1d")
    if not version:
        return []
    if stage is None:
        return [_unfinished("causal_conv1d", version, probed)._replace(name=name)]
    if stage.get("error"):
        remedy = "%s -m pip uninstall %s (nothing here needs it)" % (shlex.quote(probed.python), name)
        return [Check(name, WARNING, "%s cannot be imported: %s" % (version, stage["error"]), remedy)]
    return [Check(name, OK, version)]


def services(found: List[Tuple[str, Facts]], node: Node) -> List[Check]:
    """vLLM and the trainer, wherever they are. found: a place in words, and the versions of its packages."""
    vllm = [(where, packages["vllm"]) for where, packages in found if packages.get("vllm")]
    trainer = [(where, packages["speculators"]) for where, packages in found if packages.get("speculators")]
    checks = []
    if not vllm:
        checks.append(
            Check("vLLM", WARNING, "not found: its backend is not available here", node.setup + " --vllm VERSION")
        )
    else:
        told = ", ".join("%s in %s" % (version, where) for where, version in vllm)
        if all(numbers(version) < _OLDEST_VLLM_FOR_HYBRIDS for _, version in vllm):
            remedy = "%s --vllm 0.26.0" % node.setup
            checks.append(Check("vLLM", WARNING, "%s; hybrids need 0.22 or later" % told, remedy))
        else:
            checks.append(Check("vLLM", OK, told))
    if not trainer:
        checks.append(
            Check("trainer", WARNING, "speculators is not found: no training here", node.setup + " --trainer")
        )
    else:
        checks.append(
            Check("trainer", OK, ", ".join("speculators %s in %s" % (version, where) for where, version in trainer))
        )
    return checks
