"""Records into what can be a sample: conversations in both key styles, or rows that are tokenised already.

A record is one JSON object: with `conversations` (or `messages`), a list of {"from", "value"} or {"role", "content"}, and
optionally `tools`; or with `input_ids` and `loss_mask`. What is not that is an error that names the place. What is that but
cannot be trained on (a role or a content that this does not know) is `Unusable`: skipped, counted and told.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from backends.sources import Place, Source, SourceError, open_sources

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# What templates and servers call the words before the answer.
_REASONING = ("thinking", "reasoning_content", "reasoning")


class Unusable(Exception):
    """A record that is well-formed and still cannot be a sample; the text is the reason, fit for counting."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """where: "file:line". messages: {"role", "content", ...} with the chat templates' role names. tools: as in the record."""

    where: str
    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None

    @property
    def assistant_turns(self) -> tuple[int, ...]:
        """Indices of the assistant's messages, each of which is one sample."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A row that somebody tokenised: its tokens, and 1 where they are supervised."""

    where: str
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that cannot be used, with the samples that it would have been."""

    where: str
    samples: int
    reason: str


class Records:
    """All records of the inputs, checked one by one, in the order in which they become samples.

    shuffle_seed: None keeps the inputs' order. Else the order depends on the seed and on each record's content alone: not on
    the names, the number or the order of files, and a record more moves none of the others. The turns of a conversation
    stay together. limit: the first so many records of that order; without a shuffle what comes after is hashed, not parsed.
    conversations, samples: how many there are. sha256: of each source, in order. Raises SourceError.
    """

    def __init__(self, inputs: Sequence[str], limit: int | None = None, shuffle_seed: int | None = None) -> None:
        self._sources = open_sources(inputs)
        self._order: Sequence[int] = ()
        self._source = array("L")
        self._at, self._number, samples, keys = array("Q"), array("Q"), array("Q"), array("Q")
        chats = bytearray()
        salt = b"" if shuffle_seed is None else str(shuffle_seed).encode()
        for index, source in enumerate(self._sources):
            for place, content in source.scan():
                if shuffle_seed is None and limit is not None and len(self._at) >= limit:
                    continue
                record = source.parse(place, content)
                chats.append(not is_tokenised(record))
                samples.append(_samples(record, source, place))
                self._source.append(index)
                self._at.append(place.at)
                self._number.append(place.number)
                if shuffle_seed is not None:
                    keys.append(int.from_bytes(hashlib.blake2b(content, digest_size=8, key=salt).digest(), "big"))
        if not self._at:
            raise SourceError(f"{', '.join(inputs)} holds no conversation", "give JSONL files, one conversation a line")
        everything = range(len(self._at))
        self._order = (everything if shuffle_seed is None else sorted(everything, key=keys.__getitem__))[:limit]
        self.conversations = sum(chats[i] for i in self._order)
        self.samples = sum(samples[i] for i in self._order)
        self.sha256 = tuple(source.sha256() for source in self._sources)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Conversation | Tokenised | Skipped]:
        for i in self._order:
            source, place = self._sources[self._source[i]], Place(self._at[i], self._number[i])
            record, where = source.record(place), f"{source.name}:{place.number}"
            try:
                yield _tokenised(record, where) if is_tokenised(record) else _conversation(record, where, source, place)
            except Unusable as reason:
                yield Skipped(where, _samples(record, source, place), str(reason))


def is_tokenised(record: dict[str, Any]) -> bool:
    return record.get("input_ids") is not None and record.get("loss_mask") is not None


def _samples(record: dict[str, Any], source: Source, place: Place) -> int:
    """How many samples the record would be; one at least, to be counted as skipped. Raises SourceError where it is none."""
    if is_tokenised(record):
        return 1
    return max(sum(_raw_role(turn) in ("assistant", "gpt") for turn in _turns(record, source, place)), 1)


def _tokenised(record: dict[str, Any], where: str) -> Tokenised:
    ids, mask = record["input_ids"], record["loss_mask"]
    if not isinstance(ids, list) or any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in ids):
        raise Unusable("`input_ids` is not a list of token ids")
    # True and False are 1 and 0 to Python, and to the trainer.
    if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
        raise Unusable("`loss_mask` is not a list of 0 and 1")
    if len(ids) != len(mask):
        raise Unusable("`input_ids` and `loss_mask` differ in length")
    return Tokenised(where, ids, [int(value) for value in mask])


def _conversation(record: dict[str, Any], where: str, source: Source, place: Place) -> Conversation:
    messages = tuple(_message(turn) for turn in _turns(record, source, place))
    if all(message["role"] != "assistant" for message in messages):
        raise Unusable("a conversation has no turn of the assistant")
    return Conversation(where, messages, _tools(record))


def _turns(record: dict[str, Any], source: Source, place: Place) -> list[dict[str, Any]]:
    where = f"{source.name}, {source.unit} {place.number}"
    turns = record.get("conversations")
    if turns is None:
        turns = record.get("messages")
    if not isinstance(turns, list):
        keys = ", ".join(list(record)[:8]) or "none"
        raise SourceError(
            f"{where} has no list `conversations` or `messages` (its keys: {keys})",
            f"each {source.unit} needs one, of {{from, value}} or {{role, content}}, or `input_ids` and `loss_mask`",
        )
    for turn in turns:
        if not isinstance(turn, dict) or not ({"role", "from"} & turn.keys()):
            raise SourceError(
                f"{where} has a turn without `role` or `from`", "write turns as {from, value} or {role, content}"
            )
    # An empty key says as much as one that is not there.
    return [{key: value for key, value in turn.items() if value is not None} for turn in turns]


def _raw_role(turn: dict[str, Any]) -> Any:
    return turn.get("role", turn.get("from"))


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    raw_role = _raw_role(turn)
    role = ROLES.get(raw_role) if isinstance(raw_role, str) else None
    if role is None:
        raise Unusable(f"unknown role {str(raw_role)[:40]!r}")
    reasoning = next((turn[name] for name in _REASONING if turn.get(name)), None)
    content = turn.get("content", turn.get("value"))
    if content is None and (turn.get("tool_calls") or reasoning):
        content = ""
    content = _text(content)
    extra = {key: turn[key] for key in ("tool_calls", "tool_call_id", "name") if turn.get(key)}
    if "tool_calls" in extra:
        if not isinstance(extra["tool_calls"], list):
            raise Unusable("`tool_calls` is not a list")
        extra["tool_calls"] = [_call(call) for call in extra["tool_calls"]]
    if reasoning is not None:
        # Templates know it by one of two names.
        extra |= {"thinking": _text(reasoning), "reasoning_content": _text(reasoning)}
    return {"role": role, "content": content, **extra}


def _text(content: Any) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise Unusable("a turn's content is not text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Unusable("a turn's text holds half a surrogate pair") from None
    return content


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object: as a JSON text, a template would quote them a second time."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        raise Unusable("a tool call's arguments are not JSON") from None


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise Unusable("`tools` is a text that is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Unusable("`tools` is not a list")
    return tools
