"""Comparisons as a node tells of them: running, done, one whose states are not the same, one that failed."""

from __future__ import annotations

from typing import Any

from dflash_tui.fleet.facts import Job, JobGpu, JobState, Side

from .scripted import NOW, h200

UUIDS = (h200(0, 0.0).uuid, h200(1, 0.0).uuid)
GPUS = tuple(JobGpu(index, uuid, "NVIDIA H200") for index, uuid in enumerate(UUIDS))
SAMPLES = 256
HF = Side(
    "hf", "done", "done", SAMPLES, SAMPLES, 223_900, 9_171_000_000, 96.4, 31.2, 5.41, 4731.0, 193.7e6, gpus=UUIDS
)  # fmt: skip
STARTING = Side("vllm", "starting", "loading weights (4 of 17 files)", 0, SAMPLES, elapsed_s=21.0, gpus=UUIDS)


def side(name: str, second: float, done: int, **more: Any) -> Side:
    """One that runs: so many samples are done, so many seconds after its start."""
    values: dict[str, Any] = {
        "phase": "extracting", "total": SAMPLES, "tokens": done * 875, "bytes": done * 35_800_000, "startup_s": 12.0,
        "samples_per_s": done / max(second - 12, 1), "tokens_per_s": 875 * done / max(second - 12, 1),
        "bytes_per_s": 35.8e6 * done / max(second - 12, 1), "gpus": UUIDS[:1] if name == "hf" else UUIDS[1:],
    }  # fmt: skip
    return Side(name, "running", done=done, elapsed_s=second, **{**values, **more})


def comparison(job: str = "20261130-025500-compare-3f9a", **more: Any) -> Job:
    values: dict[str, Any] = {
        "id": job, "name": "qwen3-8b on h200", "verb": "compare", "state": JobState.RUNNING, "created": NOW - 130,
        "started": NOW - 129, "gpus": GPUS, "sides": {"hf": HF, "vllm": STARTING}, "supervisor_pid": 30_001,
        "runner_pid": 30_002, "directory": f"/home/ops/.local/state/dflash-tui/jobs/{job}", "log_size": 4096,
    }  # fmt: skip
    return Job(**{**values, **more})


def beside(second: float) -> Job:
    """Both backends at a time, so many seconds after their start."""
    hf, vllm = (min(SAMPLES, int(max(0, second - 12) * rate)) for rate in (2.7, 6.4))
    return comparison(sides={"hf": side("hf", second, hf), "vllm": side("vllm", second, vllm)})


def layer(error: float, *, good: bool = True, row: int = 131) -> dict[str, Any]:
    return {
        "relative_error": error * 0.9, "relative_error_by_token": error, "cosine": 1 - error**2, "worst_cosine": 0.99971,
        "worst_row": row, "worst_row_error": error * 1.3, "lost_share": 0.0, "limit": 0.02, "good": good,
    }  # fmt: skip


def measured(rate: float, startup_s: float, **more: Any) -> dict[str, Any]:
    return {
        "samples": SAMPLES, "tokens": 223_900, "bytes": 9_171_000_000, "startup_s": startup_s, "steady_s": SAMPLES / rate,
        "samples_per_s": rate, "tokens_per_s": 874.6 * rate, "mb_per_s": 35.82 * rate, "samples_per_s_per_gpu": rate / 2,
        "interval": [rate * 0.97, rate * 1.03], "joules": 61_000.0, "samples_per_joule": rate / 1312,
        "energy_source": "NVML total energy counter", "energy_note": "", "whole_dataset_s": startup_s + 7473 / rate,
        "whole_dataset_samples": 7473, "packing": "packs", "gpus": list(UUIDS), "restarts": 0, "skipped": 0,
        "versions": {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.17.0"}, **more,
    }  # fmt: skip


RESULT: dict[str, Any] = {
    "verb": "compare", "model": "/models/Qwen3-8B", "dataset": "/data/gsm8k", "output": "/data/compare-8b",
    "report": "/data/compare-8b/compare.json", "first": 0, "samples": SAMPLES, "tokens": 223_900, "together": False,
    "dtype": "bfloat16", "layer_ids": [2, 10, 18, 26, 34, 36],
    "gpus": [{"index": index, "uuid": uuid, "name": "NVIDIA H200"} for index, uuid in enumerate(UUIDS)],
    "versions": {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.17.0"},
    "sides": {
        "hf": measured(5.41, 31.2),
        "vllm": measured(
            13.07, 94.8, packing="the server's own batches", restarts=1, joules=None, samples_per_joule=None,
            energy_source=None, energy_note="the cards did not answer all the time",
            versions={"vllm": "0.26.0", "torch": "2.11.0+cu130", "cuda": "13.0", "transformers": "5.17.0"},
        ),
    },
    "parity": {
        "verdict": "good", "reasons": [], "worst_layer": "34", "worst_row": 131, "worst_error": 0.0117, "report": "/data/compare-8b/parity.json",
        "layers": {str(k): layer(error) for k, error in zip((2, 10, 18, 26, 34, 36), (4e-3, 5e-3, 6e-3, 7e-3, 9e-3, 8e-3), strict=True)},
    },
    "verdict": {
        "faster": "vllm", "ratio": 2.416, "low": 2.31, "high": 2.53,
        "sentence": "vllm is 2.4 times as fast (2.3 to 2.5) for Qwen3-8B on 2 H200: 13.1 against 5.41 samples/s; 7,473 samples"
        " would take 11 min against 24 min, start-up included; both wrote the same (worst layer 0.9 %)",
    },
}  # fmt: skip
DONE = comparison(
    "20261129-101500-compare-aaaa",
    name="8b, one after the other",
    state=JobState.DONE,
    created=NOW - 90_000,
    started=NOW - 89_999,
    ended=NOW - 89_700,
    exit_code=0,
    result=RESULT,
    sides={"hf": HF, "vllm": Side("vllm", "done", None, SAMPLES, SAMPLES, gpus=UUIDS)},
)
WHY = "layer id 36 is off by 0.31, limit 0.02: its states are nearer to the reference's layer id 35"
BAD = comparison(
    "20261128-091500-compare-bbbb",
    name="a shifted one",
    state=JobState.DONE,
    created=NOW - 180_000,
    started=NOW - 179_999,
    ended=NOW - 179_000,
    exit_code=0,
    result={
        **RESULT,
        "parity": {
            **RESULT["parity"],
            "verdict": "bad",
            "reasons": [WHY, "layer id 34 is off by 0.2, limit 0.02: row 3 is worst (0.25)"],
            "layers": {"34": layer(0.2, good=False, row=3), "36": layer(0.31, good=False)},
        },
        "verdict": {
            **RESULT["verdict"],
            "sentence": f"hf and vllm did NOT write the same for Qwen3-8B on 2 H200: {WHY} (1 more); until that is mended"
            " their speed decides nothing (vllm 13.1 against 5.41 samples/s)",
        },
    },
)
FAILED = comparison(
    "20261127-081500-compare-cccc",
    name="no vllm there",
    state=JobState.FAILED,
    created=NOW - 270_000,
    started=NOW - 269_999,
    ended=NOW - 269_000,
    exit_code=1,
    reason="the vllm side failed: the server ended before it was healthy: see the log",
    sides={"hf": HF, "vllm": Side("vllm", "failed", "starting the server", 0, SAMPLES, elapsed_s=41.0, gpus=UUIDS)},
)
