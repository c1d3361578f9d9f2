"""What is said of a model, a vLLM and a node before anything starts, and that it never says more than is known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.hf.families import FAMILIES
from backends.vllm.compat import HF, Verdict, can_extract, version_of
from backends.vllm.table import FAULTS, FLAGS, KNOWN, ROWS, SUGGESTED, TRIED

H200 = ((9, 0),)
NO_CACHE = "--no-enable-prefix-caching"
NO_CHUNKS = "--no-enable-chunked-prefill"
HYBRID_FLAGS = (NO_CACHE, "--language-model-only", "--gdn-prefill-backend", "triton")


def said(family: str, version: str, **more: Any) -> Verdict:
    config = {"model_type": family, "num_attention_heads": 32, "num_key_value_heads": 8, **more.pop("config", {})}
    verdict = can_extract(config, version, **{"gpus": H200, **more})
    for line in (verdict.why, verdict.remedy, *verdict.warnings):
        assert "\n" not in line
    assert json.loads(json.dumps(verdict.to_json()))["ok"] is verdict.ok
    if verdict.ok is not True:
        assert verdict.remedy
    return verdict


@pytest.mark.parametrize("version", ["0.20.1", "0.26.0", "0.32.0"])
def test_a_dense_model_was_tried_with_three_versions(version: str) -> None:
    verdict = said("qwen3", version)
    assert verdict.ok is True
    assert verdict.tried == (version != "0.32.0")
    assert ("tried on a CPU alone" if version == "0.32.0" else "tried on an H200") in verdict.why
    assert NO_CACHE in verdict.flags
    assert (NO_CHUNKS in verdict.flags) == (version == "0.20.1")
    assert not verdict.instead


def test_a_version_between_two_that_were_tried_is_told_as_not_tried() -> None:
    verdict = said("qwen3", "0.23.0")
    assert verdict.ok is True
    assert not verdict.tried
    assert "not tried itself, 0.20.1 and 0.26.0 were" in verdict.why
    assert NO_CHUNKS in verdict.flags


@pytest.mark.parametrize(
    ("family", "version"), [("qwen3", "0.17.0"), ("qwen3", "0.33.0"), ("llama", "0.26.0"), ("qwen3_5_moe", "0.26.0")]
)
def test_where_only_the_source_speaks_for_it_nothing_is_promised(family: str, version: str) -> None:
    verdict = said(family, version)
    assert verdict.ok is None
    assert "not tried" in verdict.why
    assert "try it with a few samples" in verdict.remedy


def test_a_version_newer_than_any_that_was_read_is_unknown_whatever_the_family() -> None:
    for family in KNOWN:
        verdict = said(family, "0.40.0")
        assert verdict.ok is None
        assert "newer than the newest that was looked at, 0.33.0" in verdict.why


@pytest.mark.parametrize("version", ["0.26.0rc1", "0.26.1.dev7+g793ca69", "0.26.0.post1"])
def test_a_build_that_is_no_release_is_not_the_one_that_was_tried(version: str) -> None:
    assert not said("qwen3", version).tried
    assert said("qwen3", "0.26.0+cu129").tried


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text"])
@pytest.mark.parametrize("version", ["0.17.0", "0.20.1", "0.21.0"])
def test_hybrids_are_refused_before_their_manager_is_supported(family: str, version: str) -> None:
    verdict = said(family, version)
    assert verdict.ok is False
    assert "hybrid KV cache manager" in verdict.why
    assert any("0.20.1" in source for source in verdict.sources)
    assert verdict.flags == ()


def test_a_hybrid_gets_its_flags_and_off_a_gpu_no_kernel_of_one() -> None:
    verdict = said("qwen3_5", "0.26.0")
    assert (verdict.ok, verdict.tried, verdict.flags) == (True, True, HYBRID_FLAGS)
    assert said("qwen3_5", "0.32.0").ok is None
    assert said("qwen3_5", "0.32.0", gpus=()).flags == (NO_CACHE, "--language-model-only")
    assert said("qwen3_next", "0.32.0", gpus=()).flags == (NO_CACHE,)


def test_qwen3_next_has_its_interface_later_than_the_manager() -> None:
    for version in ("0.22.0", "0.23.0"):
        verdict = said("qwen3_next", version)
        assert verdict.ok is False
        assert "EAGLE3" in verdict.why
        assert verdict.instead == "0.32.0"
    assert said("qwen3_5", "0.23.0").ok is None


def test_the_version_that_writes_zeros_for_hybrids_is_refused_and_the_next_is_not() -> None:
    for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        verdict = said(family, "0.24.0")
        assert verdict.ok is False
        assert "all-zero" in verdict.why
        assert any("#46301" in source for source in verdict.sources)
        assert said(family, "0.25.0").ok is not False
    assert said("qwen3", "0.24.0").ok is True
    assert any("all zero" in line for line in said("qwen3_5_moe", "0.26.0").warnings)


def test_what_can_is_named_instead_and_can() -> None:
    for family in sorted(KNOWN):
        for version in ("0.10.2", "0.20.1", "0.24.0", "0.33.0"):
            for gpus in (H200, ()):
                verdict = said(family, version, gpus=gpus)
                if verdict.ok is True:
                    continue
                assert verdict.instead
                if verdict.instead == HF:
                    assert family in FAMILIES
                    assert "the backend hf" in verdict.remedy
                else:
                    assert gpus
                    assert said(family, verdict.instead).ok is True
                    assert verdict.instead in verdict.remedy


ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
}
LOGS = sorted(Path(__file__).parents[1].joinpath("data", "logs").glob("v*.log"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_the_verdict_is_what_a_recorded_start_of_that_version_did(log: Path) -> None:
    text = log.read_text(encoding="utf-8")
    version, architecture = (
        re.findall(pattern, text)[0] for pattern in (r" version (\d+\.\d+\.\d+)", r"Resolved architecture: (\w+)")
    )
    verdict = said(ARCHITECTURES[architecture], version)
    assert (verdict.ok is False) == ("Engine core initialization failed" in text)
    arguments = next(line for line in text.splitlines() if "non-default args" in line)
    if verdict.tried:
        # What made it work is asked for; 0.20.1 ran with less.
        assert ("'enable_prefix_caching': False" in arguments) <= (NO_CACHE in verdict.flags)
        assert ("'language_model_only': True" in arguments) == ("--language-model-only" in verdict.flags)
        assert ("'gdn_prefill_backend': 'triton'" in arguments) == ("--gdn-prefill-backend" in verdict.flags)
    if "pin_memory=True requires" in text:
        assert "pinned memory" in said(ARCHITECTURES[architecture], version, gpus=()).why


def test_every_recorded_start_is_there() -> None:
    assert len(LOGS) >= 10


def test_without_a_gpu_nothing_is_promised() -> None:
    verdict = said("qwen3", "0.32.0", gpus=())
    assert verdict.ok is None
    assert "pinned memory" in verdict.why
    assert "without a GPU it was not tried" in said("qwen3", "0.20.1", gpus=()).why


def test_gemma_3_and_versions_without_the_method_are_refused() -> None:
    assert said("gemma3", "0.33.0").instead == HF
    assert "no EAGLE3 interface" in said("gemma3_text", "0.26.0").why
    for family in ("qwen3", "deepseek_v3"):
        assert "no extract_hidden_states yet" in said(family, "0.16.0").why


def test_a_family_that_nobody_looked_at_and_a_version_that_is_none() -> None:
    verdict = said("deepseek_v3", "0.26.0")
    assert verdict.ok is None
    assert "'deepseek_v3'" in verdict.why
    assert can_extract({"model_type": "qwen3"}, "unknown").ok is None


def test_quantised_weights_are_not_called_tried_but_where_they_are_published_so() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    verdict = said("qwen3", "0.26.0", config=fp8)
    assert verdict.ok is None
    assert "quantised weights (fp8)" in verdict.why
    assert "not quantised" in verdict.remedy
    assert "fp8" in said("qwen3_5", "0.26.0", config={"text_config": fp8}).why
    assert "quantised" not in said("gpt_oss", "0.26.0", config={"quantization_config": {"quant_method": "mxfp4"}}).why


def test_heads_that_tensor_parallel_does_not_divide_are_named_with_what_does() -> None:
    verdict = said("qwen3", "0.26.0", tensor_parallel=3)
    assert verdict.ok is False
    assert verdict.why == "tensor_parallel 3 does not divide the model's 32 heads (num_attention_heads)"
    assert verdict.remedy == "choose one that does: 1, 2, 4, 8, 16, 32"
    inner = {"text_config": {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 16}}
    assert "linear_num_key_heads" in said("qwen3_5", "0.26.0", tensor_parallel=3, config=inner).why
    assert said("qwen3", "0.26.0", tensor_parallel=16).ok is True
    groups = {"num_attention_heads": 24, "num_key_value_heads": 4}
    assert "num_key_value_heads" in said("qwen3", "0.26.0", tensor_parallel=6, config=groups).why


def test_a_vllm_without_what_it_imports_cannot() -> None:
    verdict = said("qwen3", "0.26.0", missing=("torch",))
    assert verdict.ok is False
    assert verdict.why == "torch is not beside this vLLM, which cannot be imported so"
    assert verdict.remedy.startswith("install torch into its Python")
    assert "torch and transformers are not" in said("qwen3", "0.26.0", missing=("torch", "transformers"), gpus=()).why


def test_what_was_seen_with_two_cards_is_told_of_several_cards() -> None:
    def told(parallel: int, **more: Any) -> bool:
        return any("FlashInfer" in line for line in said("qwen3", "0.26.0", tensor_parallel=parallel, **more).warnings)

    assert told(2)
    assert not told(1)
    assert not told(2, gpus=())


def test_the_page_assertion_is_told_where_it_can_come() -> None:
    def told(family: str, version: str, parallel: int) -> bool:
        return any("page_size_padded" in line for line in said(family, version, tensor_parallel=parallel).warnings)

    assert told("qwen3_5", "0.26.0", 2)
    assert not told("qwen3_5", "0.26.0", 1)
    assert not told("qwen3_5", "0.30.0", 2)
    assert not told("qwen3", "0.26.0", 2)
    assert told("laguna", "0.26.0", 2)


def test_requests_longer_than_the_cache_are_warned_of() -> None:
    assert any("waits for ever" in line for line in said("qwen3", "0.26.0").warnings)


def test_cards_and_drivers_that_are_too_old_are_refused() -> None:
    turing = said("qwen3", "0.26.0", gpus=((7, 5),), cuda="13.0")
    assert turing.ok is False
    assert turing.remedy == "choose newer GPUs, or dtype float16"
    assert said("qwen3", "0.26.0", gpus=((7, 5),), cuda="13.0", dtype="float16").ok is True
    volta = said("qwen3", "0.26.0", gpus=((9, 0), (7, 0)), cuda="13.0", dtype="float16")
    assert "7.0, and this vLLM (built for CUDA 13.0) needs 7.5" in volta.why
    assert volta.instead == HF
    driver = said("qwen3", "0.26.0", torch="2.11.0+cu130", driver=(12, 8))
    assert driver.why == "vLLM's torch was built for CUDA 13.0, and the NVIDIA driver takes CUDA up to 12.8"
    assert said("qwen3", "0.26.0", torch="2.11.0+cu129", driver=(12, 8)).ok is True
    assert said("qwen3", "0.26.0", torch="2.11.0", driver=(12, 8)).ok is True
    assert "built for the CPU" in said("qwen3", "0.26.0", torch="2.11.0+cpu").why


def test_a_torch_that_the_release_was_not_built_for_is_warned_of() -> None:
    assert any("built for torch 2.11.0" in line for line in said("qwen3", "0.26.0", torch="2.13.0+cu130").warnings)
    assert said("qwen3", "0.26.0", torch="2.11.0+cu130").warnings == said("qwen3", "0.26.0").warnings


def test_an_encoder_decoder_is_refused_by_every_version() -> None:
    assert said("t5", "0.26.0", config={"is_encoder_decoder": True}).ok is False


def test_every_row_flag_and_fault_has_a_source_and_the_rows_leave_no_gap() -> None:
    for source in [*(row.source for row in ROWS), *(note.source for note in (*FLAGS, *FAULTS))]:
        assert re.search(r"source|registry|tried|#\d+", source)
    for family in KNOWN:
        for minor in range(34):
            assert any(row.covers(family, (0, minor, 0)) for row in ROWS), (family, minor)


def test_what_was_tried_is_what_the_rows_say_and_the_suggestions_were_tried() -> None:
    for family, versions in TRIED.items():
        for version in versions:
            numbers = version_of(version)
            assert numbers is not None
            row = next(row for row in ROWS if row.covers(family, numbers))
            assert row.result, (family, version)
    tried = {version for versions in TRIED.values() for version in versions}
    assert set(SUGGESTED) <= tried


def test_versions_are_read_as_people_and_builds_write_them() -> None:
    assert version_of("0.26.0+cu129") == version_of("v0.26") == (0, 26, 0)
    assert version_of("0.26.1rc1.dev657+g793ca6998.cu129") == (0, 26, 1)
    assert version_of("nightly") is None


def test_asking_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; import backends.vllm.command, backends.vllm.compat;"
        " print([m for m in ('torch', 'vllm', 'transformers', 'dflash_tui') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
