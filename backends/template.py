"""A model's chat template and tokenizer: from a conversation to token ids and the loss mask of one assistant turn.

The mask needs no server and is the speculators trainer's own (its release 0.9.0): the template's tokens of what comes
before a turn, with the generation prompt, are context (0), and what the text with the turn has after them is supervised (1).
Where the generation prompt itself differs (it opens a block that the turn fills otherwise, or a token spans both), the turn
starts at the first token that differs, provided that the history before it agrees. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.conversations import Conversation, Unusable
from backends.errors import JobError, one_line

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class TemplateError(JobError):
    """A tokenizer or a chat template that cannot be used: what, and the remedy."""


@dataclass(frozen=True, slots=True)
class Turn:
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
    """A model folder's tokenizer and chat template. Raises TemplateError where it has none that can be used."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        if not Path(model).is_dir():
            raise TemplateError(
                f"the model {model} is not a folder", "give the folder of the model that will be trained for"
            )
        # Without one of these, Transformers makes an empty tokenizer out of config.json and says nothing.
        if not any((Path(model) / name).is_file() for name in TOKENIZER_FILES):
            raise TemplateError(
                f"the model folder {model} has no tokenizer", "add its tokenizer.json and tokenizer_config.json"
            )
        logging.set_verbosity_error()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a damaged or missing tokenizer.
            raise TemplateError(
                f"the tokenizer of {model} cannot be loaded: {one_line(error)}",
                "the folder needs the model's tokenizer files",
            ) from error
        if not getattr(self._tokenizer, "is_fast", False):
            raise TemplateError(f"the tokenizer of {model} tells no offsets", "the folder needs its tokenizer.json")
        if not self._tokenizer.chat_template:
            raise TemplateError(
                f"the tokenizer of {model} has no chat template", "put chat_template.jinja into the folder"
            )
        self._core = self._tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        template = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        self.fingerprint = hashlib.sha256((self._core.to_str() + template).encode()).hexdigest()

    def turn(self, conversation: Conversation, index: int) -> Turn:
        """The text of a conversation up to its assistant message `index`. Raises Unusable."""
        if not index:
            raise Unusable("the assistant's turn opens its conversation")
        messages, tools = conversation.messages[: index + 1], conversation.tools
        prompt = self._render(messages[:-1], tools, generation=True)
        return Turn(conversation.where, messages, tools, prompt, self._render(messages, tools, generation=False))

    def rows(self, samples: list[Turn], max_tokens: int) -> list[Row | Unusable]:
        """The row of each sample, or why it has none."""
        ids = self._encode([text for sample in samples for text in (sample.prompt, sample.text)])
        pairs = zip(samples, ids[::2], ids[1::2], strict=True)
        return [self._row(sample, prompt[:max_tokens], whole, max_tokens) for sample, prompt, whole in pairs]

    def _row(self, sample: Turn, prompt: list[int], whole: list[int], max_tokens: int) -> Row | Unusable:
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
            return self._apply(messages, tools, generation)
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text != list(messages):
                try:
                    return self._apply(as_text, tools, generation)
                except Exception:  # The first error is the one about what the conversation says.
                    pass
            raise Unusable(f"the chat template refuses it: {one_line(error, 120)}") from None

    def _apply(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, generation: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generation
            )
        )


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Tool calls with their arguments as a JSON text, which some templates join to their own."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]}


def _call_with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _agreeing(first: list[int], second: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
