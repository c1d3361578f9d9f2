"""The table in words: a row for each family, a column for each check and each sabotage, and totals."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.fidelity.cases import FAMILY_CASES, FEATURE_CASES, Model
from tests.fidelity.checks import CHECKS, LIMITS, LINEAR_LIMIT, Result, sabotaged
from tests.fidelity.sabotage import SABOTAGES

_FEATURE_CHECKS = ("float32", "pack = alone", "recompute")


def run(root: Path, tell: Callable[[str], None], device: str = "cpu") -> dict[str, Any]:
    """Runs everything in `root`, tells the table line by line, and returns the totals."""
    checks: dict[str, dict[str, Result]] = {}
    faults: dict[str, dict[tuple[str, str], Result]] = {}
    features: dict[str, dict[str, Result]] = {}
    for case in FAMILY_CASES:
        model = Model(case, root, device)
        checks[case.name] = {name: check(model) for name, check in CHECKS.items()}
        faults[case.name] = {
            (sabotage.what, dtype): sabotaged(model, sabotage, dtype)
            for sabotage in SABOTAGES
            if sabotage.applies(model.shape)
            for dtype in sabotage.dtypes
        }
    for case in FEATURE_CASES:
        model = Model(case, root, device)
        features[case.name] = {name: CHECKS[name](model) for name in _FEATURE_CHECKS}
    tell_table(tell, checks, faults, features)
    return {**totals_of(checks, faults, features), "device": device}


def tell_table(
    tell: Callable[[str], None],
    checks: dict[str, dict[str, Result]],
    faults: dict[str, dict[tuple[str, str], Result]],
    features: dict[str, dict[str, Result]],
) -> None:
    """Every result by family, check and sabotage; faults by (sabotage, dtype)."""
    tell(
        f"Checks: the worst relative error of a token; limits {LIMITS['float32']:g} in float32, {LIMITS['bfloat16']:g} in"
        f" bfloat16 ({LINEAR_LIMIT:g} with gated delta nets; with experts, whose choice rounding can change, of the median token).\n"
    )
    _rows(tell, "family", list(CHECKS), checks)
    tell("\nSabotages in float32: the error that gives them away. MISSED would be one that the check lets pass.\n")
    for dtype in LIMITS:
        if dtype != "float32":
            tell(f"\nThe same in {dtype}, where rounding does not hide them.\n")
        columns = [sabotage.what for sabotage in SABOTAGES if dtype in sabotage.dtypes]
        found = {
            name: {what: result for (what, kind), result in row.items() if kind == dtype}
            for name, row in faults.items()
        }
        _rows(tell, "family", columns, found, bad="MISSED")
    tell("\nWhat a config may ask for beside it.\n")
    _rows(tell, "feature", list(_FEATURE_CHECKS), features)


def _rows(
    tell: Callable[[str], None], first: str, columns: list[str], table: dict[str, dict[str, Result]], bad: str = "RED"
) -> None:
    width = max(len(first), *(len(name) for name in table))
    tell(f"| {first:{width}} | " + " | ".join(f"{column:>9}" for column in columns) + " |")
    tell(f"|{'-' * (width + 2)}|" + "|".join("-" * (max(len(column), 9) + 1) + ":" for column in columns) + "|")
    for name, row in table.items():
        cells = []
        for column in columns:
            result = row.get(column)
            text = "" if result is None else f"{'' if result.good else bad + ' '}{result.error:.1e}"
            cells.append(f"{text:>{max(len(column), 9)}}")
        tell(f"| {name:{width}} | " + " | ".join(cells) + " |")


def totals_of(
    checks: dict[str, dict[str, Result]],
    faults: dict[str, dict[tuple[str, str], Result]],
    features: dict[str, dict[str, Result]],
) -> dict[str, Any]:
    """green: families all of whose checks are good; sabotages_red: noticed ones, of each family and dtype."""
    every_fault = [result for row in faults.values() for result in row.values()]
    return {
        "families": len(checks),
        "green": sum(all(result.good for result in row.values()) for row in checks.values()),
        "checks": sum(len(row) for row in checks.values()),
        "checks_green": sum(result.good for row in checks.values() for result in row.values()),
        "sabotages": len(every_fault),
        "sabotages_red": sum(result.good for result in every_fault),
        "features": len(features),
        "features_green": sum(all(result.good for result in row.values()) for row in features.values()),
        "worst_float32": max(row["float32"].error for row in checks.values()),
        "worst_bfloat16": max(row["bfloat16"].error for row in checks.values()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def all_well(totals: dict[str, Any]) -> bool:
    pairs = (
        ("families", "green"),
        ("checks", "checks_green"),
        ("sabotages", "sabotages_red"),
        ("features", "features_green"),
    )
    return all(totals[of] == totals[well] > 0 for of, well in pairs)
