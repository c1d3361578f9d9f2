"""The environments that `setup` made on this node, and the versions of what is in each."""

import json
import os
import subprocess
from typing import Any, Dict, List, Optional

from dflash_tui.node import paths

PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
_LIMIT_S = 20.0


def folder() -> str:
    """Where they live: $XDG_DATA_HOME/dflash-tui/envs, or below ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(base, "dflash-tui", "envs")


def look() -> List[Dict[str, Any]]:
    """Of each one: name, python, packages (versions by name; {} where its Python does not answer) and whole."""
    found = []
    try:
        names = sorted(os.listdir(folder()))
    except OSError:
        return []
    for name in names:
        python = os.path.join(folder(), name, "bin", "python")
        if not name.startswith(".") and os.path.exists(python):
            about = paths.read_json(os.path.join(folder(), name, "env.json"))
            packages = versions(python)
            found.append(
                {
                    "name": name,
                    "python": python,
                    "packages": packages or {},
                    "whole": about is not None and packages is not None,
                }
            )
    return found


def versions(python: str) -> Optional[Dict[str, Any]]:
    """What the probe says is installed, or None where that Python does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-B", PROBE, "--versions"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
        for row in done.stdout.splitlines():
            facts = json.loads(row.decode("utf-8"))
            if "packages" in facts:
                return dict(facts["packages"])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return None
