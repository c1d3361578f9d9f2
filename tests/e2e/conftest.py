"""A model and a dataset for the whole run, made by the project's own means; a site; a real sshd on 127.0.0.1:22280."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import Done, JobFolder, Site, Terminal

ROOT = Path(__file__).parents[2]
CONVERSATIONS = ROOT / "backends" / "demo" / "data" / "gsm8k-test-220.jsonl"

# Big enough that a job can be caught in the middle on a fast machine, small enough to end soon on a slow one.
BLOCKS, HIDDEN, COPIES, LONG_COPIES = 8, 128, 2, 16

BUILD = """
import json, sys, torch
from pathlib import Path
from backends.demo.model import build_model
from backends.events import EventLog
from backends.prepare import prepare
from backends.spec import PrepareSpec
model, conversations, layers, hidden, datasets = sys.argv[1:]
torch.set_num_threads(2)
texts = [m["content"] for line in open(conversations) for m in json.loads(line)["conversations"]]
build_model(model, texts, layers=int(layers), hidden=int(hidden))
samples = []
for output, copies in json.loads(datasets).items():
    spec = {"model": model, "inputs": [conversations] * copies, "output": output}
    samples.append(prepare(PrepareSpec.loads(json.dumps(spec)), EventLog(None), lambda: False)["samples"])
print(json.dumps(samples))
"""


# Jobs of minutes on a loaded machine; what hangs is found by the limits of `poll`.
TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class Shared:
    """What every job of these tests works on; `long` is for jobs that are stopped while something else is done first."""

    model: Path
    dataset: Path
    samples: int
    long: Path
    long_samples: int

    def extract(self, output: Path, *more: object) -> list[object]:
        """The options of an extraction that takes a while."""
        return self._extract(self.dataset, output, *more)

    def extract_long(self, output: Path, *more: object) -> list[object]:
        """The options of one that takes minutes, or of as many of its samples as `more` says."""
        return self._extract(self.long, output, *more)

    def _extract(self, dataset: Path, output: Path, *more: object) -> list[object]:
        given = ["--model", self.model, "--dataset", dataset, "--output", output]
        return [*given, "--dtype", "float32", "--device", "cpu", "--pack-tokens", 512, "--min-free-bytes", 0, *more]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("shared")
    env = {**os.environ, "HOME": str(folder), "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    model, dataset, long = folder / "model", folder / "dataset", folder / "long"
    datasets = json.dumps({str(dataset): COPIES, str(long): LONG_COPIES})
    words = [str(model), str(CONVERSATIONS), str(BLOCKS), str(HIDDEN), datasets]
    # One process for all of it: to import torch and Transformers takes longer than the work.
    made = subprocess.run([sys.executable, "-c", BUILD, *words], env=env, check=True, stdout=subprocess.PIPE)
    samples, long_samples = json.loads(made.stdout.splitlines()[-1])
    return Shared(model, dataset, samples, long, long_samples)


@pytest.fixture
def conversations() -> Path:
    """A file of real conversations."""
    return CONVERSATIONS


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("home"))
    yield made
    end_everything_of(made.home / ".local" / "state" / "dflash-tui")


def end_everything_of(state_dir: Path) -> None:
    """Kills what a failed test left: every process of a job under `state_dir`."""
    jobs = state_dir / "jobs"
    for folder in jobs.iterdir() if jobs.is_dir() else ():
        for pid in JobFolder(state_dir, folder.name).processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def state_dir(site: Site) -> Path:
    return site.home / ".local" / "state" / "dflash-tui"


Launcher = Callable[..., JobFolder]


@pytest.fixture
def launch(site: Site, state_dir: Path) -> Launcher:
    """Launches by the command; the job's folder on this machine."""

    def launched(*words: object) -> JobFolder:
        done: Done = site.run("launch", *words, "--json")
        return JobFolder(state_dir, done.json["job"])

    return launched


@pytest.fixture
def terminal(site: Site) -> Iterator[Callable[..., Terminal]]:
    """Opens `dflash-tui` in a terminal of a size; ends it again."""
    made: list[Terminal] = []

    def opened(width: int, height: int, *words: object) -> Terminal:
        made.append(Terminal(width, height, site.command(*words), site.env, site.home))
        return made[-1]

    yield opened
    for one in made:
        one.close()
