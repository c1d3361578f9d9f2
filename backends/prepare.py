"""The trainer's Arrow dataset from conversations: `input_ids`, `loss_mask`, `seq_len`, one row an assistant turn.

The loss mask needs no server and is the speculators trainer's own (its release 0.9.0): the template's tokens of what comes
before a turn, with the generation prompt, are context (0), and what the text with the turn has after them is supervised (1).
Where the generation prompt itself differs (it opens a block that the turn fills otherwise, or a token spans both), the turn
starts at the first token that differs, provided that the history before it agrees. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.arrowfile import ArrowFolder
from backends.conversations import Conversation, Scan, Unusable, read, scan
from backends.dataset import PreparedDataset
from backends.errors import Interrupted, JobError, one_line
from backends.events import EventLog
from backends.progress import Progress
from backends.spec import PrepareSpec

# Beside the dataset: what it was made from, so that the same command again is known to be done.
RECORD = "prepare.json"
_VERSION = 2
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Samples handed to the tokenizer together; it spreads them over the cores.
_BATCH = 256


class PrepareError(JobError):
    """Conversations, a tokenizer or an output folder that cannot be used: what, and the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to be. where: "file:line"; messages: up to and with the assistant's turn.

    prompt: the template's text of what comes before the turn, with the generation prompt; text: of all messages.
    """

    where: str
    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """input_ids, loss_mask: of equal length, at most the limit. truncated: tokens were cut off on the right.
    moved: the turn starts before the generation prompt's end, since the two differ there."""

    input_ids: list[int]
    loss_mask: list[int]
    truncated: bool
    moved: bool


class Template:
    """A model folder's tokenizer and chat template. Raises PrepareError where it has none that can be used."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        if not Path(model).is_dir():
            raise PrepareError(
                f"the model {model} is not a folder", "give the folder of the model that will be trained for"
            )
        # Without one of these, Transformers makes an empty tokenizer out of config.json and says nothing.
        if not any((Path(model) / name).is_file() for name in _TOKENIZER_FILES):
            raise PrepareError(
                f"the model folder {model} has no tokenizer", "add its tokenizer.json and tokenizer_config.json"
            )
        logging.set_verbosity_error()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a damaged or missing tokenizer.
            raise PrepareError(
                f"the tokenizer of {model} cannot be loaded: {one_line(error)}",
                "the folder needs the model's tokenizer files",
            ) from error
        if not getattr(self._tokenizer, "is_fast", False):
            raise PrepareError(f"the tokenizer of {model} tells no offsets", "the folder needs its tokenizer.json")
        if not self._tokenizer.chat_template:
            raise PrepareError(
                f"the tokenizer of {model} has no chat template", "put chat_template.jinja into the folder"
            )
        self._core = self._tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        template = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        self.fingerprint = hashlib.sha256((self._core.to_str() + template).encode()).hexdigest()

    def sample(self, conversation: Conversation, turn: int) -> Sample:
        """The text of a conversation up to its assistant message `turn`. Raises Unusable."""
        if not turn:
            raise Unusable("the assistant's turn opens its conversation")
        messages, tools = conversation.messages[: turn + 1], conversation.tools
        prompt = self._render(messages[:-1], tools, generation=True)
        return Sample(conversation.where, messages, tools, prompt, self._render(messages, tools, generation=False))

    def rows(self, samples: list[Sample], max_tokens: int) -> list[Row | Unusable]:
        """The row of each sample, or why it has none."""
        ids = self._encode([text for sample in samples for text in (sample.prompt, sample.text)])
        pairs = zip(samples, ids[::2], ids[1::2], strict=True)
        return [self._row(sample, prompt[:max_tokens], whole, max_tokens) for sample, prompt, whole in pairs]

    def _row(self, sample: Sample, prompt: list[int], whole: list[int], max_tokens: int) -> Row | Unusable:
        ids = whole[:max_tokens]
        if len(prompt) >= max_tokens:
            return Unusable("what comes before the turn fills max_tokens")
        boundary = len(prompt)
        moved = ids[:boundary] != prompt
        if moved:
            boundary = _agreeing(prompt, ids)
            try:
                (history,) = self._encode([self._render(sample.messages[:-1], sample.tools, generation=False)])
            except Unusable as reason:
                return reason
            if _agreeing(history, ids) < len(history) or boundary < len(history):
                return Unusable("the chat template writes what comes before the turn otherwise once the turn is there")
        if boundary == len(ids):
            return Unusable("the chat template adds nothing for the turn")
        return Row(ids, [0] * boundary + [1] * (len(ids) - boundary), len(whole) > max_tokens, moved)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # Special tokens stand in the template's text.
        return [encoding.ids for encoding in self._core.encode_batch_fast(texts, add_special_tokens=False)]

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, *, generation: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=generation
                )
            )
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise Unusable(f"the chat template refuses it: {one_line(error, 120)}") from None


def _agreeing(first: list[int], second: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def prepare(spec: PrepareSpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Writes the dataset folder and returns the fields of `finished`.

    Every line of every file is checked before the output's place is touched; the folder appears whole or not at all. An
    output that holds this very dataset is finished at once. Raises JobError and Interrupted.
    """
    began = time.monotonic()
    events.emit("phase", phase="checking the conversations")
    found = scan(spec.inputs, spec.limit)
    events.emit("phase", phase="loading the tokenizer")
    template = Template(spec.model)
    identity = _identity(spec, found, template)
    done = _already_done(Path(spec.output), identity)
    if done is not None:
        events.emit("started", verb="prepare", total=found.assistant_turns, already_done=done["samples"])
        return {**done, "output": spec.output, "already_done": True}
    events.emit("started", verb="prepare", total=found.assistant_turns, already_done=0)
    counts = Counts(Progress(events, total=found.assistant_turns), events)
    with ArrowFolder(Path(spec.output), keep_messages=spec.keep_messages) as folder:
        for sample_batch in _batches(spec, template, counts):
            if should_stop():
                raise Interrupted("stopped before the dataset was whole; nothing was written", 0, found.assistant_turns)
            for sample, row in zip(sample_batch, template.rows(sample_batch, spec.max_tokens), strict=True):
                if isinstance(row, Unusable):
                    counts.skip(str(row), sample.where)
                else:
                    counts.keep(row)
                    folder.add(row.input_ids, row.loss_mask, sample.messages)
            counts.progress.tell()
        counts.warn()
        if not counts.samples:
            reasons = "; ".join(f"{number} × {reason}" for reason, number in counts.skipped.most_common(3))
            raise PrepareError(
                f"no sample is left of {found.assistant_turns} assistant turns ({reasons})", "see the reasons"
            )
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
        "total": found.assistant_turns,
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
        self.skipped: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._events = events

    def keep(self, row: Row) -> None:
        self.samples += 1
        self.tokens += len(row.input_ids)
        self.supervised += sum(row.loss_mask)
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
        }


def _batches(spec: PrepareSpec, template: Template, counts: Counts) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for item in read(spec.inputs, spec.limit):
        if not isinstance(item, Conversation):
            where, turns, reason = item
            counts.skip(reason, where, turns)
            continue
        for turn in item.assistant_turns:
            try:
                batch.append(template.sample(item, turn))
            except Unusable as reason:
                counts.skip(str(reason), item.where)
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _identity(spec: PrepareSpec, found: Scan, template: Template) -> dict[str, Any]:
    """What makes two prepares the same: the contents, not the names of files."""
    return {
        "inputs_sha256": list(found.sha256),
        "tokenizer_sha256": template.fingerprint,
        "max_tokens": spec.max_tokens,
        "limit": spec.limit,
        "keep_messages": spec.keep_messages,
    }


def _already_done(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The outcome of the earlier prepare that made this very folder; None where nothing is there. Raises PrepareError."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    remedy = "delete it or give another output folder"
    if not output.is_dir():
        raise PrepareError(f"the output {output} is a file", remedy)
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
