"""Whether a dataset can be prepared: the tokenizer, its chat template and the conversations are there. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backends.conversations import is_tokenised
from backends.environment import require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.plan.download import Pending
from backends.plan.output import check_output
from backends.sources import Source, open_sources
from backends.spec import PrepareSpec
from backends.template import TOKENIZER_FILES


def plan_prepare(
    spec: PrepareSpec, inputs: tuple[str, ...] | None = None, pending: Pending | None = None
) -> tuple[dict[str, Any], list[str]]:
    """inputs: those that are here, None for all of the spec's; pending: what is to be downloaded. Raises JobError."""
    pending = pending or Pending()
    inputs = spec.inputs if inputs is None else inputs
    for name in inputs:
        if not Path(name).exists():
            raise JobError(f"the input {name} does not exist", "give files of conversations, or folders of them")
        if not os.access(name, os.R_OK):
            raise JobError(f"the input {name} cannot be read", "mend its permissions")
    check_output(Path(spec.output))
    require_packages()
    sources = open_sources(inputs) if inputs else []
    problem = _template_problem(Path(spec.model), pending.names)
    # Of rows that are still to be downloaded nobody knows whether they are tokenised.
    if problem is not None and sources and not all(_begins_tokenised(source) for source in sources):
        raise problem
    facts = {
        "inputs": len(sources) + pending.inputs,
        "input_bytes": sum(_size(Path(source.name)) for source in sources) + pending.input_bytes,
    }
    return {**facts, "versions": versions()}, torchvision_warnings()


def _template_problem(model: Path, names: frozenset[str] = frozenset()) -> JobError | None:
    """Why conversations cannot be made into tokens with this model's folder; `names`: what it will hold besides."""
    if not model.is_dir():
        return JobError(f"the model {model} is not a folder", "give the folder that holds the tokenizer")
    if not any(name in names or (model / name).is_file() for name in TOKENIZER_FILES):
        return JobError(
            f"the model folder {model} has no tokenizer", "add tokenizer.json and tokenizer_config.json to it"
        )
    config = model / "tokenizer_config.json"
    template = (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file()
    if not template and not (
        config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8", errors="replace")
    ):
        return JobError(f"the tokenizer in {model} has no chat template", "use the model's chat (instruct) version")
    return None


def _begins_tokenised(source: Source) -> bool:
    """Whether the first record needs no tokenizer. Raises JobError."""
    for place, content in source.scan():
        return is_tokenised(source.parse(place, content))
    return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
