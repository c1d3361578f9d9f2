"""What is asked of a vLLM server over HTTP: is it well, what does it serve, and the states of a sample."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from backends.errors import one_line

_CONNECT_S = 10.0
_ASK_S = 20.0
# The longest answer repeats a sample's token ids: a million of them are some 8 MB.
_MOST_BYTES = 16 << 20
# Of a number that is read of a text.
_DIGITS = 18
# Answers that are about no sample.
_OF_THE_SERVER = {
    401: "mend VLLM_API_KEY of the console's environment",
    403: "mend VLLM_API_KEY of the console's environment",
    404: "see whether it serves the model under this name, and /v1/completions",
}
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class NoAnswer(Exception):
    """A request that may be sent again: no connection, a time limit, a status of 5xx."""


class Refused(Exception):
    """A request that the server will not take, in its own words."""


class NoExtractor(Refused):
    """A server that takes no sample at all: another key, another model, or not one that extracts. remedy: what mends that."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a server. root: where its files are, as the server was told. max_model_len: tokens, None where not told."""

    id: str
    root: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """status: of HTTP. text: the body."""

    status: int
    text: str

    def json(self) -> Any:
        """Raises ValueError."""
        try:
            return json.loads(self.text)
        except RecursionError:
            raise ValueError("nested too deep") from None


class ServerClient:
    """One server's; used by many threads at once. key: sent as a bearer token where there is one.

    limit_s: how long one sample's answer may take. connections: so many at a time. Raises Refused for an address or a key that
    no request can have.
    """

    def __init__(self, url: str, *, key: str = "", limit_s: float = 300.0, connections: int = 1) -> None:
        self.url = url
        self._limit_s = limit_s
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise Refused("its key (VLLM_API_KEY) is not one word of visible ASCII")
        limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
        # Bodies are read as they come: one that unpacks to more than there is memory is not unpacked.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                limits=limits,
                # A proxy of the environment is for the world outside.
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise Refused(f"its address cannot be: {one_line(error)}") from None

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        try:
            return self._ask("GET", "/health").status == 200
        except NoAnswer:
            return False

    def accepts(self, key: str) -> bool:
        """Whether the server takes this key. Raises NoAnswer."""
        return self._get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status == 200

    def served(self) -> list[Served]:
        """The models that it serves. Raises NoAnswer, Refused."""
        answer = self._get("/v1/models")
        if answer.status != 200:
            raise Refused(_words(answer))
        try:
            return [_served(model) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Refused("its list of models is not one of vLLM's") from None

    def kv_tokens(self) -> int | None:
        """Tokens that its KV cache holds, by its metrics; None where they do not tell."""
        try:
            text = self._get("/metrics").text
        except NoAnswer:
            return None
        line = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")), "")
        return kv_tokens_of(dict(_LABEL.findall(line)))

    def version(self) -> str | None:
        """The version of its vLLM, None where it does not tell."""
        try:
            return " ".join(str(self._get("/version").json()["version"]).split())[:64]
        except (NoAnswer, ValueError, KeyError, TypeError):
            return None

    def extract(self, model: str, token_ids: Sequence[int], path: str | None = None) -> str:
        """The path of the file with a sample's states, as the server names it. Raises NoAnswer, Refused.

        path: where it is to be written, for a server that takes that.
        """
        order: dict[str, Any] = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        if path is not None:
            order["kv_transfer_params"] = {"hidden_states_path": path}
        answer = self._ask("POST", "/v1/completions", limit_s=self._limit_s, order=order)
        if answer.status >= 500 or answer.status in (408, 429):
            raise NoAnswer(_words(answer))
        if answer.status in _OF_THE_SERVER:
            raise NoExtractor(_words(answer), _OF_THE_SERVER[answer.status])
        if answer.status != 200:
            raise Refused(_words(answer))
        return _path_in(answer, token_ids)

    def _get(self, where: str, headers: Mapping[str, str] | None = None) -> Answer:
        answer = self._ask("GET", where, headers=headers)
        if answer.status >= 500:
            raise NoAnswer(_words(answer))
        return answer

    def _ask(
        self,
        method: str,
        where: str,
        *,
        limit_s: float = _ASK_S,
        headers: Mapping[str, str] | None = None,
        order: Mapping[str, Any] | None = None,
    ) -> Answer:
        """One request and its whole answer. Raises NoAnswer, also for a body longer than any of vLLM's."""
        timeout = httpx.Timeout(limit_s, connect=_CONNECT_S, pool=None)
        deadline = time.monotonic() + limit_s
        body = bytearray()
        try:
            with self._http.stream(method, where, headers=headers, json=order, timeout=timeout) as answer:
                for piece in answer.iter_raw():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        raise NoAnswer(f"its answer to {where} is longer than {_MOST_BYTES:,} bytes")
                    if time.monotonic() > deadline:
                        raise NoAnswer(f"ReadTimeout: its answer to {where} took longer than {limit_s:g} s")
                return Answer(answer.status_code, body.decode("utf-8", "replace"))
        # A name that is none is found out when it is looked up: UnicodeError.
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise NoAnswer(f"{type(error).__name__}: {one_line(error)}") from None


def _served(model: Mapping[str, Any]) -> Served:
    """Raises ValueError, KeyError, TypeError, AttributeError for what is no model of vLLM's list."""
    name, root, length = model["id"], model.get("root") or "", model.get("max_model_len")
    # They are compared with paths, and shown.
    if not all(isinstance(text, str) and text.isprintable() for text in (name, root)) or not name:
        raise ValueError
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ValueError
    return Served(name, root, length)


def kv_tokens_of(labels: Mapping[str, str]) -> int | None:
    """Tokens of a KV cache from the labels of `vllm:cache_config_info`.

    Versions before `kv_cache_size_tokens` tell blocks, which are tokens only where all layers are of one kind: the least is taken.
    """
    told = labels.get("kv_cache_size_tokens", "")
    if told.isdecimal() and len(told) <= _DIGITS:
        return int(told)
    size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    if not all(text.isdecimal() and len(text) <= _DIGITS for text in (size, blocks)):
        return None
    return int(size) * int(blocks) or None


def _path_in(answer: Answer, token_ids: Sequence[int]) -> str:
    try:
        data = answer.json()
        returned = data["choices"][0].get("prompt_token_ids")
        path = (data.get("kv_transfer_params") or {}).get("hidden_states_path")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise NoAnswer(f"an answer that is no completion: {answer.text[:120]!r}") from None
    if returned is not None and list(returned) != list(token_ids):
        raise NoAnswer("it answered for other tokens than it was asked about")
    if not isinstance(path, str) or not path:
        raise NoExtractor(
            "its answer names no file (hidden_states_path): it was not started to extract hidden states",
            "start it with the speculative and KV transfer configurations that `plan --backend vllm` shows",
        )
    return path


def _words(answer: Answer) -> str:
    """What a server says of an error, in one line."""
    try:
        data = answer.json()
        told = data.get("error", data)
        text = str(told.get("message") or told.get("detail") or told) if isinstance(told, dict) else str(told)
    except (ValueError, AttributeError):
        text = answer.text
    return f"{answer.status} {' '.join(text.split())[:300]}".strip()
