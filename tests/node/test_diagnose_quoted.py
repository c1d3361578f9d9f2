"""A traceback that another process's exception quotes: what it says counts, not that it was quoted."""

from __future__ import annotations

from pathlib import Path

from dflash_tui.node.diagnose import find


def test_the_traceback_of_a_subprocess_that_is_quoted_in_an_exception_is_the_root(tmp_path: Path) -> None:
    """As vLLM looks at a model's class: in a process whose errors it raises as the words of its own."""
    prefix = "(APIServer pid=61) ERROR 11-30 12:25:26 [registry.py:1120] "
    quoted = """\
Error in inspecting model architecture 'Qwen3_5ForConditionalGeneration'
Traceback (most recent call last):
  File "/v/site-packages/vllm/model_executor/models/registry.py", line 1569, in _run_in_subprocess
    returned.check_returncode()
subprocess.CalledProcessError: Command '['/v/bin/python', '-m', 'registry']' returned non-zero exit status 1.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/site-packages/vllm/model_executor/models/registry.py", line 1572, in _run_in_subprocess
    raise RuntimeError(
RuntimeError: Error raised in subprocess:
Triton is installed, but doesn't include CPU backend. Disabling Triton.
Traceback (most recent call last):
  File "/v/site-packages/transformers/models/qwen2_vl/image_processing.py", line 26, in <module>
    from torchvision.transforms.v2 import functional as tvF
ModuleNotFoundError: No module named 'torchvision'
"""
    last = """\
Traceback (most recent call last):
  File "/v/site-packages/pydantic/dataclasses.py", line 121, in __init__
    s.validate()
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['Qwen3_5ForConditionalGeneration'] failed to be inspected. Please check the logs.
"""
    log = tmp_path / "log"
    log.write_text("".join(prefix + line + "\n" for line in quoted.splitlines()) + last)
    found = find.diagnose(str(log))
    assert (found["cause"]["id"], found["cause"]["line"]) == ("missing-module", 17)
    assert "torchvision" in found["cause"]["text"] and found["source"]["line"] == 26
