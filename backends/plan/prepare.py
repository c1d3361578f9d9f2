"""Whether a dataset can be prepared: the tokenizer, its chat template and the conversations are there. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backends.conversations import is_tokenised
from backends.environment import require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.plan.output import check_output
from backends.sources import Source, open_sources
from backends.spec import PrepareSpec
from backends.template import TOKENIZER_FILES


def plan_prepare(spec: PrepareSpec) -> tuple[dict[str, Any], list[str]]:
    for name in spec.inputs:
        if not Path(name).exists():
            raise JobError(f"the input {name} does not exist", "give files of conversations, or folders of them")
        if not os.access(name, os.R_OK):
            raise JobError(f"the input {name} cannot be read", "mend its permissions")
    check_output(Path(spec.output))
    require_packages()
    sources = open_sources(spec.inputs)
    problem = _template_problem(Path(spec.model))
    if problem is not None and not all(_begins_tokenised(source) for source in sources):
        raise problem
    facts = {"inputs": len(sources), "input_bytes": sum(_size(Path(source.name)) for source in sources)}
    return {**facts, "versions": versions()}, torchvision_warnings()


def _template_problem(model: Path) -> JobError | None:
    """Why conversations cannot be made into tokens with this model's folder."""
    if not model.is_dir():
        return JobError(f"the model {model} is not a folder", "give the folder that holds the tokenizer")
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        return JobError(
            f"the model folder {model} has no tokenizer", "add tokenizer.json and tokenizer_config.json to it"
        )
    config = model / "tokenizer_config.json"
    template = (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file()
    if not template and not (config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")):
        return JobError(f"the tokenizer in {model} has no chat template", "use the model's chat (instruct) version")
    return None


def _begins_tokenised(source: Source) -> bool:
    """Whether the first record needs no tokenizer. Raises JobError."""
    for place, content in source.scan():
        return is_tokenised(source.parse(place, content))
    return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
