"""A vLLM server that runs already: what plan says of it, and which of its models is the job's. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backends import credentials
from backends.errors import JobError, one_line
from backends.hub import origin
from backends.spec import ExtractSpec
from backends.vllm.client import NoAnswer, Refused, Served, ServerClient

# Which layers a server extracts is told nowhere; their number shows in its first file.
ON_TRUST = (
    "the layer ids of the server at {url} are taken on trust: it must have been started with"
    " eagle_aux_hidden_state_layer_ids {ids}; `verify --recompute` tells others"
)


@dataclass(frozen=True, slots=True)
class OtherPlan:
    """A server that runs already. most_tokens, limited_by: of the longest request that it takes (None: not known), and why."""

    url: str
    version: str | None
    served: Served
    most_tokens: int | None
    limited_by: str

    def facts(self, spec: ExtractSpec, layer_ids: Sequence[int], longest: int) -> dict[str, Any]:
        """The plan's `vllm`."""
        return {
            "server_url": self.url,
            "version": self.version,
            "model": self.served.id,
            "max_model_len": self.served.max_model_len,
            "ok": None,
            "why": ON_TRUST.format(url=self.url, ids=list(layer_ids)),
            "command": None,
        }

    def problem(self) -> JobError | None:
        return None

    def warnings(self, layer_ids: Sequence[int]) -> list[str]:
        return [ON_TRUST.format(url=self.url, ids=list(layer_ids))]


def address(url: str) -> str:
    """The address of a server without the `/v1` that clients of its API are given. Raises JobError."""
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise JobError(
                "server_url has more than an address in it: a user, a password or a question",
                "give it as http://HOST:PORT; a key is taken from VLLM_API_KEY of the console's environment",
            )
        if (
            url.isprintable()
            and parts.scheme in ("http", "https")
            and parts.hostname
            and (parts.port is None or parts.port)
        ):
            return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
    except ValueError:
        pass
    raise JobError(f"server_url {url!r} is no address of a server", "give it as http://HOST:PORT")


def plan_other(spec: ExtractSpec) -> OtherPlan:
    """Asks the server that the spec names. Raises JobError where it does not answer or serves another model."""
    url = address(spec.server_url)
    ours = {"gpus": spec.gpus, "vllm_python": spec.vllm_python, "extra_args": spec.extra_args}
    given = [name for name, value in ours.items() if value] + ["tensor_parallel"] * (spec.tensor_parallel != 1)
    if given:
        raise JobError(
            f"server_url names a server that runs already, and {', '.join(given)} would be of one that is started",
            "leave one of the two out",
        )
    client = None
    try:
        client = ServerClient(url, key=credentials.vllm_api_key())
        served = our_model(url, client.served(), spec.model)
        if not client.healthy():
            raise NoAnswer("it is not healthy (/health)")
        most, why = limit(served.max_model_len, client.kv_tokens())
        return OtherPlan(url, client.version(), served, most, why)
    except (NoAnswer, Refused) as error:
        raise JobError(
            f"the vLLM server at {url} does not answer as one: {one_line(error)}",
            "start it, or mend server_url; a key is taken from VLLM_API_KEY of the console's environment",
        ) from None
    finally:
        if client is not None:
            client.close()


def limit(max_model_len: int | None, kv_tokens: int | None) -> tuple[int | None, str]:
    """Tokens of the longest request that a server takes, and what limits it; None where neither is known."""
    known = [
        (tokens, why)
        for tokens, why in (
            (max_model_len, f"its max_model_len is {max_model_len}"),
            (kv_tokens, f"its KV cache holds {kv_tokens} tokens"),
        )
        if tokens
    ]
    return min(known, default=(None, ""))


def our_model(url: str, served: Sequence[Served], model: str) -> Served:
    """The job's model among those of a server. Raises JobError where it is none of them.

    It is told by its folder, by its name on the hub, or by the last part of its path.
    """
    names = _names(model) | _names(str(origin(Path(model)).get("model_hub") or model))
    for one in served:
        if names & (_names(one.id) | _names(one.root or one.id)):
            return one
    found = ", ".join(one.id + (f" ({one.root})" if one.root not in ("", one.id) else "") for one in served)
    raise JobError(
        f"the vLLM server at {url} serves {found or 'no model'}, not {model}", "give its model, or another URL"
    )


def _names(model: str) -> set[str]:
    real = os.path.realpath(model)
    return {model, real, Path(model).name, Path(real).name}
