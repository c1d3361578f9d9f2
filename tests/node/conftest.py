"""A node for tests: its own home and state, a bundle of this very source, and a program in the place of `backends`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import processes
from tests.node.client import REPOSITORY, Client, until


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose workers are tests/node/program.py."""
    folder = tmp_path / "bundle"
    (folder / "backends").mkdir(parents=True)
    shutil.copytree(
        REPOSITORY / "dflash_tui" / "node", folder / "dflash_tui" / "node", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(REPOSITORY / "dflash_tui" / "__init__.py", folder / "dflash_tui")
    shutil.copy(Path(__file__).with_name("program.py"), folder / "backends" / "__main__.py")
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {**kept, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TMPDIR": str(tmp_path)}


@pytest.fixture
def state(environment: dict[str, str]) -> Path:
    return Path(environment["XDG_STATE_HOME"]) / "dflash-tui"


@pytest.fixture
def connect(bundle: Path, environment: dict[str, str], state: Path) -> Iterator[Callable[..., Client]]:
    """Starts agents; at the end nothing that a job of this node started is left."""
    clients: list[Client] = []

    def start(**fields: Any) -> Client:
        fields.setdefault("env", environment)
        clients.append(Client(bundle, **fields))
        return clients[-1]

    try:
        yield start
    finally:
        for client in clients:
            client.close()
        kill_all(state)


@pytest.fixture
def agent(connect: Callable[..., Client]) -> Client:
    return connect()


def of_state(state: Path) -> list[processes.Stat]:
    """Living processes of every job below the state folder, the supervisors included."""
    stats = processes.snapshot()
    found = {stat for stat in stats.values() if str(state) in processes.command(stat.pid)}
    for folder in (state / "jobs").glob("*"):
        if (folder / "log").exists():
            log = (folder / "log").stat()
            found |= set(processes.of_job(str(folder), {"dev": log.st_dev, "ino": log.st_ino}, (), stats))
    return sorted(stat for stat in found if stat.pid != os.getpid())


def kill_all(state: Path) -> None:
    def none_left() -> bool:
        left = of_state(state)
        for stat in left:
            try:
                processes.send(stat.identity, signal.SIGKILL)
            except PermissionError:
                continue
        return not left

    until(none_left, "the processes of the test to end")
