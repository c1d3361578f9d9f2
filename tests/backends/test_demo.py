from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import backends
from backends.dataset import PreparedDataset
from backends.demo.model import LEAST_CHANGE, build_model, measure_changes
from backends.errors import JobError
from backends.events import EventLog
from backends.spec import DemoSpec, SpecError

MAIN = Path(backends.__file__).with_name("__main__.py")
FIELDS = {
    "samples", "tokens", "samples_per_s", "verified", "recomputed_worst_error", "layer_ids", "output", "model", "manifest",
}  # fmt: skip


def _start(folder: Path, **fields: Any) -> tuple[subprocess.Popen[str], Path]:
    """The verb as a node runs it: a process of its own, events in a file."""
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"output": str(folder / "demo"), "samples": 40, "recompute": 2, **fields}))
    events = folder / f"events-{time.monotonic_ns()}.jsonl"
    command = [sys.executable, "-u", str(MAIN), "demo", str(spec), "--events", str(events)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), events


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


# --- the model ---


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_every_block_of_the_tiny_models_changes_its_stream_by_a_fifth(
    family: str, models: dict[str, Path], dataset: Path
) -> None:
    ids = torch.tensor([PreparedDataset(dataset).row(0)[0]])
    # gemma3 is a vision-language wrapper.
    kind = AutoModelForImageTextToText if family == "gemma3" else AutoModelForCausalLM
    model = kind.from_pretrained(models[family], attn_implementation="eager")
    assert model.config.model_type == family
    # On a real conversation, which the builder did not measure on.
    changes = measure_changes(model, ids)
    assert len(changes) == 8 and min(changes) >= LEAST_CHANGE


def test_the_same_seed_builds_the_same_model_and_another_seed_another(tmp_path: Path, texts: list[str]) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_model(tmp_path / name, texts[:40], layers=6, hidden=32, vocab_size=500, seed=seed)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert tokenizers[0] == tokenizers[1] == tokenizers[2]


def test_a_model_whose_blocks_do_too_little_is_not_written(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.demo.model._SHARE", 0.02)
    with pytest.raises(ValueError, match=r"changes its residual stream by 0\.0"):
        build_model(tmp_path / "weak", texts[:40], layers=6, hidden=32, vocab_size=500)
    assert not (tmp_path / "weak").exists()


def test_the_tokenizer_gives_back_the_text_and_opens_the_assistants_turn(models: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models["qwen3"])
    text = "Jänet’s 16 ducks — 🦆 lay\n\n  eggs."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id


# --- the job ---


def test_the_demo_runs_the_whole_loop_is_interrupted_and_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    process, events = _start(tmp_path)
    try:
        # Stopped as soon as hidden states are being computed.
        while process.poll() is None and not any(e.get("phase") == "extracting: extracting" for e in _events(events)):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
    finally:
        process.kill()
    # A fast machine may have been done before the signal came.
    assert process.returncode in (0, 3), stderr
    assert _events(events)[-1]["event"] == ("finished" if process.returncode == 0 else "interrupted")
    model = tmp_path / "demo" / "model" / "model.safetensors"
    built = model.stat().st_mtime_ns

    outcomes = []
    for _ in range(2):
        process, events = _start(tmp_path)
        try:
            _, stderr = process.communicate()
        finally:
            process.kill()
        assert process.returncode == 0, stderr
        told = _events(events)
        assert [e["event"] for e in told if e["event"] in ("started", "finished")] == ["started", "finished"]
        outcomes.append(told[-1])
    assert model.stat().st_mtime_ns == built
    for outcome in outcomes:
        assert outcome.keys() >= FIELDS
        # Forty conversations, some of two turns.
        assert outcome["verified"] == outcome["samples"] == outcomes[0]["samples"] > 40
        assert 0 < outcome["recomputed_worst_error"] <= 1e-5
        assert outcome["layer_ids"] == [2, 3, 4, 5, 6, 8]
        assert outcome["samples_per_s"] > 0
        assert Path(outcome["manifest"]).is_file() and Path(outcome["model"], "config.json").is_file()
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["data", "demo.json", "model"]


def test_a_folder_with_something_else_and_another_demos_folder_are_left_alone(tmp_path: Path) -> None:
    from backends.demo import demo

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    with pytest.raises(JobError, match="exists and holds no demo: delete it or give another"):
        demo(DemoSpec(output=str(tmp_path / "thesis")), EventLog(None), lambda: True)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="is a file"):
        demo(DemoSpec(output=str(tmp_path / "file")), EventLog(None), lambda: True)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "demo.json").write_text(
        json.dumps({"spec": {**DemoSpec(output="x").to_json(), "seed": 5}, "rates": {}})
    )
    with pytest.raises(JobError, match="differs in"):
        demo(DemoSpec(output=str(tmp_path / "demo")), EventLog(None), lambda: True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"family": "mamba"}, "family must be one of qwen3, qwen2, .*, not 'mamba'"),
        ({"blocks": 5}, "blocks must be a whole number of at least 6"),
        ({"hidden": 48}, "hidden must be a multiple of 32"),
        ({"layers": [3, 2]}, "layers must rise"),
        ({"layers": 3}, "layers must be a preset or a list"),
    ],
)
def test_a_demo_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        DemoSpec.from_json({"output": "demo", **fields})


def test_importing_the_data_side_loads_no_torch() -> None:
    names = ["layers", "packing", "conversations", "dataset", "arrowfile", "prepare", "verify", "demo", "demo.run"]
    code = "; ".join(f"import backends.{name}" for name in names) + "; import sys; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=MAIN.parent.parent
    )
    assert result.stdout.strip() == "False"
