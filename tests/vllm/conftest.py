"""What the tests on a real vLLM share: one node, tiny models in bfloat16, the demo's conversations. `make test-vllm` runs them.

`DFLASH_TUI_TEST_VLLM` is the Python with vLLM for the CPU (tests/vllm/cpu/install.py); no test of this folder is skipped
without it. A server starts in half a minute or more, so that jobs are module fixtures with a few tests on each.
"""

from __future__ import annotations

import os

# Before torch is imported: servers and tests share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.demo.run import DATA, INPUTS
from tests.node.client import REPOSITORY
from tests.vllm.real_node import Data, Site

# Jobs of minutes on a loaded machine; what hangs is found by the limits of what is waited for.
TIMEOUT_S = 3600

# As the demo's own models, in the dtype that vLLM runs; heads of a width that its attention on a CPU knows.
BUILD = """
import json, sys
import torch
from backends.conversations import Conversation, Records
from backends.demo.model import build_model
folder, inputs = sys.argv[1], sys.argv[2:]
texts = [str(turn["content"]) for one in Records(tuple(inputs)) if isinstance(one, Conversation) for turn in one.messages]
# Every token by all experts: a choice between two that are nearly equal is a coin's in 16 bits, and moves a token by a fifth.
hybrid = {"layers": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts_per_tok": 6}
for name, family, fields in (
    ("dense", "qwen3", {"head_dim": 32}),
    ("hybrid", "qwen3_next", {"head_dim": 32, **hybrid}),
    ("narrow", "qwen3", {"head_dim": 16}),
):
    build_model(f"{folder}/{name}", texts, family=family, dtype=torch.bfloat16, **fields)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("DFLASH_TUI_TEST_VLLM", "")
    assert python and Path(python).exists(), "the tests on a real vLLM need its Python: run `make test-vllm`"
    return python


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """The models, and the demo's conversations as a dataset."""
    from backends.events import EventLog
    from backends.prepare import prepare
    from backends.spec import PrepareSpec

    folder = tmp_path_factory.mktemp("data")
    inputs = tuple(str(DATA / name) for name in INPUTS)
    env = {**os.environ, "HOME": str(folder), "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", BUILD, str(folder), *inputs], env=env, check=True)
    dense, hybrid, narrow = (str(folder / name) for name in ("dense", "hybrid", "narrow"))
    spec = PrepareSpec(model=dense, inputs=inputs, output=str(folder / "conversations"))
    samples = int(prepare(spec, EventLog(None), lambda: False)["samples"])
    return Data(dense, hybrid, narrow, spec.output, samples)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, vllm_python: str, data: Data) -> Iterator[Site]:
    """One node for all of them, for what vLLM keeps in its home makes later starts shorter. Nothing of it is left at the end."""
    site = Site(tmp_path_factory.mktemp("node"), vllm_python, data)
    try:
        yield site
    finally:
        site.close()
