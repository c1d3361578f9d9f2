"""What a setup will make, where, and whether it can: asked before anything is started, and once more by the job itself."""

import os
from dataclasses import dataclass
from typing import Any, Dict, List

from dflash_tui.node.setup import build, pins, places, pythons
from dflash_tui.node.setup.pins import Wanted
from dflash_tui.node.setup.pythons import Base
from dflash_tui.node.setup.spec import Refusal, SetupSpec


@dataclass(frozen=True)
class Plan:
    """todo: in their order; kept: whole already, and left alone. wheels: the folder's absolute path, or ""."""

    base: Base
    driver: str
    wheels: str
    todo: List[Wanted]
    kept: List[Wanted]
    warnings: List[str]
    bytes_needed: int


def make(spec: SetupSpec) -> Plan:
    """Raises Refusal with what stands in the way."""
    base = pythons.find(spec.python)
    driver = pins.driver_version()
    wheels = _wheels(spec.wheels)
    wanted = pins.wanted(spec, driver)
    # What was named may be a shim or an environment: the Python behind it counts.
    kept = [one for one in wanted if build.is_current(one, base.path if spec.python else "")]
    todo = [one for one in wanted if one not in kept]
    if todo:
        build.check_pip(base, wheels)
    needed = sum(max(one.bytes - places.size_of(build.folder_for(one, base)), 0) for one in todo)
    free = places.free_bytes()
    if free is not None and free < needed:
        raise Refusal(
            "%s has %.1f GB left, and %s takes %.1f GB"
            % (places.root(), free / 1e9, " and ".join(one.name for one in todo), needed / 1e9),
            "free some, or set XDG_DATA_HOME to a larger disk",
        )
    return Plan(base, driver, wheels, todo, kept, _warnings(spec, driver), needed)


def _wheels(folder: str) -> str:
    if not folder:
        return ""
    path = os.path.abspath(os.path.expanduser(folder))
    try:
        names = os.listdir(path)
    except OSError as error:
        raise Refusal(
            "the wheel folder %s cannot be read: %s" % (path, error.strerror),
            "fill one with `dflash-tui setup --download DIR` and carry it to the node",
        ) from None
    if not any(name.endswith(".whl") for name in names):
        raise Refusal("the wheel folder %s holds no wheel" % path, "fill it with `dflash-tui setup --download DIR`")
    return path


def _warnings(spec: SetupSpec, driver: str) -> List[str]:
    lines = []
    if spec.vllm and not driver:
        lines.append("vLLM of PyPI is built for CUDA, and this node has no GPU that can be seen")
    if driver and int(driver.split(".")[0]) < pins.OLDEST_DRIVER and not (spec.torch or spec.pins.get("worker")):
        lines.append(
            "%s of PyPI is built for CUDA 13, which needs driver %d; this node has %s: name an older build with --torch"
            % (pins.TORCH, pins.OLDEST_DRIVER, driver)
        )
    return lines


def answer(spec: SetupSpec) -> Dict[str, Any]:
    """The plan as `plan` of a console shows it; a setup that is at work refuses another."""
    try:
        holder = places.lock_holder()
        if holder is not None:
            raise busy(holder)
        plan = make(spec)
    except Refusal as refusal:
        return {"ok": False, "error": refusal.message, "remedy": refusal.remedy, "warnings": []}
    return {
        "ok": True,
        "error": None,
        "remedy": None,
        "warnings": plan.warnings,
        "makes": {one.name: list(one.requirements) for one in plan.todo},
        "already_whole": [one.name for one in plan.kept],
        "where": places.root(),
        "base_python": plan.base.path,
        "base_version": plan.base.version,
        "pip_from": build.pip_wheel(plan.base, plan.wheels) or "pip of %s" % plan.base.path,
        "wheels": plan.wheels or None,
        "driver": plan.driver or None,
        "bytes_total": plan.bytes_needed,
        "disk_free_bytes": places.free_bytes(),
    }


def busy(holder: str) -> Refusal:
    job = "job %s" % holder if holder else "another process"
    return Refusal(
        "%s is making this node's environments" % job,
        "wait for it, or stop it with `dflash-tui stop %s`" % (holder or "JOB"),
    )
