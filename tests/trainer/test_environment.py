"""The trainer's environment: nothing that it needs is forgotten, and nothing is there that breaks it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from backends.environment import torchvision_warnings

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Required by the trainer and never imported by it.
LEFT_OUT = {"torchvision", "torchaudio"}


def _pyproject() -> dict[str, Any]:
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def _by_name(lines: list[str]) -> dict[str, Requirement]:
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def _required_by(package: str) -> dict[str, Requirement]:
    lines = importlib.metadata.requires(package) or []
    return _by_name([line for line in lines if "extra ==" not in line])


def test_the_trainer_is_the_release_that_the_files_are_written_for() -> None:
    for name, requirement in _by_name(_pyproject()["dependency-groups"]["trainer"]).items():
        assert importlib.metadata.version(name) in requirement.specifier
        assert str(requirement.specifier).startswith("==")


def test_the_extra_asks_for_all_that_the_trainer_requires_but_torchvision_and_torchaudio() -> None:
    itself = _by_name(_pyproject()["dependency-groups"]["trainer"])
    extra = _by_name(_pyproject()["project"]["optional-dependencies"]["trainer"])
    required = _required_by("speculators")
    assert set(required) - set(itself) - LEFT_OUT == set(extra)
    for name, requirement in extra.items():
        assert requirement.specifier == required[name].specifier, name
    for name, requirement in _required_by("hs-connectors").items():
        assert name in extra
        for specifier in requirement.specifier:
            # Only lower bounds, each below that of the extra.
            assert specifier.operator == ">="
            assert specifier.version not in extra[name].specifier


def test_no_torchvision_is_there_that_would_break_the_models() -> None:
    assert torchvision_warnings() == []
    for name in LEFT_OUT:
        assert importlib.util.find_spec(name) is None, (
            f"{name} is installed: uninstall it, the trainer does not import it"
        )
