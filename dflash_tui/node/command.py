"""What a job was started with: its supervisor writes `command.json` once, at start, with no secret's value in it.

The servers that the job started stand in its events; so do the versions that its runner found.
"""

import json
import math
import os
import re
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from dflash_tui.node import hiding, paths, protocol
from dflash_tui.node.protocol import Refused

NAME = "command.json"
_DRIVER = "/proc/driver/nvidia/version"
_MOST_EVENTS = 256 << 20  # bytes of events that are looked through
_LONGEST_EVENT = 1 << 20
_SIDES = ("hf", "vllm")


def write(
    folder: str, argv: List[str], environment: Mapping[str, str], cwd: str, secrets: Iterable[str], added: Iterable[str]
) -> None:
    """Writes `command.json` into the job's folder, mode 0600. Raises OSError.

    environment: of the process that `argv` becomes. secrets: names of what it gets through a pipe. added: names of the
    variables that the launch and the supervisor set, beside those of the agent's own environment.
    """
    shown, hidden = hiding.environment(dict(environment))
    system = os.uname()
    data = {
        "time": time.time(),
        "argv": hiding.arguments(argv),
        "cwd": cwd,
        "environment": shown,
        "hidden": hidden,
        "added": sorted(set(added) & set(shown)),
        "secrets": sorted(secrets),
        "host": system.nodename,
        "system": "%s %s %s" % (system.sysname, system.release, system.machine),
        "driver": driver_version(),
    }
    paths.write_json(os.path.join(folder, NAME), data)


def driver_version() -> Optional[str]:
    """Of the NVIDIA driver in the kernel, None where there is none: what NVML says needs a call that may hang."""
    try:
        with open(_DRIVER, encoding="utf-8", errors="replace") as file:
            found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", file.read(4096))
    except OSError:
        return None
    return found.group(1) if found else None


def started_with(folder: str) -> Dict[str, Any]:
    """The answer to `command`: `command` (null for a job from before it was written), `servers`, `versions`. Raises Refused.

    servers: the last start of each: [{"worker", "time", "pid", "command", "environment", "cwd"}], null where not told.
    versions: {name: version}, of the runner's Python, and of the server's where its events tell.
    """
    servers: Dict[str, Dict[str, Any]] = {}
    versions: Dict[str, Any] = {}
    for path, begin, end in _event_files(folder):
        for event in _events(path):
            if not begin <= _number(event.get("t"), 0.0) <= end:
                continue
            _take_versions(event, versions)
            if isinstance(event.get("command"), list):
                servers["%s %s" % (path, event.get("worker"))] = _server(event)
    answer = {
        "command": paths.read_json(os.path.join(folder, NAME)),
        "servers": list(servers.values()),
        "versions": versions,
    }
    if len(json.dumps(answer)) > protocol.MAX_HEADER // 2:
        raise Refused(
            protocol.BAD_REQUEST,
            "what job %s was started with is longer than an answer may be" % os.path.basename(folder),
            "read %s" % os.path.join(folder, NAME),
        )
    return answer


def _event_files(folder: str) -> List[Tuple[str, float, float]]:
    """(path, from, to): the job's own, and of a comparison those of its two sides, of its own time alone.

    A later comparison in the same folder writes its sides' events in the place of these.
    """
    files = [(os.path.join(folder, "events.jsonl"), -math.inf, math.inf)]
    state = paths.read_json(os.path.join(folder, "state.json")) or {}
    if state.get("verb") == "compare":
        output = (paths.read_json(os.path.join(folder, "spec.json")) or {}).get("output")
        begin, end = (state.get(name) for name in ("created", "ended"))
        if isinstance(output, str) and os.path.isabs(output):
            span = (_number(begin, -math.inf), _number(end, math.inf))
            files += [(os.path.join(output, side + ".events.jsonl"), *span) for side in _SIDES]
    return files


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise


def _events(path: str) -> Iterable[Dict[str, Any]]:
    """The events that can hold a command or versions; the many that tell of progress are not parsed."""
    try:
        with open(path, "rb") as file:
            while file.tell() < _MOST_EVENTS:
                line = file.readline(_LONGEST_EVENT)
                if not line:
                    return
                if b'"command"' not in line and b'"versions"' not in line:
                    continue
                try:
                    event = json.loads(line.decode("utf-8"))
                except ValueError:
                    continue  # half a line, of a full disk
                if isinstance(event, dict):
                    yield event
    except OSError:
        return


def _take_versions(event: Dict[str, Any], versions: Dict[str, Any]) -> None:
    found = event.get("versions")
    if isinstance(found, dict):
        versions.update((str(name), value) for name, value in found.items() if isinstance(value, (str, type(None))))


def _server(event: Dict[str, Any]) -> Dict[str, Any]:
    environment = event.get("environment")
    shown = (
        hiding.environment({str(name): str(value) for name, value in environment.items()})[0]
        if isinstance(environment, dict)
        else None
    )
    return {
        "worker": event.get("worker"),
        "time": event.get("t"),
        "pid": event.get("pid"),
        "command": hiding.arguments([str(word) for word in event["command"]]),
        "environment": shown,
        "cwd": event.get("cwd"),
    }
