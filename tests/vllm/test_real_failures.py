"""What a real vLLM says when it cannot: the failed line of the job has its words, and the diagnosis names the cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.vllm.real_node import EAGER, Job, Site


def failed(job: Job) -> tuple[str, dict[str, Any]]:
    """The reason of the job's record, in one line, and what the diagnosis says of its log."""
    reason = job.wait("failed")["reason"]
    assert "\n" not in reason and "Traceback" not in reason
    job.nothing_is_left()
    diagnosis = job.site.agent.ask("diagnose", job=job.id)
    assert diagnosis["failed"] and diagnosis["remedy"]
    return reason, diagnosis["cause"]


def test_an_option_that_vllm_does_not_know_is_told_in_its_own_words(site: Site) -> None:
    job = site.extract(
        "option", site.data.dense, site.data.conversations, extra_args=[*EAGER, "--enable-telepathy"], last=4
    )
    reason, cause = failed(job)
    assert "unrecognized arguments: --enable-telepathy" in reason
    assert "--enable-telepathy" in cause["text"]
    assert "--enable-telepathy" in job.log.splitlines()[cause["line"] - 1]


def test_a_model_whose_weights_are_not_those_of_its_configuration_fails_with_the_first_cause(
    site: Site, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(site.data.dense, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 64}))
    reason, cause = failed(site.extract("weights", str(model), site.data.conversations, last=4))
    # What it prints last, "see root cause above", is no cause.
    assert "before it was healthy" in reason
    assert "See root cause above" not in reason and "root cause" not in cause["text"]
    assert "192" in cause["text"] and "256" in cause["text"]


def test_a_model_that_kills_the_engine_with_its_first_request_fails_with_the_engines_own_words(site: Site) -> None:
    job = site.extract("narrow", site.data.narrow, site.data.conversations, worker_restarts=0, last=4)
    reason, cause = failed(job)
    assert "head_dim=16" in cause["text"]
    assert "head_dim=16" in reason
    assert job.files() == 0
