"""The vLLM of this node: which Python has one, and what is installed beside it. Imports neither vllm nor torch, here or there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from backends.errors import JobError, one_line
from backends.vllm.compat import version_of

_LIMIT_S = 60.0
_MAKE_ONE = "make one (setup --vllm 0.26.0), or name its Python (--vllm-python)"
# Asked of that Python, which may be of any version from 3.8 on: what the installers wrote, and torch's own record of its CUDA.
_QUESTION = """
import importlib.metadata, importlib.util, json, os, re
found = {"vllm": None, "torch": None, "transformers": None, "hs-connectors": None, "cuda": None}
for name in list(found)[:4]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found["missing"] = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
spec = importlib.util.find_spec("torch")
for folder in (spec and spec.submodule_search_locations) or ():
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            match = re.search(r"^cuda\\b[^=\\n]*=\\s*['\\"]([^'\\"]+)", file.read(), re.MULTILINE)
        found["cuda"] = match.group(1) if match else None
    except OSError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A Python that has a vLLM. torch, transformers, hs_connectors: versions there, None where one is not installed.

    cuda: what its torch was built for, None for a CPU build. missing: what vLLM cannot be imported without, and is not there.
    """

    python: str
    version: str
    torch: str | None
    transformers: str | None
    hs_connectors: str | None
    cuda: str | None
    missing: tuple[str, ...] = ()


def find_vllm(python: str = "") -> Found:
    """The vLLM of the named Python; else of the newest environment that setup made; else of this one. Raises JobError."""
    if python:
        found = look(_program(python))
        if found is None:
            raise JobError(f"the Python {python} has no vllm", _MAKE_ONE)
        return found
    for candidate in [*environments(), sys.executable]:
        found = look(candidate)
        if found is not None:
            return found
    raise JobError(f"no vLLM is on this node: neither an environment of setup nor {sys.executable} has one", _MAKE_ONE)


def environments() -> list[str]:
    """The Pythons of the whole environments `vllm-<version>` that setup made here, the newest version first.

    Setup's layout: `<data>/dflash-tui/envs/<name>` is a link to a folder that is whole once it holds env.json.
    """
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    data = base if base.is_absolute() else Path.home() / ".local" / "share"
    found = []
    for link in data.joinpath("dflash-tui", "envs").glob("vllm-*"):
        folder = link.resolve()
        python = folder / "bin" / "python"
        if (folder / "env.json").is_file() and os.access(python, os.X_OK):
            found.append((version_of(link.name.removeprefix("vllm-")) or (0,), str(python)))
    return [python for _, python in sorted(found, reverse=True)]


def look(python: str) -> Found | None:
    """What this Python has, None where it has no vLLM. Raises JobError where it does not run."""
    try:
        done = subprocess.run(
            [python, "-B", "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIMIT_S,
            # With -c the folder that it runs in is searched first: one without modules.
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JobError(
            f"the Python {python} did not answer within {_LIMIT_S:g} s", "is its disk slow? try again"
        ) from None
    except OSError as error:
        raise JobError(f"the Python {python} does not run: {one_line(error)}", _MAKE_ONE) from None
    try:
        # Start-up files of that Python may print, too.
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode} and said nothing"])[-1]
        raise JobError(f"the Python {python} does not run: {said[:300]}", _MAKE_ONE) from None
    if not answer["vllm"]:
        return None
    beside = answer["torch"], answer["transformers"], answer["hs-connectors"], answer["cuda"]
    return Found(python, str(answer["vllm"]), *beside, missing=tuple(answer["missing"]))


def _program(python: str) -> str:
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise JobError(f"the Python {python} (--vllm-python) is not on this node, or cannot be run", _MAKE_ONE)
    return str(Path(found).absolute())
