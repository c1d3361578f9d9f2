"""What our runner says of a vLLM server that failed, under the server's own lines: the diagnosis is what stands above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node.diagnose import find

START = (
    "2026-11-30T12:00:00Z started verb=extract total=24 already_done=0\n"
    "2026-11-30T12:00:01Z worker worker=0 state=starting device=cpu pid=5\n"
    "2026-11-30T12:00:02Z phase phase=importing vLLM\n"
)
READY = (
    "(APIServer pid=5) INFO 11-30 12:00:30 [api_server.py:677] Starting vLLM server on http://127.0.0.1:8000\n"
    "(APIServer pid=5) INFO:     Application startup complete.\n"
    "2026-11-30T12:00:40Z worker worker=0 state=ready device=cpu pid=5\n"
)


def failed(*words: str) -> str:
    return f"backends: {' '.join(words)}\n"


@pytest.mark.parametrize(
    ("log", "id_", "line", "text"),
    [
        (
            START
            + "usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --mystery\n"
            + failed("the vLLM server ended with exit status 2 before it was healthy: unrecognized arguments: --mystery: see the log"),
            "unrecognised-arguments",
            5,
            "--mystery",
        ),
        (
            START
            + "(APIServer pid=5) OSError: [Errno 98] Address already in use\n"
            + failed("the vLLM server ended with exit status 1 before it was healthy: OSError: [Errno 98] Address already in use: see the log"),
            "port-in-use",
            4,
            "Address already in use",
        ),
        (
            START
            + READY
            + "(Worker pid=9) ERROR 11-30 12:01:00 [example_hidden_states_connector.py:312] Hidden-states write failed for"
            " req_id=cmpl-1-0-a: PermissionError(13, 'Permission denied')\n"
            + failed("the vLLM server does not deliver: row 3: it answered, and wrote no file: /d/hs_3-1.safetensors is not there (3 times): see the log"),
            "hidden-states-not-written",
            7,
            "PermissionError",
        ),
        (
            START + READY + failed("row 5: slot 0 is all zero (3 of 24 samples so): use another vLLM or the backend hf"),
            "all-zero-states",
            7,
            "slot 0",
        ),
        (
            START + failed("the vLLM server did not become healthy within 3 s (it was at: importing vLLM): see the log"),
            "job-error",
            4,
            "did not become healthy",
        ),
    ],
    ids=["arguments", "port", "writes", "zeros", "never healthy"],
)  # fmt: skip
def test_the_servers_own_line_is_the_cause_where_there_is_one(
    log: str, id_: str, line: int, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    found: dict[str, Any] = find.diagnose(str(path), find.Ended(failed=True))
    assert (found["cause"]["id"], found["cause"]["line"]) == (id_, line)
    assert text in found["cause"]["text"]
    assert found["remedy"]
