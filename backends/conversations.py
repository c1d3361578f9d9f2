"""Conversations in JSONL, both key styles, checked line by line. Loads nothing but the standard library.

A line is one JSON object with `conversations` (or `messages`): a list of {"from", "value"} or {"role", "content"}, and
optionally `tools`. What is not that is an error with the file and the line. What is that but cannot be trained on (a role
or a content that this does not know) is `Unusable`: skipped, counted and told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import JobError, one_line

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class ConversationError(JobError):
    """A file of conversations that cannot be read: names the file, the line and the remedy."""


class Unusable(Exception):
    """A conversation that is well-formed and still cannot be a sample; the text is the reason, fit for counting."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a file.

    where: "file:line". messages: {"role", "content", ...} with the chat templates' role names. tools: as in the line.
    """

    where: str
    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None

    @property
    def assistant_turns(self) -> tuple[int, ...]:
        """Indices of the assistant's messages, each of which is one sample."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")


@dataclass(frozen=True, slots=True)
class Scan:
    """What a first pass over the files found. `sha256`: of each file, in order."""

    conversations: int
    assistant_turns: int
    sha256: tuple[str, ...]


def scan(inputs: Sequence[str], limit: int | None = None) -> Scan:
    """Reads every file to its end, so that a broken line is known before work starts. Raises ConversationError.

    Lines beyond `limit` conversations are hashed and not parsed.
    """
    conversations = turns = 0
    digests = []
    for name in inputs:
        digest = hashlib.sha256()
        for number, line in _lines(name):
            digest.update(line)
            if not line.strip() or (limit is not None and conversations >= limit):
                continue
            conversations += 1
            raw = _object(line, name, number)
            turns += sum(_raw_role(turn) in ("assistant", "gpt") for turn in _turns(raw, name, number))
        digests.append(digest.hexdigest())
    if not conversations:
        raise ConversationError(
            f"{', '.join(inputs)} holds no conversation", "give JSONL files, one conversation a line"
        )
    return Scan(conversations, turns, tuple(digests))


def read(inputs: Sequence[str], limit: int | None = None) -> Iterator[Conversation | tuple[str, int, str]]:
    """The conversations in order; for an unusable one ("file:line", its assistant turns, the reason).

    Raises ConversationError.
    """
    count = 0
    for name in inputs:
        for number, line in _lines(name):
            if not line.strip():
                continue
            if limit is not None and count >= limit:
                return
            count += 1
            raw = _object(line, name, number)
            turns = _turns(raw, name, number)
            where = f"{name}:{number}"
            try:
                yield Conversation(where, tuple(_message(turn) for turn in turns), _tools(raw))
            except Unusable as reason:
                yield where, sum(_raw_role(turn) in ("assistant", "gpt") for turn in turns), str(reason)


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
    try:
        with Path(name).open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise ConversationError(
            f"the conversations {name} cannot be read: {error.strerror or one_line(error)}", "give a JSONL file"
        ) from None


def _object(line: bytes, name: str, number: int) -> dict[str, Any]:
    remedy = "mend or remove that line; each line is one JSON object"
    try:
        # Some editors put a byte-order mark before the first line.
        raw = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConversationError(
            f"{name}, line {number} is not UTF-8 (byte {error.start} of the line)", remedy
        ) from None
    except json.JSONDecodeError as error:
        raise ConversationError(
            f"{name}, line {number} is not JSON: {error.msg} at column {error.colno}", remedy
        ) from None
    except (ValueError, RecursionError):  # A number of thousands of digits; brackets in brackets.
        raise ConversationError(
            f"{name}, line {number} is not JSON that can be read: a number too long or nested too deeply", remedy
        ) from None
    if not isinstance(raw, dict):
        raise ConversationError(f"{name}, line {number} is a JSON {type(raw).__name__}, not an object", remedy)
    return raw


def _turns(raw: dict[str, Any], name: str, number: int) -> list[dict[str, Any]]:
    turns = raw.get("conversations", raw.get("messages"))
    if not isinstance(turns, list):
        keys = ", ".join(list(raw)[:8]) or "none"
        raise ConversationError(
            f"{name}, line {number} has no list `conversations` or `messages` (its keys: {keys})",
            "each line needs one, of {from, value} or {role, content}",
        )
    for turn in turns:
        if not isinstance(turn, dict) or not ({"role", "from"} & turn.keys()):
            raise ConversationError(
                f"{name}, line {number} has a turn without `role` or `from`",
                "write turns as {from, value} or {role, content}",
            )
    return turns


def _raw_role(turn: dict[str, Any]) -> Any:
    return turn.get("role", turn.get("from"))


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    raw_role = _raw_role(turn)
    role = ROLES.get(raw_role) if isinstance(raw_role, str) else None
    if role is None:
        raise Unusable(f"unknown role {str(raw_role)[:40]!r}")
    content = turn.get("content", turn.get("value"))
    if content is None and (turn.get("tool_calls") or turn.get("thinking") or turn.get("reasoning_content")):
        content = ""
    if not isinstance(content, str):
        raise Unusable("a turn's content is not text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Unusable("a turn's text holds half a surrogate pair") from None
    extra = {key: turn[key] for key in ("tool_calls", "tool_call_id") if turn.get(key)}
    if "tool_calls" in extra:
        if not isinstance(extra["tool_calls"], list):
            raise Unusable("`tool_calls` is not a list")
        extra["tool_calls"] = [_call(call) for call in extra["tool_calls"]]
    # Templates know the reasoning by one of two names.
    reasoning = turn.get("thinking") or turn.get("reasoning_content")
    if reasoning:
        extra |= {"thinking": reasoning, "reasoning_content": reasoning}
    return {"role": role, "content": content, **extra}


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object: as a JSON text, a template would quote them a second time."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        raise Unusable("a tool call's arguments are not JSON") from None


def _tools(raw: dict[str, Any]) -> list[Any] | None:
    tools = raw.get("tools")
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
