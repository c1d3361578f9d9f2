"""Environments are made, left alone, mended and swapped by the real runner, pip and Python; the wheels are small."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.node.client import REPOSITORY, until
from tests.node.wheelhouse import make_wheel

MAIN = REPOSITORY / "dflash_tui" / "node" / "__main__.py"
LIMIT_S = 250
MANY = 3000  # files, so that an installation can be caught in the middle


@dataclass
class Node:
    """A place for environments, a folder of wheels, and the runner as a supervisor starts it."""

    folder: Path
    wheels: Path
    more: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    @property
    def envs(self) -> Path:
        return self.folder / "data" / "dflash-tui" / "envs"

    @property
    def env(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {
            "PATH": path,
            "HOME": str(home),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "DFLASH_TUI_JOB": "j1",
            "PIP_CONFIG_FILE": os.devnull,
            **self.more,
        }

    def start(self, **spec: Any) -> subprocess.Popen[bytes]:
        file = self.folder / "spec.json"
        file.write_text(json.dumps({"wheels": str(self.wheels), "python": sys.executable, **spec}))
        self.events_file.unlink(missing_ok=True)
        command = [*self.prefix, sys.executable, "-I", "-S", "-u", str(MAIN), "setup", str(file)]
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--events", str(self.events_file)],
                env=self.env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def run(self, code: int, **spec: Any) -> dict[str, Any]:
        """The last event of a setup that ends with that exit status."""
        runner = self.start(**spec)
        try:
            ended = runner.wait(LIMIT_S)
        finally:
            kill_tree(runner)
        assert ended == code, self.log
        assert "Traceback" not in self.log
        return self.events[-1]

    def plan(self, **spec: Any) -> dict[str, Any]:
        request = {"verb": "setup", "spec": {"wheels": str(self.wheels), "python": sys.executable, **spec}}
        command = [*self.prefix, sys.executable, "-I", "-S", str(MAIN), "setup", "--plan"]
        asked = subprocess.run(
            command, env=self.env, input=json.dumps(request).encode(), capture_output=True, check=True, timeout=LIMIT_S
        )
        answer: dict[str, Any] = json.loads(asked.stdout)
        return answer

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def events(self) -> list[dict[str, Any]]:
        try:
            lines = self.events_file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1]]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")

    def record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.envs / name / "env.json").read_bytes())
        return record

    def ask(self, name: str, code: str) -> str:
        """What the environment's Python prints."""
        run = subprocess.run(
            [self.envs / name / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        make_wheel(folder, "alpha", version, {"alpha.py": f"version = {version!r}\n"})
    make_wheel(folder, "bulk", "1.0", {f"bulk/m{number}.py": f"n = {number}\n" for number in range(MANY)})
    make_wheel(folder, "zeros", "1.0", {"zeros.bin": bytes(150_000_000)})
    make_wheel(folder, "safetensors", "9.9", {"safetensors.py": "raise ImportError('liblost.so is lost')\n"})
    server = "import sys\ndef main():\n    print('0.26.0' if sys.argv[1:] == ['--version'] else 'what?')\n"
    make_wheel(folder, "vllm", "0.26.0", {"vllm.py": server}, {"vllm": "vllm:main"})
    broken = "import sys\ndef main():\n    sys.exit('libcuda.so.1 is not there')\n"
    make_wheel(folder, "vllm", "0.27.0", {"vllm.py": broken}, {"vllm": "vllm:main"})
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Node:
    """A node whose worker environment is whole."""
    node = Node(tmp_path_factory.mktemp("made"), wheels)
    node.run(0, pins={"worker": ["alpha==1.0"]})
    return node


def of_worker(*requirements: str) -> Mapping[str, list[str]]:
    return {"worker": list(requirements)}


def test_an_environment_counts_once_its_record_is_there(made: Node) -> None:
    finished = made.events[-1]
    record = made.record("worker")
    assert finished["event"] == "finished"
    assert (record["name"], record["requirements"], record["versions"]) == ("worker", ["alpha==1.0"], {"alpha": "1.0"})
    assert record["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert made.ask("worker", "import alpha; print(alpha.version)") == "1.0"
    assert finished["worker_python"] == str((made.envs / "worker").resolve() / "bin" / "python")
    assert {event["phase"] for event in made.events if event["event"] == "progress"} >= {
        "worker: checking what was installed"
    }
    assert not (made.envs / ".temporary").exists()


def test_a_whole_environment_is_left_alone_and_a_changed_pin_swaps_in_another(
    wheels: Path, tmp_path: Path, made: Node
) -> None:
    node = Node(tmp_path, wheels)
    shutil.copytree(made.envs, node.envs, symlinks=True)  # an environment may be moved while nobody runs its scripts
    before = (node.envs / "worker").resolve()
    assert node.plan(pins=of_worker("alpha==1.0"))["already_whole"] == ["worker"]
    node.run(0, pins=of_worker("alpha==1.0"))
    assert (node.envs / "worker").resolve() == before
    assert "pip install" not in node.log

    user = subprocess.Popen([before / "bin" / "python", "-c", "import alpha; input()"], stdin=subprocess.PIPE)
    try:
        assert node.plan(pins=of_worker("alpha==2.0"))["makes"] == {"worker": ["alpha==2.0"]}
        node.run(0, pins=of_worker("alpha==2.0"))
        assert node.ask("worker", "import alpha; print(alpha.version)") == "2.0"
        assert before.is_dir(), "a process was running out of it"
        assert [str(before) in event["message"] for event in node.events if event["event"] == "warning"] == [True]
    finally:
        user.kill()
        user.wait()
    # Back again: the old one is whole, and only what nobody uses goes.
    node.run(0, pins=of_worker("alpha==1.0"))
    assert [place.name for place in (node.envs / ".built").iterdir()] == [before.name]


def test_a_setup_that_was_killed_in_the_middle_goes_on_and_mends_what_is_in_pieces(
    wheels: Path, tmp_path: Path
) -> None:
    node = Node(tmp_path, wheels)
    runner = node.start(pins=of_worker("bulk", "alpha==1.0"))
    try:
        until(
            lambda: list(node.envs.glob(".built/*/lib/python3.*/site-packages/bulk/m*.py")), "the first files", LIMIT_S
        )
    finally:
        kill_tree(runner)
    (built,) = (node.envs / ".built").iterdir()
    assert not (node.envs / "worker").exists()
    marker = (built / "venv.json").stat().st_mtime_ns
    node.run(0, pins=of_worker("bulk", "alpha==1.0"))
    assert (node.envs / "worker").resolve() == built
    assert (built / "venv.json").stat().st_mtime_ns == marker, "it was begun anew"
    assert node.ask(
        "worker", f"import importlib as i; print(sum(i.import_module(f'bulk.m{{k}}').n for k in range({MANY})))"
    ) == str(sum(range(MANY)))

    # What a power loss leaves: metadata that is whole, and a file that is not.
    (site,) = built.glob("lib/python3.*/site-packages")
    (site / "bulk" / "m7.py").write_bytes(b"")
    assert node.plan(pins=of_worker("bulk", "alpha==1.0"))["already_whole"] == []
    node.run(0, pins=of_worker("bulk", "alpha==1.0"))
    assert "bulk-1.0 was left in pieces" in node.log
    assert node.ask("worker", "import bulk.m7; print(bulk.m7.n)") == "7"


def test_a_folder_whose_python_or_pip_is_gone_is_begun_anew(made: Node, tmp_path: Path) -> None:
    node = Node(tmp_path, made.wheels)
    shutil.copytree(made.envs, node.envs, symlinks=True)
    built = (node.envs / "worker").resolve()
    (built / "bin" / "python").unlink()
    node.run(0, pins=of_worker("alpha==1.0"))
    assert node.ask("worker", "import alpha; print(alpha.version)") == "1.0"
    (main,) = built.glob("lib/python3.*/site-packages/pip/_internal/commands/install.py")
    main.unlink()
    node.run(0, pins=of_worker("alpha==1.0"))
    assert main.exists() and (node.envs / "worker").resolve() == built


def test_a_base_python_that_is_named_by_a_shim_is_the_one_behind_it(made: Node, tmp_path: Path) -> None:
    shim = tmp_path / "python3"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    assert made.plan(python=str(shim), pins=of_worker("alpha==1.0"))["already_whole"] == ["worker"]


def test_a_request_to_stop_ends_pip_too_and_the_setup_says_that_it_goes_on(wheels: Path, tmp_path: Path) -> None:
    node = Node(tmp_path, wheels)
    runner = node.start(pins=of_worker("alpha==1.0"))
    try:
        until(
            lambda: psutil.Process(runner.pid).children(recursive=True), "a program that makes the environment", LIMIT_S
        )
        until(lambda: any(event["event"] == "phase" for event in node.events), "the first phase", LIMIT_S)
        children = psutil.Process(runner.pid).children(recursive=True)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(LIMIT_S) == 3
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    finally:
        kill_tree(runner)
    assert node.events[-1]["event"] == "interrupted"
    assert not (node.envs / "worker").exists()


def test_a_second_setup_at_the_same_time_is_refused_and_names_the_first(wheels: Path, tmp_path: Path) -> None:
    node = Node(tmp_path, wheels)
    runner = node.start(pins=of_worker("bulk"))
    try:
        until(lambda: node.events, "the first event", LIMIT_S)
        refused = node.plan()
        assert not refused["ok"]
        assert "job j1 is making this node's environments" in refused["error"]
        other = Node(tmp_path / "other", wheels, {"XDG_DATA_HOME": str(tmp_path / "data"), "DFLASH_TUI_JOB": "j2"})
        other.folder.mkdir()
        assert "job j1" in other.run(2, pins=of_worker("alpha==1.0"))["message"]
    finally:
        kill_tree(runner)


def test_an_environment_that_fails_its_check_is_not_whole_and_the_cause_is_told(wheels: Path, tmp_path: Path) -> None:
    node = Node(tmp_path, wheels)
    failed = node.run(1, pins=of_worker("alpha==1.0", "safetensors"))
    assert "safetensors cannot be used in the environment worker: ImportError: liblost.so is lost" in failed["message"]
    assert failed["remedy"]
    assert not (node.envs / "worker").exists()


def test_vllm_has_an_environment_of_its_version_that_answers_for_itself(made: Node, tmp_path: Path) -> None:
    node = Node(tmp_path, made.wheels)
    shutil.copytree(made.envs, node.envs, symlinks=True)
    pins = of_worker("alpha==1.0")
    plan = node.plan(vllm="0.26.0", pins=pins)
    assert plan["makes"] == {"vllm-0.26.0": ["vllm==0.26.0"]}
    assert any("vLLM of PyPI is built for CUDA" in line for line in plan["warnings"]) is (plan["driver"] is None)
    assert plan["bytes_total"] > 10**10
    node.run(0, vllm="0.26.0", pins={**pins, "vllm-0.26.0": ["vllm==0.26.0"]})
    assert node.record("vllm-0.26.0")["versions"] == {"vllm": "0.26.0"}
    assert "vllm --version" in node.log
    failed = node.run(1, vllm="0.27.0", pins={**pins, "vllm-0.27.0": ["vllm==0.27.0"]})
    assert "libcuda.so.1 is not there" in failed["message"]
    assert node.record("vllm-0.26.0")["versions"] == {"vllm": "0.26.0"}


def test_an_index_that_cannot_be_reached_is_told_as_that(tmp_path: Path) -> None:
    node = Node(tmp_path, Path(), {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"})
    failed = node.run(1, wheels="", pins=of_worker("alpha==1.0"))
    assert failed["message"] == "the package index cannot be reached from this node"
    assert "--wheels" in failed["remedy"]


@pytest.fixture
def small_disk(tmp_path: Path, wheels: Path) -> Iterator[Any]:
    """A node whose data lies on a disk of so many MB, which goes with the process that sees it."""
    assert os.geteuid() == 0, "a small disk needs root: run this test as root"
    (tmp_path / "data").mkdir()

    def make(megabytes: int) -> Node:
        script = f'mount -t tmpfs -o size={megabytes}m tmpfs {tmp_path}/data && exec "$@"'
        return Node(tmp_path, wheels, prefix=("unshare", "--mount", "/bin/sh", "-c", script, "sh"))

    yield make


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(small_disk: Any) -> None:
    node = small_disk(40)
    refused = node.plan(pins=of_worker("alpha==1.0"))
    assert not refused["ok"]
    assert "GB left, and worker takes" in refused["error"]
    assert node.run(2, pins=of_worker("alpha==1.0"))["message"] == refused["error"]


def test_a_disk_that_fills_up_in_the_middle_is_told_as_that(small_disk: Any) -> None:
    failed = small_disk(100).run(1, pins=of_worker("zeros"))
    assert failed["message"] == "no space is left for the environment worker"
