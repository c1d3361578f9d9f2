"""What is asked of a vLLM server over HTTP: is it well, what does it serve, and the states of a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from backends.errors import one_line

_CONNECT_S = 10.0
_ASK_S = 20.0
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class NoAnswer(Exception):
    """A request that may be sent again: no connection, a time limit, a status of 5xx."""


class Refused(Exception):
    """A request that the server will not take, in its own words."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a server. root: where its files are, as the server was told. max_model_len: tokens, None where not told."""

    id: str
    root: str
    max_model_len: int | None


class ServerClient:
    """One server's; used by many threads at once. key: sent as a bearer token where there is one.

    limit_s: how long one sample's answer may take. connections: so many at a time.
    """

    def __init__(self, url: str, *, key: str = "", limit_s: float = 300.0, connections: int = 1) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(limit_s, connect=_CONNECT_S, pool=None),
            limits=limits,
            # A proxy of the environment is for the world outside.
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=_ASK_S).status_code == 200
        except httpx.HTTPError:
            return False

    def accepts(self, key: str) -> bool:
        """Whether the server takes this key. Raises NoAnswer."""
        return self._get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200

    def served(self) -> list[Served]:
        """The models that it serves. Raises NoAnswer, Refused."""
        answer = self._get("/v1/models")
        if answer.status_code != 200:
            raise Refused(_words(answer))
        try:
            return [
                Served(str(model["id"]), str(model.get("root") or ""), model.get("max_model_len"))
                for model in answer.json()["data"]
            ]
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
            return str(self._get("/version").json()["version"])
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
        try:
            answer = self._http.post("/v1/completions", json=order)
        except httpx.HTTPError as error:
            raise NoAnswer(f"{type(error).__name__}: {one_line(error)}") from None
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise NoAnswer(_words(answer))
        if answer.status_code != 200:
            raise Refused(_words(answer))
        return _path_in(answer, token_ids)

    def _get(self, where: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        try:
            answer = self._http.get(where, headers=headers, timeout=_ASK_S)
        except httpx.HTTPError as error:
            raise NoAnswer(f"{type(error).__name__}: {one_line(error)}") from None
        if answer.status_code >= 500:
            raise NoAnswer(_words(answer))
        return answer


def kv_tokens_of(labels: Mapping[str, str]) -> int | None:
    """Tokens of a KV cache from the labels of `vllm:cache_config_info`.

    Versions before `kv_cache_size_tokens` tell blocks, which are tokens only where all layers are of one kind: the least is taken.
    """
    told = labels.get("kv_cache_size_tokens", "")
    if told.isdecimal():
        return int(told)
    size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    return int(size) * int(blocks) if size.isdecimal() and blocks.isdecimal() and int(blocks) else None


def _path_in(answer: httpx.Response, token_ids: Sequence[int]) -> str:
    try:
        data = answer.json()
        returned = data["choices"][0].get("prompt_token_ids")
        path = (data.get("kv_transfer_params") or {}).get("hidden_states_path")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise NoAnswer(f"an answer that is no completion: {answer.text[:120]!r}") from None
    if returned is not None and list(returned) != list(token_ids):
        raise NoAnswer("it answered for other tokens than it was asked about")
    if not isinstance(path, str) or not path:
        raise Refused("its answer names no file (hidden_states_path): it was not started to extract hidden states")
    return path


def _words(answer: httpx.Response) -> str:
    """What a server says of an error, in one line."""
    try:
        data = answer.json()
        told = data.get("error", data)
        text = str(told.get("message") or told.get("detail") or told) if isinstance(told, dict) else str(told)
    except (ValueError, AttributeError):
        text = answer.text
    return f"{answer.status_code} {' '.join(text.split())[:300]}".strip()
