"""Conversations written, prepared and read back, for tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from backends.dataset import PreparedDataset
from backends.events import EventLog
from backends.prepare import prepare
from backends.spec import PrepareSpec


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"conversations": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def run_prepare(
    model: Path, output: Path, *inputs: str, events: EventLog | None = None, **fields: Any
) -> dict[str, Any]:
    fields.setdefault("shuffle_seed", None)
    spec = PrepareSpec(model=str(model), inputs=inputs, output=str(output), **fields)
    return prepare(spec, events or EventLog(None), lambda: False)


@functools.cache
def tokenizer_of(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def parts(model: Path, output: Path, row: int) -> tuple[str, str]:
    """The text before the supervised tokens and the supervised text; nothing follows."""
    tokenizer = tokenizer_of(model)
    ids, mask = PreparedDataset(output).row(row)
    first = mask.index(1)
    assert mask == [0] * first + [1] * (len(ids) - first)
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])
