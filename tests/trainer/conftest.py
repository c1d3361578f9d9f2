"""A tiny verifier whose next token can be known, and its hidden states: as they are, and one layer off.

The conversations ask for trees in the order of the alphabet, up or down, from one on; the answer is certain from its first
word. Only the verifier's last block and its head learn that: every slot before the last is then far from what the verifier
says, as it must be for a last slot that is one layer off to show.
"""

from __future__ import annotations

import os

# Before torch is imported: the tests share their cores with others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.dataset import PreparedDataset
from backends.events import EventLog
from backends.prepare import prepare
from backends.spec import ExtractSpec, PrepareSpec

TREES = ("ash", "beech", "birch", "cedar", "elm", "fir", "larch", "lime", "maple", "oak", "palm", "pine")
SAMPLES = 400
BLOCKS = 6
# The preset "dflash" of six blocks, and each of them one layer before.
IDS = (2, 3, 4, 6)
SHIFTED = tuple(k - 1 for k in IDS)
STEPS = 100


def _conversation(chance: random.Random) -> dict[str, Any]:
    way, at, words = chance.choice((1, -1)), chance.randrange(len(TREES)), chance.randrange(20, 40)
    answer = [TREES[(at + way * step) % len(TREES)] for step in range(words)]
    question = f"{'up' if way == 1 else 'down'} from {answer[0]}"
    return {
        "conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": " ".join(answer)}]
    }


def _learn(model: Any, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    """The last block, the norm and the head learn the answers; the mean loss of the last ten steps."""
    import torch

    for weight in model.parameters():
        weight.requires_grad_(False)
    learning = [*model.model.layers[-1].parameters(), *model.model.norm.parameters(), *model.lm_head.parameters()]
    for weight in learning:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(learning, lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    chance, losses = random.Random(1), []
    for _ in range(STEPS):
        batch = chance.sample(rows, 16)
        longest = max(len(ids) for ids, _ in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for place, (ids, mask) in enumerate(batch):
            tokens[place, : len(ids)] = torch.tensor(ids)
            labels[place, : len(ids)] = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a model that knows its answers, and of the dataset that it knows."""
    from transformers import AutoModelForCausalLM

    from backends.demo.model import build_model

    root = tmp_path_factory.mktemp("verifier")
    chance = random.Random(0)
    talks = [_conversation(chance) for _ in range(SAMPLES)]
    (root / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks), encoding="utf-8")
    texts = [str(turn["content"]) for talk in talks for turn in talk["conversations"]]
    build_model(root / "model", texts, layers=BLOCKS, vocab_size=320)
    prepare(
        PrepareSpec(model=str(root / "model"), inputs=(str(root / "talks.jsonl"),), output=str(root / "data")),
        EventLog(None),
        lambda: False,
    )
    data = PreparedDataset(root / "data")
    assert len(data) == SAMPLES
    model = AutoModelForCausalLM.from_pretrained(root / "model", attn_implementation="sdpa").train()
    assert _learn(model, [data.row(row) for row in range(SAMPLES)]) < 0.5
    model.save_pretrained(root / "model")
    return root / "model", root / "data"


def _extract(model: Path, data: Path, output: Path, ids: tuple[int, ...]) -> Path:
    from backends.runner import extract

    spec = ExtractSpec(str(model), str(data), str(output), layers=ids, dtype="float32", min_free_bytes=0)
    assert extract(spec, EventLog(None), lambda: False)["done"] == SAMPLES
    return output


@pytest.fixture(scope="session")
def states(verifier: tuple[Path, Path]) -> Path:
    """The hidden states of the layers that the manifest names, in the trainer's place for them."""
    model, data = verifier
    return _extract(model, data, data / "hidden_states", IDS)


@pytest.fixture(scope="session")
def shifted(verifier: tuple[Path, Path], states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose manifest claims the ids of `states`, but each slot of its files is the layer before.

    The held-out rows, those that the trainer validates on, are right: so validation says what the verifier would accept.
    """
    model, data = verifier
    folder = tmp_path_factory.mktemp("shifted")
    wrong = _extract(model, data, folder / "one_before", SHIFTED)
    claimed = folder / "hidden_states"
    claimed.mkdir()
    (claimed / "manifest.jsonl").symlink_to(states / "manifest.jsonl")
    for row in range(SAMPLES):
        name = f"hs_{row}.safetensors"
        (claimed / name).symlink_to((wrong if row < int(SAMPLES * 0.9) else states) / name)
    return claimed
