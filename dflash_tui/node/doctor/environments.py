"""The environments that `setup` made on this node or is making, and the versions of what is in each."""

import json
import os
import subprocess
from typing import Any, Dict, List, Optional

from dflash_tui.node.setup import places

PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
_LIMIT_S = 20.0


def look() -> Dict[str, Any]:
    """environments: name, python and packages (versions by name; None where its Python does not run) of each whole one.

    half: the folders that no setup has finished. maker: the job that makes environments now, None where nobody does.
    """
    found = [
        {"name": record["name"], "python": record["executable"], "packages": versions(record["executable"])}
        for record in places.whole()
    ]
    return {"environments": found, "half": half(), "maker": places.lock_holder()}


def half() -> List[str]:
    """What was begun and is not whole."""
    try:
        folders = [os.path.join(places.built(), name) for name in sorted(os.listdir(places.built()))]
    except OSError:
        return []
    return [folder for folder in folders if os.path.isdir(folder) and places.record_of(folder) is None]


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
