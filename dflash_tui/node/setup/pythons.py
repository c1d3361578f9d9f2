"""The base Python of environments: the one that was named, or the first good one of the usual places."""

import glob
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Iterator, List, Optional, Tuple

from dflash_tui.node.setup.pins import OLDEST_PYTHON
from dflash_tui.node.setup.spec import Refusal

NAMES = ("python3.13", "python3.12", "python3.11", "python3", "python3.14")
PLACES = (
    "/usr/bin",
    "/usr/local/bin",
    "/opt/conda/bin",
    "/opt/miniconda3/bin",
    "/opt/python/*/bin",
    "~/miniconda3/bin",
    "~/anaconda3/bin",
    "~/.local/bin",
    "~/.pyenv/versions/*/bin",
)
_TRY_S = 30.0
_ASK = (
    "import json, sys\n"
    "def has(name):\n"
    "    try: __import__(name)\n"
    "    except ImportError: return 0\n"
    "    return 1\n"
    "def wheel():\n"
    "    try: import ensurepip, glob, os, sysconfig\n"
    "    except ImportError: return ''\n"
    "    places = [os.path.join(os.path.dirname(ensurepip.__file__), '_bundled')]\n"
    "    places.append(sysconfig.get_config_var('WHEEL_PKG_DIR') or '')\n"
    "    return ([p for place in places for p in glob.glob(os.path.join(place, 'pip-*.whl'))] + [''])[0]\n"
    # What a link, a shim or an environment leads to: that one stays, and is the same for all its names.
    "path = getattr(sys, '_base_executable', '') or sys.executable\n"
    "version = '%d.%d.%d' % sys.version_info[:3]\n"
    "print('dflash-tui ' + json.dumps([path, version, has('venv'), wheel(), has('pip')]))\n"
)


@dataclass(frozen=True)
class Base:
    """A Python that environments can be made with. pip_wheel: what its ensurepip would install, "" where it has none."""

    path: str
    version: str
    pip_wheel: str
    pip: bool

    @property
    def numbers(self) -> Tuple[int, ...]:
        return tuple(int(part) for part in self.version.split("."))


def find(wanted: str = "") -> Base:
    """The base Python by path or name, or the first good one of this node. Raises Refusal."""
    if wanted:
        path = shutil.which(os.path.expanduser(wanted))
        if path is None:
            raise Refusal(
                "the base Python %r is not on this node, or cannot be run" % wanted, "name another with --python"
            )
        base, why = _ask(path)
        if base is None:
            raise Refusal("the base Python %s %s" % (path, why), "name another with --python")
        return base
    seen: List[str] = []
    for path in _candidates():
        base, why = _ask(path)
        if base is not None:
            return base
        seen.append("%s %s" % (path, why))
    oldest = "%d.%d" % OLDEST_PYTHON
    raise Refusal(
        "no Python %s or newer is on this node (%s)" % (oldest, "; ".join(seen[:4]) or "none at all"),
        "install one (apt install python3 python3-venv, or conda, or uv python install 3.12) or name one with --python",
    )


def _candidates() -> Iterator[str]:
    seen = set()
    on_path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    # The newest first, where a place holds several.
    usual = [folder for place in PLACES for folder in sorted(glob.glob(os.path.expanduser(place)), reverse=True)]
    places = (on_path, usual)
    paths = [os.path.join(folder, name) for folders in places for name in NAMES for folder in folders if folder]
    for path in [*paths, sys.executable]:
        real = os.path.realpath(path)
        if real not in seen and os.path.isfile(path) and os.access(path, os.X_OK):
            # An environment's Python is a link to its base: then that one is asked instead, under its own name.
            if os.path.isfile(os.path.join(os.path.dirname(os.path.dirname(path)), "pyvenv.cfg")):
                continue
            seen.add(real)
            yield path


def _ask(path: str) -> Tuple[Optional[Base], str]:
    """What a Python says of itself, or why it cannot be a base."""
    try:
        asked = subprocess.run(
            [path, "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_TRY_S,
        )
    except subprocess.TimeoutExpired:
        return None, "did not answer within %g s" % _TRY_S
    except OSError as error:
        return None, "does not run: %s" % error.strerror
    word, _, told = asked.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2].partition(" ")
    if asked.returncode != 0 or word != "dflash-tui":
        errors = asked.stderr.decode("utf-8", "replace").strip().splitlines()
        return None, "does not run: %s" % (errors[-1][:200] if errors else "no Python answered")
    real, version, venv, wheel, pip = json.loads(told)
    base = Base(real or path, version, wheel, bool(pip))
    if base.numbers[:2] < OLDEST_PYTHON:
        return None, "is %s, and %d.%d is the oldest that works" % (base.version, *OLDEST_PYTHON)
    if not venv:
        return None, "has no module venv"
    return base, ""
