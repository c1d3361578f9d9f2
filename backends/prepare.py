"""The trainer's Arrow dataset from conversations: `input_ids`, `loss_mask`, `seq_len`, one row an assistant turn.

The loss mask needs no server: the chat template is applied with and without the assistant's turn, and what comes after the
shorter text is the turn. A token that holds characters of both sides counts as the turn's. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
_VERSION = 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Samples handed to the tokenizer together; it spreads them over the cores.
_BATCH = 256


class PrepareError(JobError):
    """Conversations, a tokenizer or an output folder that cannot be used: what, and the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to be: the template's text up to the end of an assistant turn, and the character where that turn starts."""

    text: str
    boundary: int
    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """input_ids, loss_mask: of equal length, at most the limit. truncated: tokens were cut off on the right.
    merged: a token holds characters of the prompt and of the turn."""

    input_ids: list[int]
    loss_mask: list[int]
    truncated: bool
    merged: bool


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
        from tokenizers import processors

        self._core = self._tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        template = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        self.fingerprint = hashlib.sha256((self._core.to_str() + template).encode()).hexdigest()
        # Special tokens stand in the template's text; all that this step would do is trim whitespace from the offsets.
        self._core.post_processor = processors.ByteLevel(trim_offsets=False)

    def sample(self, conversation: Conversation, turn: int) -> Sample:
        """The text of a conversation up to its assistant message `turn`. Raises Unusable."""
        before, upto = list(conversation.messages[:turn]), conversation.messages[: turn + 1]
        message = upto[-1]
        if not any(earlier["role"] in ("user", "tool") for earlier in before):
            raise Unusable("the assistant's turn answers nobody")
        if not message["content"].strip() and not message.get("tool_calls"):
            raise Unusable("the assistant's turn is empty")
        try:
            prompt = self._render(before, conversation.tools, generation=True)
            text = self._render(list(upto), conversation.tools, generation=False)
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise Unusable(f"the chat template refuses it: {one_line(error, 120)}") from None
        if not text.startswith(prompt) or len(text) == len(prompt):
            raise Unusable(
                "the chat template is not prefix-stable: its text with the turn does not begin with its text without"
            )
        return Sample(text, len(prompt), upto)

    def rows(self, samples: list[Sample], max_tokens: int) -> list[Row]:
        """The rows of samples. A row may hold no supervised token, where truncation cut the whole turn off."""
        encodings = self._core.encode_batch([sample.text for sample in samples], add_special_tokens=False)
        return [_row(encoding, sample, max_tokens) for encoding, sample in zip(encodings, samples, strict=True)]

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, generation: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation)
        )


def _row(encoding: Any, sample: Sample, max_tokens: int) -> Row:
    ids: list[int] = encoding.ids
    # A normaliser may drop characters: then the turn starts at the first one that a token holds.
    places = (encoding.char_to_token(at) for at in range(sample.boundary, len(sample.text)))
    first: int = next((place for place in places if place is not None), len(ids))
    merged = first < len(ids) and encoding.offsets[first][0] < sample.boundary
    kept = min(len(ids), max_tokens)
    mask = [0] * min(first, kept) + [1] * max(kept - first, 0)
    return Row(ids[:kept], mask, kept < len(ids), merged)


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
                if counts.keep(row):
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
        self.samples = self.tokens = self.supervised = self.truncated = self.merged = 0
        self.skipped: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._events = events

    def keep(self, row: Row) -> bool:
        """Counts a row; False where it has nothing to train on."""
        self.truncated += row.truncated
        supervised = sum(row.loss_mask)
        if not supervised:
            self.skip("no supervised token is left after truncation", "")
            return False
        self.samples += 1
        self.tokens += len(row.input_ids)
        self.supervised += supervised
        self.merged += row.merged
        self.progress.add(samples=1, tokens=len(row.input_ids), nbytes=0)
        return True

    def skip(self, reason: str, where: str, number: int = 1) -> None:
        self.skipped[reason] += number
        self._first.setdefault(reason, where)
        self.progress.skipped += number

    def warn(self) -> None:
        """One warning a reason, with the first place."""
        for reason, number in self.skipped.most_common():
            first = f" (first: {self._first[reason]})" if self._first[reason] else ""
            self._events.emit("warning", message=f"{number} samples skipped: {reason}{first}")
        if self.merged:
            self._events.emit(
                "warning",
                message=f"in {self.merged} samples one token spans the prompt's end and the turn's start; it is supervised",
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
        raise PrepareError(f"the output {output} holds another dataset (differs in {', '.join(changed)})", remedy)
    if len(PreparedDataset(output)) != finished["samples"]:
        raise PrepareError(
            f"the output {output} has not the {finished['samples']} samples that it was written with", remedy
        )
    return {"done": finished["samples"], "total": finished["samples"], **finished}
