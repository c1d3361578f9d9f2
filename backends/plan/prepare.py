"""Whether a dataset can be prepared: the tokenizer, its chat template and the conversations are there. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backends.environment import require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.plan.output import check_output
from backends.spec import PrepareSpec


def plan_prepare(spec: PrepareSpec) -> tuple[dict[str, Any], list[str]]:
    model = Path(spec.model)
    config = model / "tokenizer_config.json"
    if not model.is_dir():
        raise JobError(f"the model {model} is not a folder", "give the folder that holds the tokenizer")
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise JobError(
            f"the model folder {model} has no tokenizer", "add tokenizer.json and tokenizer_config.json to it"
        )
    template = (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file()
    if not template and not (config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")):
        raise JobError(f"the tokenizer in {model} has no chat template", "use the model's chat (instruct) version")
    for name in spec.inputs:
        if not Path(name).is_file():
            raise JobError(f"the input {name} is not a file", "give JSONL files of conversations")
        if not os.access(name, os.R_OK):
            raise JobError(f"the input {name} cannot be read", "mend its permissions")
    check_output(Path(spec.output))
    require_packages()
    size = sum(Path(name).stat().st_size for name in spec.inputs)
    return {"inputs": len(spec.inputs), "input_bytes": size, "versions": versions()}, torchvision_warnings()
