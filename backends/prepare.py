"""The trainer's Arrow dataset: `input_ids`, `loss_mask`, `seq_len`, one row an assistant turn, or rows tokenised before.

Rows stand in an order that the seed and the conversations decide, so that the last tenth, on which the trainer validates,
is like the rest. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from backends.arrowfile import ArrowFolder
from backends.conversations import Conversation, Records, Skipped, Tokenised, Unusable
from backends.dataset import PreparedDataset
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.progress import Progress
from backends.spec import PrepareSpec
from backends.statistics import Statistics
from backends.template import Row, Template, Turn

# Beside the dataset: what it was made from, so that the same command again is known to be done.
RECORD = "prepare.json"
_VERSION = 3
# Samples handed to the tokenizer together; it spreads them over the cores.
_BATCH = 256


class PrepareError(JobError):
    """Conversations, a tokenizer or an output folder that cannot be used: what, and the remedy."""


def prepare(spec: PrepareSpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Writes the dataset folder and returns the fields of `finished`.

    Every line of every file is checked before the output's place is touched; the folder appears whole or not at all. An
    output that holds this very dataset is finished at once. Raises JobError and Interrupted.
    """
    began = time.monotonic()
    events.emit("phase", phase="checking the conversations")
    found = Records(spec.inputs, spec.limit, spec.shuffle_seed)
    template = None
    if found.conversations:
        events.emit("phase", phase="loading the tokenizer")
        template = Template(spec.model)
    identity = _identity(spec, found, template)
    done = _already_done(Path(spec.output), identity)
    if done is not None:
        events.emit("started", verb="prepare", total=found.samples, already_done=done["samples"])
        return {**done, "output": spec.output, "already_done": True}
    events.emit("started", verb="prepare", total=found.samples, already_done=0)
    counts = Counts(Progress(events, total=found.samples), events)
    with ArrowFolder(Path(spec.output), keep_messages=spec.keep_messages) as folder:
        for batch in _batches(found, template, counts):
            if should_stop():
                raise Interrupted("stopped before the dataset was whole; nothing was written", 0, found.samples)
            for item, row in zip(batch, _rows(batch, template, spec.max_tokens), strict=True):
                if isinstance(row, Unusable):
                    counts.skip(str(row), item.where)
                else:
                    counts.keep(row)
                    folder.add(row.input_ids, row.loss_mask, item.messages if isinstance(item, Turn) else ())
            counts.progress.tell()
        counts.warn()
        if not counts.samples:
            reasons = "; ".join(f"{number} × {reason}" for reason, number in counts.skipped.most_common(3))
            raise PrepareError(f"no sample is left of {found.samples} ({reasons})", "see the reasons")
        record = {
            "version": _VERSION,
            "identity": identity,
            "inputs": list(spec.inputs),
            "model": spec.model,
            "finished": counts.outcome(),
        }
        fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        folder.commit(RECORD, json.dumps(record, indent=2) + "\n", fingerprint)
    counts.progress.tell(now=True)
    return {
        "done": counts.samples,
        "total": found.samples,
        "bytes": sum(path.stat().st_size for path in Path(spec.output).iterdir()),
        "elapsed_s": round(time.monotonic() - began, 3),
        "output": spec.output,
        "already_done": False,
        **counts.outcome(),
    }


class Counts:
    """What became of the samples."""

    def __init__(self, progress: Progress, events: EventLog) -> None:
        self.progress = progress
        self.samples = self.tokens = self.supervised = self.truncated = self.moved = 0
        self._statistics = Statistics()
        self.skipped: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._events = events

    def keep(self, row: Row) -> None:
        self.samples += 1
        self.tokens += len(row.input_ids)
        supervised = sum(row.loss_mask)
        self.supervised += supervised
        self._statistics.add(len(row.input_ids), supervised)
        self.truncated += row.truncated
        self.moved += row.moved
        self.progress.add(samples=1, tokens=len(row.input_ids), nbytes=0)

    def skip(self, reason: str, where: str, number: int = 1) -> None:
        self.skipped[reason] += number
        self._first.setdefault(reason, where)
        self.progress.skipped += number

    def warn(self) -> None:
        """One warning a reason, with the first place."""
        for reason, number in self.skipped.most_common():
            message = f"{number} samples skipped: {reason} (first: {self._first[reason]})"
            self._events.emit("warning", message=message)
        if self.moved:
            self._events.emit(
                "warning",
                message=f"in {self.moved} samples the turn begins otherwise than the generation prompt ends;"
                " they are supervised from the first token that differs",
            )

    def outcome(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "supervised_share": round(self.supervised / self.tokens, 4) if self.tokens else 0.0,
            "skipped": dict(self.skipped),
            "truncated": self.truncated,
            "statistics": self._statistics.to_json(),
        }


def _batches(found: Records, template: Template | None, counts: Counts) -> Iterator[list[Turn | Tokenised]]:
    batch: list[Turn | Tokenised] = []
    for item in found:
        if isinstance(item, Skipped):
            counts.skip(item.reason, item.where, item.samples)
        elif isinstance(item, Tokenised):
            batch.append(item)
        else:
            batch.extend(_turns(item, template, counts))
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _turns(conversation: Conversation, template: Template | None, counts: Counts) -> Iterator[Turn]:
    assert template is not None  # there is one wherever there is a conversation
    for index in conversation.assistant_turns:
        try:
            yield template.turn(conversation, index)
        except Unusable as reason:
            counts.skip(str(reason), conversation.where)


def _rows(batch: list[Turn | Tokenised], template: Template | None, max_tokens: int) -> Iterator[Row | Unusable]:
    """The row of each item, or why it has none, in order."""
    turns = [item for item in batch if isinstance(item, Turn)]
    rendered = iter(template.rows(turns, max_tokens) if template is not None else ())
    for item in batch:
        yield next(rendered) if isinstance(item, Turn) else _passed_through(item, max_tokens)


def _passed_through(item: Tokenised, max_tokens: int) -> Row | Unusable:
    """A tokenised row as it is, cut on the right."""
    if not any(item.loss_mask[:max_tokens]):
        cut = len(item.input_ids) > max_tokens
        return Unusable(f"no token{f' of the first {max_tokens:,}' if cut else ''} of a tokenised row is supervised")
    truncated = len(item.input_ids) > max_tokens
    return Row(item.input_ids[:max_tokens], item.loss_mask[:max_tokens], truncated, moved=False)


def _identity(spec: PrepareSpec, found: Records, template: Template | None) -> dict[str, Any]:
    """What makes two prepares the same: the contents, not the names of files."""
    return {
        "inputs_sha256": list(found.sha256),
        "tokenizer_sha256": None if template is None else template.fingerprint,
        "max_tokens": spec.max_tokens,
        "limit": spec.limit,
        "shuffle_seed": spec.shuffle_seed,
        "keep_messages": spec.keep_messages,
    }


def _already_done(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The outcome of the earlier prepare that made this very folder; None where nothing is there. Raises PrepareError."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    remedy = "delete it or give another output folder"
    if not output.is_dir():
        raise PrepareError(f"the output {output} is a file", remedy)
    inside = sorted(path.name for path in output.iterdir() if path.is_dir())
    if inside:
        # Hidden states are often kept in the folder of their dataset.
        remedy = f"give another output folder; in this one {inside[0]} would be lost too"
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
        same = record["version"] == _VERSION and record["identity"] == identity
        finished = dict(record["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        raise PrepareError(f"the output {output} exists and was not written by `prepare`", remedy) from None
    if not same:
        changed = [name for name, value in identity.items() if record["identity"].get(name) != value]
        changed = changed or [f"the version of prepare, {record['version']} there and {_VERSION} here"]
        raise PrepareError(f"the output {output} holds another dataset (differs in {', '.join(changed)})", remedy)
    if len(PreparedDataset(output)) != finished["samples"]:
        raise PrepareError(
            f"the output {output} has not the {finished['samples']} samples that it was written with", remedy
        )
    return {"done": finished["samples"], "total": finished["samples"], **finished}
