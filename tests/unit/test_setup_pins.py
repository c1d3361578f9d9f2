"""What a node gets lies in what pyproject.toml says that the code works with: one truth, written twice, compared."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from dflash_tui.node.setup import pins
from dflash_tui.node.setup.spec import SetupSpec

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def pinned(requirements: tuple[str, ...]) -> dict[str, str]:
    """Name -> version of what is pinned exactly."""
    found = (requirement.partition("==") for requirement in requirements)
    return {pins.name_of(name): version for name, equal, version in found if equal}


def test_the_pins_of_the_worker_lie_in_the_ranges_of_its_extra() -> None:
    versions = pinned(pins.WORKER)
    for text in EXTRAS["worker"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[pins.name_of(requirement.name)]), text


def test_the_pins_of_the_trainer_lie_in_the_ranges_of_the_extras() -> None:
    versions = pinned(pins.TRAINER)
    for text in [*EXTRAS["worker"], *EXTRAS.get("trainer", [])]:
        requirement = Requirement(text)
        name = pins.name_of(requirement.name)
        if name in versions:
            assert requirement.specifier.contains(versions[name]), text


def test_a_gpu_brings_the_kernels_and_a_torch_of_ones_own_takes_the_place_of_the_pinned() -> None:
    spec = SetupSpec(trainer=True, torch="2.12.0", vllm="0.26.0")
    worker, vllm, trainer = pins.wanted(spec, "580.95.05")
    assert set(pins.KERNELS) <= set(worker.requirements)
    assert "torch==2.12.0" in worker.requirements
    assert "torch==2.12.0" in trainer.requirements
    assert vllm.requirements == ("vllm==0.26.0",)  # it pins its own torch
    without = pins.wanted(spec, "")
    assert not set(pins.KERNELS) & set(without[0].requirements)
    assert without[0].bytes < worker.bytes
