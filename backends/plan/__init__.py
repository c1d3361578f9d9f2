"""What a job would do, and whether it can, answered before anything is loaded. Loads no torch."""

from __future__ import annotations

from typing import Any

from backends.environment import require_packages, torchvision_warnings, versions
from backends.errors import JobError
from backends.plan.compare import plan_compare
from backends.plan.download import looked_up
from backends.plan.export import plan_export
from backends.plan.extract import plan_extract
from backends.plan.parity import plan_parity
from backends.plan.prepare import plan_prepare
from backends.plan.questions import capabilities, vllm_options
from backends.plan.verify import plan_verify
from backends.questions import CapabilitiesSpec, VllmOptionsSpec
from backends.spec import CompareSpec, ExportSpec, ExtractSpec, ParitySpec, PrepareSpec, Spec, SpecError, VerifySpec


def refusal(message: str, remedy: str) -> dict[str, Any]:
    """The answer of a plan that cannot be."""
    return {"ok": False, "error": message, "remedy": remedy or None, "warnings": []}


def plan(spec: Spec) -> dict[str, Any]:
    """Whether a job can run on this machine with this Python, and its facts. Never raises for what is the user's."""
    try:
        spec, inputs, pending = looked_up(spec)
        if isinstance(spec, ExtractSpec):
            return pending.over(plan_extract(spec, pending).answer())
        if isinstance(spec, CompareSpec):
            return pending.over(plan_compare(spec, pending).answer())
        if isinstance(spec, PrepareSpec):
            facts, warnings = plan_prepare(spec, inputs, pending)
        elif isinstance(spec, VerifySpec):
            facts, warnings = plan_verify(spec)
        elif isinstance(spec, ParitySpec):
            facts, warnings = plan_parity(spec)
        elif isinstance(spec, ExportSpec):
            facts, warnings = plan_export(spec)
        elif isinstance(spec, CapabilitiesSpec):
            facts, warnings = capabilities(spec)
        elif isinstance(spec, VllmOptionsSpec):
            facts, warnings = vllm_options(spec), []
        else:
            require_packages()
            facts, warnings = {"versions": versions()}, torchvision_warnings()
    except JobError as error:
        return refusal(error.message, error.remedy)
    except SpecError as error:
        return refusal(str(error), "")
    return pending.over({"ok": True, "error": None, "remedy": None, "warnings": warnings, **facts})
