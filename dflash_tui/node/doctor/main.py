"""Starts what is to be asked, each in a process with a limit, and makes one answer of what they said."""

import json
import os
import shutil
import sys
from typing import Any, Callable, Dict, List, Optional

from dflash_tui.node import disks, launching
from dflash_tui.node.children import Ended, Program
from dflash_tui.node.doctor import cards, environments, folders, pythons, system
from dflash_tui.node.doctor.checks import OK, PROBLEM, UNKNOWN, WARNING, Check, ends_with, of_json
from dflash_tui.node.doctor.folders import Folder
from dflash_tui.node.doctor.pythons import Node, Probed
from dflash_tui.node.loop import Loop

DISK_LIMIT_S = 15.0
GPU_LIMIT_S = 25.0

Request = Dict[str, Any]


class Asked:
    """A process that is asked, and what came of it: its lines as far as they came, and how it ended."""

    def __init__(
        self, loop: Loop, command: List[str], limit_s: float, data: Any, env: Dict[str, str], done: Callable[[], None]
    ) -> None:
        self.limit_s = limit_s
        self.lines: List[Dict[str, Any]] = []
        self.ended: Optional[Ended] = None
        self._done = done
        try:
            Program(loop, command, self._take, limit_s, json.dumps(data).encode(), env)
        except OSError as error:
            self.ended = Ended(127, b"", str(error).encode())

    def _take(self, ended: Ended) -> None:
        self.ended = ended
        for row in ended.output.splitlines():
            try:
                found = json.loads(row.decode("utf-8"))
            except ValueError:
                continue  # cut off by its end
            if isinstance(found, dict):
                self.lines.append(found)
        self._done()

    @property
    def late_s(self) -> Optional[float]:
        """The limit, where it ran into it."""
        return self.limit_s if self.ended is not None and self.ended.code is None else None

    @property
    def facts(self) -> Dict[str, Any]:
        """All lines that are no checks, together."""
        together: Dict[str, Any] = {}
        for found in self.lines:
            if of_json(found) is None:
                together.update(found)
        return together

    @property
    def checks(self) -> List[Check]:
        return [check for check in map(of_json, self.lines) if check is not None]

    @property
    def said(self) -> str:
        return launching.last_line(self.ended.errors) if self.ended is not None else ""


def main(argv: List[str]) -> int:
    if argv[:1] == ["exec"]:
        ends_with(int(argv[1]))
        try:
            os.execv(argv[2], argv[2:])
        except OSError as error:
            print(error.strerror or error, file=sys.stderr)
            return 127
    request = json.loads(sys.stdin.buffer.read().decode("utf-8") or "{}")
    if argv[:1] == ["task"]:
        ends_with(int(argv[1]))
        TASKS[argv[2]](request)
        return 0
    answer = examine(request)
    # In one write: whoever reads it takes the whole line or none.
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def examine(request: Request) -> Dict[str, Any]:
    """The answer; `request` as `request.py` makes it."""
    loop = Loop()
    env = launching.environment()
    # A job sees the cards that it was given, whatever the logins of this node have set.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", OMP_NUM_THREADS="1", TERM="dumb", COLUMNS="4000")
    waiting: List[Asked] = []

    def done() -> None:
        if all(asked.ended is not None for asked in waiting):
            loop.stop()

    def ask(command: List[str], limit_s: float, data: Any = None) -> Asked:
        asked = Asked(loop, command, limit_s, data, env, done)
        waiting.append(asked)
        return asked

    def task(name: str, limit_s: float, data: Any = None) -> Asked:
        return ask(launching.node_command("doctor", "task", str(os.getpid()), name), limit_s, data)

    wanted, limit_s = request["python"], request["limit_s"]
    python = shutil.which(os.path.expanduser(wanted))
    groups = folders.group(_folders(request), disks.mounts())
    probe = None
    if python is not None:
        python = os.path.abspath(python)
        command = [python, "-B", environments.PROBE]  # no -I: a job sees the user's own packages as well
        probe = ask(launching.node_command("doctor", "exec", str(os.getpid()), *command), limit_s)
    gpus = task("cards", min(GPU_LIMIT_S, limit_s))
    envs = task("environments", limit_s)
    parts = [
        task("folders", min(DISK_LIMIT_S, limit_s), {"folders": group, "write": request["write"]}) for group in groups
    ]
    machine, ntp = system.look(), system.ntp()
    done()
    loop.run()
    node = Node(cards.usable(gpus.facts), gpus.facts.get("cuda"), _setup(request["host"]))
    checks = cards.judge(dict(gpus.facts, failed=gpus.said), gpus.late_s)
    checks += _worker(wanted, python, probe, node)
    checks += _services(python, probe, envs, node)
    for group, part in zip(groups, parts):
        checks += part.checks + _silent(group, part)
    return {
        "checks": [check.to_json() for check in checks + machine],
        "gpus": gpus.facts.get("cards") or [],
        "ntp": ntp,
    }


def _folders(request: Request) -> List[Folder]:
    named = [Folder("wanted", path) for path in request["paths"]]
    own = [Folder("state", request["state_dir"]), Folder("home", os.path.expanduser("~"))]
    return [*own, Folder("temporary", "/tmp"), Folder("shared", "/dev/shm"), *named]


def _setup(host: str) -> str:
    return "dflash-tui setup --host %s" % host if host else "dflash-tui setup"


def _worker(wanted: str, python: Optional[str], probe: Optional[Asked], node: Node) -> List[Check]:
    if python is None or probe is None:
        why = "is not on this node's PATH" if os.sep not in wanted else "is not on this node, or cannot be run"
        remedy = "name another with --python, or make one: %s" % node.setup
        return [Check("worker Python", PROBLEM, "%s %s" % (wanted, why), remedy)]
    facts = probe.facts
    code = probe.ended.code if probe.ended is not None else None
    stage = "" if facts.get("whole") else str(facts.get("stage", ""))
    return pythons.judge(Probed(python, facts, stage, probe.late_s, code, probe.said), node)


def _services(python: Optional[str], probe: Optional[Asked], envs: Asked, node: Node) -> List[Check]:
    """vLLM and the trainer in the worker Python and in every environment; and those that are not whole."""
    found = []
    if probe is not None and "packages" in probe.facts:
        found.append(("the worker Python", probe.facts["packages"]))
    checks = []
    for one in envs.facts.get("environments", []):
        if one["packages"] is None:
            found_there, remedy = "%s does not run" % one["python"], "make it again: %s" % node.setup
            checks.append(Check("environment %s" % one["name"], PROBLEM, found_there, remedy))
        elif python is None or not _same_folder(one["python"], python):
            found.append((one["python"], one["packages"]))
    maker = envs.facts.get("maker")
    if maker is not None:
        checks.append(Check("environments", OK, "job %s makes some now" % maker if maker else "some are made now"))
    elif envs.facts.get("half"):
        half = ", ".join(envs.facts["half"])
        checks.append(Check("environments", WARNING, "not made to the end: %s" % half, "go on with: %s" % node.setup))
    services = pythons.services(found, node)
    if "environments" not in envs.facts:
        why = "no answer within %g s" % envs.late_s if envs.late_s is not None else envs.said or "no answer"
        checks.append(Check("environments", UNKNOWN, "could not be looked at: %s" % why))
        services = [check for check in services if check.status == OK]  # what was not found may be in one of them
    return checks + services


def _same_folder(one: str, other: str) -> bool:
    # Of the folders: the Pythons themselves lead to one and the same that they were made from.
    return os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other))


def _silent(group: List[Folder], part: Asked) -> List[Check]:
    """The folders of which nothing was said: their disk does not answer, and neither would a job on it."""
    told = {check.name for check in part.checks}
    missing = [folder for folder in group if folder.name not in told]
    if part.late_s is not None:
        found, remedy = "did not answer within %g s" % part.late_s, "is a network disk dead? see `dmesg`, mount it anew"
        return [Check(folder.name, PROBLEM, "%s %s" % (folder.path, found), remedy) for folder in missing]
    why = part.said or "no answer"
    return [Check(folder.name, UNKNOWN, "%s: %s" % (folder.path, why)) for folder in missing]


def _say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode("ascii") + b"\n")


def _task_folders(request: Request) -> None:
    named = [Folder(*folder) for folder in request["folders"]]
    folders.look(named, request["write"], lambda check: _say(**check.to_json()))


def _task_cards(request: Request) -> None:
    _say(**cards.read())


def _task_environments(request: Request) -> None:
    _say(**environments.look())


TASKS: Dict[str, Callable[[Request], None]] = {
    "folders": _task_folders,
    "cards": _task_cards,
    "environments": _task_environments,
}
