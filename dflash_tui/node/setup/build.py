"""One environment, from nothing or from where a killed setup left it, to whole."""

import glob
import os
import shutil
import time
from typing import Any, Dict, List, Sequence

from dflash_tui.node import paths
from dflash_tui.node.setup import check, places
from dflash_tui.node.setup.pins import Wanted
from dflash_tui.node.setup.pip import PipWatch, Programs, cause_of
from dflash_tui.node.setup.pythons import Base
from dflash_tui.node.setup.report import Report
from dflash_tui.node.setup.spec import Refusal

_MADE = "venv.json"  # in an environment whose Python and pip work; only then its packages are gone on with
_PIP_OF_DEBIAN = "/usr/share/python-wheels"
# The CPU build of torch beside PyPI's torchvision makes every model class of Transformers fail.
_UNLOVED = ("torchvision", "torchaudio")
_CUDA = "import torch; print('cuda', torch.version.cuda)"


def folder_for(wanted: Wanted, base: Base) -> str:
    return places.folder_of(wanted.name, wanted.requirements, base.path)


def build(wanted: Wanted, base: Base, wheels: str, driver: str, programs: Programs, report: Report) -> Dict[str, Any]:
    """Makes the environment current and returns its record (`env.json`). Raises Refusal, Interrupted, OSError."""
    folder = folder_for(wanted, base)
    link = os.path.join(places.root(), wanted.name)
    if os.path.lexists(link) and not os.path.islink(link):
        raise Refusal("%s was not made by this setup" % link, "move it away, or remove it")
    paths.remove(os.path.join(folder, places.RECORD))  # until it is whole again it does not count
    _make_python(wanted, base, wheels, folder, programs, report)
    _install(wanted, base, wheels, folder, programs, report)
    report.phase("%s: checking what was installed" % wanted.name)
    missing = check.mend(folder)
    if missing:
        raise Refusal("%s of the environment %s is not whole" % (missing[0], wanted.name), "run the setup again")
    versions = check.check(programs, folder, wanted.name, wanted.requirements, driver)
    record = {
        "name": wanted.name,
        "python": base.version,
        "base": base.path,
        "requirements": list(wanted.requirements),
        "versions": versions,
        "created": time.time(),
        "bytes": places.size_of(folder),
    }
    paths.write_json(os.path.join(folder, places.RECORD), record)
    places.make_current(wanted.name, folder)
    for used in places.sweep(wanted.name):
        report.emit("warning", message="%s stays: a process runs out of it; the next setup removes it" % used)
    return record


def _make_python(wanted: Wanted, base: Base, wheels: str, folder: str, programs: Programs, report: Report) -> None:
    """The environment's Python with pip in it."""
    marker = os.path.join(folder, _MADE)
    python = places.python_in(folder)
    if paths.read_json(marker) is not None and os.access(python, os.X_OK):
        forgotten = check.mend(folder)
        for name in forgotten:
            report.emit("warning", message="%s: %s was left in pieces and is installed anew" % (wanted.name, name))
        # A pip in pieces may say its version and still not install; nobody else would put it back.
        whole = not any(name.startswith("pip-") for name in forgotten)
        if whole and programs.run([python, "-I", "-m", "pip", "--version"], quiet=True).code == 0:
            return
    report.phase("%s: making the environment with %s (%s)" % (wanted.name, base.path, base.version))
    shutil.rmtree(folder, ignore_errors=True)
    # Without ensurepip, which Debian lacks, and which compiles all of pip where it is there.
    ended = programs.run([base.path, "-I", "-m", "venv", "--without-pip", folder])
    if ended.code != 0:
        raise cause_of(ended.lines, wanted.name, base.version, wheels) if ended.lines else Refusal("venv failed")
    _get_pip(base, wheels, python, programs, wanted.name)
    paths.write_json(marker, {"base": base.path, "python": base.version, "created": time.time()})


def pip_wheel(base: Base, wheels: str) -> str:
    """A wheel of pip: of the folder that was named, of the base's ensurepip, or what Debian keeps; "" where none is."""
    found = sorted(glob.glob(os.path.join(glob.escape(wheels), "pip-*.whl")), reverse=True) if wheels else []
    if base.pip_wheel:
        found.append(base.pip_wheel)
    found += glob.glob(os.path.join(_PIP_OF_DEBIAN, "pip-*.whl"))
    return found[0] if found else ""


def check_pip(base: Base, wheels: str) -> None:
    """Whether there is a way to get pip into an environment. Raises Refusal."""
    if not base.pip and not pip_wheel(base, wheels):
        raise Refusal(
            "%s has neither ensurepip nor pip" % base.path,
            "apt install python3-venv (as root), or put a wheel of pip into a folder and name it with --wheels",
        )


def _get_pip(base: Base, wheels: str, python: str, programs: Programs, name: str) -> None:
    """pip into an environment without it: by a wheel of pip, which can be run as it is, else by the base's own pip."""
    wheel = pip_wheel(base, wheels)
    if wheel:
        # A wheel is a zip file, and Python runs a package out of it.
        command = [
            python,
            "-I",
            os.path.join(wheel, "pip"),
            "install",
            "--no-user",
            "--no-index",
            "--no-compile",
            wheel,
        ]
    else:
        command = [base.path, "-m", "pip", "--python", python, "install", "pip"]
    ended = programs.run(command)
    if ended.code != 0:
        raise cause_of(ended.lines, name, base.version, wheels)


def _install(wanted: Wanted, base: Base, wheels: str, folder: str, programs: Programs, report: Report) -> None:
    report.phase("%s: choosing packages" % wanted.name)
    watch = PipWatch(wanted.name)
    ended = programs.run(
        install_command(places.python_in(folder), wanted.requirements, wheels),
        watch.line,
        lambda: _tell(watch, folder, programs, report),
    )
    if ended.code != 0:
        raise cause_of(ended.lines, wanted.name, base.version, wheels)
    if not wanted.leaves_torchvision:
        _drop_unloved(wanted, folder, programs, report)


def install_command(python: str, requirements: Sequence[str], wheels: str) -> List[str]:
    """What pip is asked for. Sources are no choice: a bare node has no compiler."""
    command = [python, "-I", "-m", "pip", "install", "--no-user", "--no-color", "--no-compile", "--progress-bar", "off"]
    command += ["--only-binary", ":all:"]
    if wheels:
        command += ["--no-index", "--find-links", wheels]
    return [*command, *requirements]


def _tell(watch: PipWatch, folder: str, programs: Programs, report: Report) -> None:
    if watch.installing:
        there = set(check.installed(folder))
        done = sum(name in there for name in watch.installing)
        report.progress(done, len(watch.installing), phase=watch.phase)
    else:
        report.progress(len(watch.collected), None, programs.temporary_bytes(), watch.phase)


def _drop_unloved(wanted: Wanted, folder: str, programs: Programs, report: Report) -> None:
    there = [name for name in _UNLOVED if name in check.installed(folder)]
    if not there:
        return
    python = places.python_in(folder)
    asked = programs.run([python, "-I", "-c", _CUDA], quiet=True)
    if asked.lines[-1:] != ["cuda None"]:
        return  # a CUDA build, or no torch at all: then the check says what is wrong
    ended = programs.run([python, "-I", "-m", "pip", "uninstall", "--yes", *there])
    if ended.code != 0:
        raise cause_of(ended.lines, wanted.name, "", "")
    report.emit("warning", message="%s: %s left out, beside a CPU build of torch" % (wanted.name, " and ".join(there)))


def is_current(wanted: Wanted, base: str) -> bool:
    """Whether the whole environment of that name is what is wanted, made with that base Python ("": with any)."""
    folder = places.current(wanted.name)
    record = places.record_of(folder) if folder is not None else None
    if folder is None or record is None or record.get("requirements") != list(wanted.requirements):
        return False
    if base and os.path.realpath(base) != os.path.realpath(str(record.get("base"))):
        return False
    return not check.broken(folder)
