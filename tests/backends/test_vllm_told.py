"""What is told of a server's command: all of it but secrets, and none that the console would hide."""

from __future__ import annotations

import pytest

from backends.vllm.told import without_secrets
from dflash_tui.node import hiding


@pytest.mark.parametrize(
    "words",
    [
        ("--kv-transfer-config", '{"password":"SECRET-1", "a": [{"api_key": ["SECRET-2"]}]}'),
        ('--kv-transfer-config={"auth": {"x": "SECRET-1"}, "url": "http://u:SECRET-2@h"}',),
        ("--api-key", "SECRET-1", "SECRET-2", "--seed", "3"),
        ("--hf-token=SECRET-1", "--otlp-traces-endpoint", "http://u:SECRET-1@SECRET-2@h/"),
        ("--hf-overrides", "{'password': 'SECRET-1'}"),
        ("--otlp-traces-endpoint=https://c/v1?api_key=SECRET-1&x=2",),
        ("--x-header", "Authorization: Bearer SECRET-1"),
        ("--download-dir", "/data/hf_SECRET1" + "A" * 20),
    ],
)
def test_a_servers_command_is_told_without_its_secrets(words: tuple[str, ...]) -> None:
    told = without_secrets(("/vllm/bin/python", "-m", "vllm", *words))
    assert "SECRET" not in " ".join(told)
    assert len(told) == len(words) + 3
    assert hiding.arguments(told) == told, "what the console hides is hidden before it is written"


def test_a_command_without_secrets_is_told_to_the_letter() -> None:
    command = ["/vllm/bin/python", "-m", "vllm", "serve", "/m", "--max-num-batched-tokens", "8192", "--tokenizer=t"]
    command += ["--long-prefill-token-threshold", "4096", "--hf-config-path=https://c/v1?page=2"]
    command += ["--kv-transfer-config", '{"kv_connector":"X",  "kv_role": "kv_producer"}', "--seed", "3"]
    assert without_secrets(command) == command == hiding.arguments(command)
