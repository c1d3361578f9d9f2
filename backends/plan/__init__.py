"""What a job would do, and whether it can, answered before anything is loaded. Loads no torch."""

from __future__ import annotations

from typing import Any

from backends.environment import require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.plan.extract import plan_extract
from backends.plan.prepare import plan_prepare
from backends.plan.verify import plan_verify
from backends.spec import ExtractSpec, PrepareSpec, Spec, SpecError, VerifySpec


def refusal(message: str, remedy: str) -> dict[str, Any]:
    """The answer of a plan that cannot be."""
    return {"ok": False, "error": message, "remedy": remedy or None, "warnings": []}


def plan(spec: Spec) -> dict[str, Any]:
    """Whether a job can run on this machine with this Python, and its facts. Never raises for what is the user's."""
    try:
        if isinstance(spec, ExtractSpec):
            return plan_extract(spec).answer()
        if isinstance(spec, PrepareSpec):
            facts, warnings = plan_prepare(spec)
        elif isinstance(spec, VerifySpec):
            facts, warnings = plan_verify(spec)
        else:
            require_packages()
            facts, warnings = {"versions": versions()}, torchvision_warnings()
    except JobError as error:
        return refusal(error.message, error.remedy)
    except SpecError as error:
        return refusal(str(error), "")
    return {"ok": True, "error": None, "remedy": None, "warnings": warnings, **facts}
