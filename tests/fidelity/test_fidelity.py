"""Every check of the fidelity table is green, and every sabotage turns it red: what `python -m tests.fidelity` prints."""

from __future__ import annotations

import os

# Before torch is imported: the models are tiny.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from backends.demo.configs import WINDOW
from backends.hf.families import FAMILIES, SLIDING
from tests.fidelity.cases import FAMILY_CASES, FEATURE_CASES, LAYERS, Case, Model, plain_states
from tests.fidelity.checks import CHECKS, LIMITS, Result, error_of, sabotaged
from tests.fidelity.sabotage import SABOTAGES, Sabotage
from tests.fidelity.table import all_well, tell_table, totals_of

FEATURES = {case.name: case for case in FEATURE_CASES}
FAMILY = {case.name: case for case in FAMILY_CASES}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Model]:
    """The model of a case, made once."""
    root = tmp_path_factory.mktemp("fidelity")
    made: dict[str, Model] = {}

    def model_of(case: Case) -> Model:
        if case.name not in made:
            made[case.name] = Model(case, root)
        return made[case.name]

    return model_of


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_backend_captures_is_what_the_plain_forward_has(
    family: str, check: str, models: Callable[[Case], Model]
) -> None:
    result = CHECKS[check](models(FAMILY[family]))
    assert result.good, f"{result.error:.3g} {result.note}"


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.what)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_fails_and_not_by_a_hair_when_the_backend_is_sabotaged(
    family: str, sabotage: Sabotage, models: Callable[[Case], Model]
) -> None:
    model = models(FAMILY[family])
    if not sabotage.applies(model.shape):
        # What is not there cannot be dropped: the states stay right.
        if not sabotage.reopen:
            assert not sabotaged(model, sabotage, "float32").good
        return
    for dtype in sabotage.dtypes:
        result = sabotaged(model, sabotage, dtype)
        assert result.good, f"{dtype}: {result.error:.3g}"


@pytest.mark.parametrize("feature", FEATURES)
def test_what_a_config_may_ask_for_reaches_the_packs(feature: str, models: Callable[[Case], Model]) -> None:
    case = FEATURES[feature]
    model = models(case)
    for name in ("float32", "recompute"):
        result = CHECKS[name](model)
        assert result.good, f"{name}: {result.error:.3g} {result.note}"
    if case.without:
        # Without the feature these are other states.
        other = plain_states(model.folder, model.samples, case.without)
        slots = [torch.stack([states[layer] for layer in LAYERS], dim=1) for states in other]
        assert error_of(model, slots, "float32") > 100 * LIMITS["float32"]


def test_every_family_has_its_windows_experts_and_sinks_where_it_should(models: Callable[[Case], Model]) -> None:
    shapes = {name: models(case).shape for name, case in FAMILY.items()}
    windows = {name for name, shape in shapes.items() if SLIDING in shape.layer_types}
    assert {"mistral", "gemma3_text", "gemma3", "gpt_oss"} == windows
    assert {name for name, shape in shapes.items() if shape.num_experts} >= {"qwen3_moe", "gpt_oss"}
    assert all(shape.sliding_window == WINDOW for name, shape in shapes.items() if name in windows)


def test_the_table_says_what_is_red_and_what_was_missed() -> None:
    good, bad = Result(1e-6, True), Result(0.5, False)
    checks = {"one": dict.fromkeys(CHECKS, good), "two": {**dict.fromkeys(CHECKS, good), "float32": bad}}
    faults = {
        "one": {
            ("sinks dropped", "float32"): replace(bad, good=True),
            ("window dropped", "float32"): replace(good, good=False),
        }
    }
    features = {"wide": {"float32": good, "pack = alone": good, "recompute": good}}
    lines: list[str] = []
    tell_table(lines.append, checks, faults, features)
    text = "\n".join(lines)
    assert text.count("RED") == 1
    assert "MISSED 1.0e-06" in text
    totals = totals_of(checks, faults, features)
    assert (totals["families"], totals["green"], totals["sabotages"], totals["sabotages_red"]) == (2, 1, 2, 1)
    assert not all_well(totals)
    assert all_well(
        totals_of({"one": checks["one"]}, {"one": {("sinks dropped", "float32"): replace(bad, good=True)}}, features)
    )
