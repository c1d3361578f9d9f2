"""The command lines of jobs and plans: most verbs are `backends`' and run in a worker Python, some are the node's own."""

import os
import sys
from typing import List

NODE_VERBS = ("setup",)  # they run in the agent's Python, of the standard library alone


def is_of_node(verb: str) -> bool:
    return verb in NODE_VERBS


def node_python() -> str:
    """The Python of the node's own verbs: the one that the agent found."""
    return sys.executable


def job_command(bundle: str, python: str, verb: str, spec: str, events: str) -> List[str]:
    """What a supervisor runs."""
    if is_of_node(verb):
        return [python, "-I", "-S", "-u", _main(bundle), verb, spec, "--events", events]
    return [python, "-u", _backends(bundle), verb, spec, "--events", events]


def plan_command(bundle: str, python: str, verb: str) -> List[str]:
    """What answers a plan: `{"verb", "spec"}` on its standard input, the plan in the last line of its output."""
    if is_of_node(verb):
        return [python, "-I", "-S", _main(bundle), verb, "--plan"]
    return [python, _backends(bundle), "plan", "-"]


def _main(bundle: str) -> str:
    return os.path.join(bundle, "dflash_tui", "node", "__main__.py")


def _backends(bundle: str) -> str:
    return os.path.join(bundle, "backends", "__main__.py")
