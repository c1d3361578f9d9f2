"""The server's command, to the letter; and whose word counts where the user's arguments say something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.errors import JobError
from backends.vllm.command import ServeSpec, check_extra_args, serve_command

SPECULATIVE = (
    '{"method":"extract_hidden_states","num_speculative_tokens":1,"draft_model_config":'
    '{"hf_config":{"eagle_aux_hidden_state_layer_ids":[2,10,18,26,34,36]}}}'
)


def spec(**fields: Any) -> ServeSpec:
    values: dict[str, Any] = {
        "python": "/envs/vllm-0.26.0/bin/python",
        "version": "0.26.0",
        "model": "/models/qwen3-8b",
        "storage": "/data/out/.staging",
        "layer_ids": (2, 10, 18, 26, 34, 36),
        "port": 8123,
        "max_model_len": 4097,
    }
    return ServeSpec(**{**values, **fields})


def transfer(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return found


def test_the_whole_command_to_the_letter() -> None:
    command = serve_command(
        spec(flags=("--no-enable-prefix-caching",), extra_args=("--gpu-memory-utilization", "0.8"), tensor_parallel=2)
    )
    assert command == [
        "/envs/vllm-0.26.0/bin/python",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "/models/qwen3-8b",
        "--host",
        "127.0.0.1",
        "--port",
        "8123",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "4097",
        "--tensor-parallel-size",
        "2",
        "--speculative-config",
        SPECULATIVE,
        "--kv-transfer-config",
        '{"kv_connector":"ExampleHiddenStatesConnector","kv_role":"kv_producer",'
        '"kv_connector_extra_config":{"shared_storage_path":"/data/out/.staging"}}',
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.8",
    ]


def test_a_folder_with_any_letters_comes_through_the_json_as_it_is() -> None:
    storage = '/data/größe "x"\\y z'
    found = transfer(serve_command(spec(storage=storage)))
    assert found["kv_connector_extra_config"] == {"shared_storage_path": storage}


def test_options_of_the_connector_go_only_to_versions_that_know_them() -> None:
    found = transfer(serve_command(spec(custom_save_path=True)))
    assert found["kv_connector_extra_config"] == {
        "shared_storage_path": "/data/out/.staging",
        "allow_custom_save_path": True,
    }
    with pytest.raises(JobError, match=r"vLLM 0\.23\.0 has no .*use vLLM 0\.24\.0 or later"):
        serve_command(spec(version="0.23.0", custom_save_path=True))
    serve_command(spec(version="0.24.0", custom_save_path=True))


def test_float8_is_written_by_the_connector_of_hs_connectors() -> None:
    assert transfer(serve_command(spec(file_dtype="float8_e4m3fn"))) == {
        "kv_connector": "FP8HiddenStatesConnector",
        "kv_connector_module_path": "hs_connectors.fp8_hidden_states_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/data/out/.staging"},
    }
    with pytest.raises(JobError, match=r"0\.20\.1 cannot write float8"):
        serve_command(spec(version="0.20.1", file_dtype="float8_e4m3fn"))


@pytest.mark.parametrize(
    "words",
    [
        ("--enforce-eager",),
        ("--max-num-seqs", "64"),
        ("--hf-overrides", '{"rope_theta": 1000000}'),
        ("--gdn-prefill-backend=flashinfer",),
        ("-cc.mode=none",),
        ("--model-impl", "transformers"),
        ("--load-format", "dummy", "--trust-remote-code"),
    ],
)
def test_other_arguments_stand_last_and_untouched(words: tuple[str, ...]) -> None:
    command = serve_command(spec(extra_args=words, flags=("--gdn-prefill-backend", "triton")))
    assert tuple(command[-len(words) :]) == words


@pytest.mark.parametrize(
    "words",
    [
        ("--kv-transfer-config", "{}"),
        ("--kv_transfer_config", "{}"),
        ("--kv-transfer-config.kv_role", "kv_both"),
        ("--speculative_config={}",),
        ("-sc", "{}"),
        ("--enforce-eager", "-tp", "2"),
        ("--tensor-parallel-size=2",),
        ("--tensor-par", "2"),
        ("--enable-prefix-caching",),
        ("--max-model-len", "9"),
        ("--port", "1"),
        ("--config", "my.yaml"),
    ],
)
def test_arguments_that_undo_the_backends_own_are_refused_by_name(words: tuple[str, ...]) -> None:
    with pytest.raises(JobError) as refusal:
        serve_command(spec(extra_args=words))
    named = next(word for word in words if word != "--enforce-eager").partition("=")[0]
    assert f"the argument {named.partition('.')[0]}" in refusal.value.message
    assert "is the backend's own" in refusal.value.message
    assert refusal.value.remedy == "leave it out"


def test_a_flag_that_the_version_needs_for_right_states_cannot_be_turned_over() -> None:
    needed = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")
    with pytest.raises(JobError, match="--no-enable-chunked-prefill is needed"):
        check_extra_args(("--enable_chunked_prefill",), needed)
    check_extra_args(("--enable-chunked-prefill",), ("--no-enable-prefix-caching",))


def test_a_word_that_is_no_option_is_not_taken_for_another_model() -> None:
    with pytest.raises(JobError, match="'/models/other' for vLLM is no option"):
        serve_command(spec(extra_args=("/models/other",)))
