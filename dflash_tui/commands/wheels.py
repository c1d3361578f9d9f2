"""A folder of wheels for a node without a network, filled on a machine that has one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dflash_tui.commands.outcome import CommandError, Exit
from dflash_tui.commands.output import amount, note, print_json
from dflash_tui.node.setup import pins
from dflash_tui.node.setup.pip import cause_of
from dflash_tui.node.setup.spec import SetupSpec

_KEPT_LINES = 400


def fill(folder: Path, spec: SetupSpec, node_python: str, *, cpu: bool, as_json: bool) -> Exit:
    """Downloads what `setup` with the same options needs on a Linux node of this machine's kind, pip included.

    node_python: "3.12"; "" is the version of the Python that runs this. Raises CommandError.
    """
    if sys.platform != "linux":
        # pip chooses by the system that it runs on, whatever platform is named: what only Linux needs would be left out.
        raise CommandError(
            Exit.BAD_INPUT,
            "the wheels of a Linux node cannot be chosen on this system",
            "run this on any Linux, a container say",
        )
    version = node_python or "{}.{}".format(*sys.version_info[:2])
    if not re.fullmatch(r"3\.\d+", version) or tuple(map(int, version.split("."))) < pins.OLDEST_PYTHON:
        oldest = "{}.{}".format(*pins.OLDEST_PYTHON)
        raise CommandError(Exit.BAD_INPUT, f"--node-python {version!r} cannot be", f"give {oldest} or newer, as 3.12")
    python, flags = _python_for(version)
    folder = Path(os.path.expanduser(folder)).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(Exit.BAD_INPUT, f"{folder}: {error.strerror}", "name a folder that can be made") from None
    wanted = pins.wanted(spec, "" if cpu else "any")
    for one in wanted:  # each by itself: their versions need not fit together
        note(f"downloading for {one.name}: {', '.join(one.requirements)}")
        _download(python, ["--dest", str(folder), *flags, "pip", *one.requirements], one.name, version)
    found = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in found)
    if as_json:
        names = {one.name: list(one.requirements) for one in wanted}
        print_json({"folder": folder, "wheels": len(found), "bytes": size, "python": version, "environments": names})
    else:
        print(f"{len(found)} wheels, {amount(size)}, for Python {version}: {folder}")
        note(
            "carry it over, as `rsync -a DIR/ HOST:/data/wheels/`, then `dflash-tui setup --wheels /data/wheels --host HOST`"
        )
    return Exit.OK


def _python_for(version: str) -> tuple[str, list[str]]:
    """A Python with pip to choose by, best one of that very version, and what to tell pip where it is not."""
    here = "{}.{}".format(*sys.version_info[:2])
    for python, flags in (
        (sys.executable if version == here else shutil.which(f"python{version}"), []),
        (sys.executable, ["--python-version", version]),
    ):
        if (
            python
            and subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
        ):
            return python, flags
    raise CommandError(Exit.FAILED, f"{sys.executable} has no pip", f"`{sys.executable} -m ensurepip` gives it one")


def _download(python: str, arguments: list[str], name: str, version: str) -> None:
    command = [
        python,
        "-m",
        "pip",
        "download",
        "--no-input",
        "--only-binary",
        ":all:",
        "--progress-bar",
        "off",
        *arguments,
    ]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            lines = [*lines[-_KEPT_LINES:], line]
            note(line)
    if process.returncode != 0:
        cause = cause_of(lines, name, version, "")
        raise CommandError(Exit.FAILED, cause.message, cause.remedy)
