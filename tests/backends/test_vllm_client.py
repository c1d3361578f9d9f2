"""What a server may answer, and what an address may be: each is one line, and none takes the memory or the program with it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backends import credentials
from backends.errors import JobError
from backends.spec import ExtractSpec
from backends.vllm.client import NoAnswer, Refused, ServerClient, kv_tokens_of
from backends.vllm.other import plan_other

Serve = Callable[[bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that answers each request with the same body, for ever where that is empty."""
    servers = []

    def start(body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                try:
                    self.wfile.write(body)
                    while not body:
                        self.wfile.write(bytes(1 << 20))
                except OSError:
                    pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def spec(url: str) -> ExtractSpec:
    return ExtractSpec("/m", "/d", "/o", backend="vllm", server_url=url)


@pytest.mark.parametrize(
    "url", ["http://a\x7fb:80", "http://xn--a:1", "http://.:1", "http://a b:1", "http://\u2603.\ud800:1"]
)
def test_an_address_that_no_request_can_have_is_one_line(url: str) -> None:
    with pytest.raises(JobError) as refused:
        plan_other(spec(url))
    assert "server_url" in refused.value.remedy + refused.value.message


@pytest.mark.parametrize("key", ["clé-pa55", "pa55 word", "pa55\n"])
def test_a_key_that_no_request_can_have_is_one_line_without_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setitem(credentials._secrets, "VLLM_API_KEY", key)
    with pytest.raises(JobError, match=r"VLLM_API_KEY. is not one word of visible ASCII") as refused:
        plan_other(spec("http://127.0.0.1:9"))
    assert "pa55" not in str(refused.value)


@pytest.mark.parametrize(
    "models",
    [
        [{"id": "m", "max_model_len": "4096"}],
        [{"id": "m", "max_model_len": True}],
        [{"id": "a\0b"}],
        [{"id": "a\ud800"}],
        [{"id": "m", "root": ["x"]}],
        [{"id": 3}],
        [[]],
        None,
    ],
)
def test_a_list_of_models_that_is_none_of_vllms_is_refused(serve: Serve, models: Any) -> None:
    with pytest.raises(JobError, match="its list of models is not one of vLLM's"):
        plan_other(spec(serve(json.dumps({"data": models}).encode())))


def test_an_answer_nested_without_end_is_no_list_of_models(serve: Serve) -> None:
    with pytest.raises(Refused):
        ServerClient(serve(b"[" * 200_000)).served()


def test_a_body_without_end_is_given_up(serve: Serve) -> None:
    client = ServerClient(serve(b""))
    with pytest.raises(NoAnswer, match=r"/v1/models is longer than 16,777,216 bytes"):
        client.served()
    assert (client.kv_tokens(), client.version(), client.healthy()) == (None, None, False)
    client.close()


def test_a_number_without_end_is_none() -> None:
    assert kv_tokens_of({"kv_cache_size_tokens": "9" * 5000, "block_size": "9" * 5000, "num_gpu_blocks": "1"}) is None
