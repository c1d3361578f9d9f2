"""The options of an extraction by vLLM become the fields of its spec."""

from __future__ import annotations

import argparse

import pytest

from backends.spec import ExtractSpec, SpecError
from dflash_tui.commands import launch
from dflash_tui.commands.plan import extract_order

GIVEN = ["--model", "/m", "--dataset", "/d", "--output", "/o"]


def spec_of(*options: str) -> ExtractSpec:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    parser.add_argument("--host")
    spec = extract_order(parser.parse_args([*GIVEN, *options]), "gpu-1").spec
    assert isinstance(spec, ExtractSpec)
    return spec


def test_launch_takes_all_that_a_vllm_server_is_started_with() -> None:
    spec = spec_of(
        *("--backend", "vllm", "--vllm-python", "/opt/vllm/bin/python", "--tensor-parallel", "2"),
        *("--concurrency", "64", "--stall", "120", "--", "--enforce-eager", "--gpu-memory-utilization", "0.8"),
    )
    assert (spec.backend, spec.vllm_python, spec.tensor_parallel) == ("vllm", "/opt/vllm/bin/python", 2)
    assert (spec.concurrency, spec.stall_s) == (64, 120)
    assert spec.extra_args == ("--enforce-eager", "--gpu-memory-utilization", "0.8")


def test_launch_takes_the_address_of_a_server_that_runs_already() -> None:
    assert spec_of("--backend", "vllm", "--server-url", "http://127.0.0.1:8000").server_url == "http://127.0.0.1:8000"


def test_what_is_left_out_is_as_the_spec_has_it() -> None:
    spec = spec_of("--backend", "vllm")
    assert (spec.concurrency, spec.stall_s, spec.server_url) == (32, 300, "")


@pytest.mark.parametrize("options", [["--concurrency", "8"], ["--stall", "9"], ["--server-url", "http://h:1"]])
def test_options_of_vllm_mean_nothing_to_the_backend_hf(options: list[str]) -> None:
    with pytest.raises(SpecError, match="of the backend vllm, and the backend is hf"):
        spec_of(*options)
