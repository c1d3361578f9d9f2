"""Tiny models of real architectures and prepared rows of real conversations, made once a session."""

from __future__ import annotations

import os

# Before torch is imported: the tests share their cores with others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
from pathlib import Path
from typing import Any

import pytest

import backends.demo
from backends.events import EventLog
from backends.prepare import prepare
from backends.spec import ExtractSpec, PrepareSpec

DATA = Path(backends.demo.__file__).parent / "data"


class RecordedEvents(EventLog):
    """Keeps what is emitted, in order, as (event, fields)."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.seen.append((event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.seen if name == event]


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture(scope="session")
def conversation_files() -> tuple[str, str]:
    """The demo's conversations: {role, content} with one turn, and {from, value} with two."""
    return str(DATA / "gsm8k-test-220.jsonl"), str(DATA / "mt-bench.jsonl")


@pytest.fixture(scope="session")
def texts(conversation_files: tuple[str, str]) -> list[str]:
    lines = [line for name in conversation_files for line in Path(name).read_text(encoding="utf-8").splitlines()]
    return [turn.get("content") or turn["value"] for line in lines for turn in json.loads(line)["conversations"]]


class Models(dict[str, Path]):
    """Model folders by family, each built when it is first asked for: 8 blocks, hidden 64, float32."""

    def __init__(self, root: Path, texts: list[str]) -> None:
        super().__init__()
        self._root = root
        self._texts = texts

    def __missing__(self, family: str) -> Path:
        from backends.demo.model import build_model

        build_model(self._root / family, self._texts, family=family)
        self[family] = self._root / family
        return self[family]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> dict[str, Path]:
    return Models(tmp_path_factory.mktemp("models"), texts)


@pytest.fixture(scope="session")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], conversation_files: tuple[str, str]
) -> Path:
    """A prepared dataset of 24 real samples: the first conversations with one turn, then with two."""
    root = tmp_path_factory.mktemp("data")
    chosen = root / "chosen.jsonl"
    lines = [Path(name).read_text(encoding="utf-8").splitlines(keepends=True) for name in conversation_files]
    chosen.write_text("".join(lines[0][:16] + lines[1][:4]), encoding="utf-8")
    prepare(
        PrepareSpec(model=str(models["qwen3"]), inputs=(str(chosen),), output=str(root / "dataset")),
        EventLog(None),
        lambda: False,
    )
    return root / "dataset"


@pytest.fixture(scope="session")
def extraction(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], dataset: Path) -> Path:
    """The hidden states of `dataset` by the hf backend: qwen3, preset dflash, float32. Copy it before changing anything."""
    from backends.runner import extract

    output = tmp_path_factory.mktemp("states") / "hidden_states"
    extract(
        ExtractSpec(
            model=str(models["qwen3"]), dataset=str(dataset), output=str(output), dtype="float32", min_free_bytes=0
        ),
        EventLog(None),
        lambda: False,
    )
    return output
