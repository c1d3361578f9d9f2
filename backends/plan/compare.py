"""What a comparison would do, and whether both backends can. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backends.compare.folder import earlier, held_bytes
from backends.environment import versions
from backends.errors import JobError
from backends.plan.download import Pending
from backends.plan.extract import ExtractPlan, plan_extract
from backends.spec import BACKENDS, CompareSpec, ExtractSpec

# Facts of a side's plan that both have in common.
_COMMON = ("layer_ids", "num_layers", "hidden_size", "family", "dtype", "bytes_per_token", "samples", "tokens")
_RESTARTS = 1
_OF_A_SIDE = ("workers", "device", "packing", "memory_bytes_per_worker")


@dataclass(slots=True)
class ComparePlan:
    """specs: each side's extraction, with its GPUs. problem: why it cannot be, where its facts are known all the same."""

    spec: CompareSpec
    specs: dict[str, ExtractSpec]
    sides: dict[str, ExtractPlan]
    anew: bool
    problem: JobError | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return len(self.sides["hf"].rows)

    @property
    def tokens(self) -> int:
        return self.sides["hf"].tokens

    @property
    def whole(self) -> tuple[int, int]:
        """Samples and tokens of the whole dataset."""
        lengths = self.sides["hf"].lengths
        return len(lengths), sum(lengths)

    def answer(self) -> dict[str, Any]:
        answers = {name: side.answer() for name, side in self.sides.items()}
        samples, tokens = self.whole
        return {
            "ok": self.problem is None,
            "error": self.problem.message if self.problem else None,
            "remedy": self.problem.remedy if self.problem else None,
            "warnings": self.warnings,
            **{name: answers["hf"][name] for name in _COMMON},
            "bytes_total": sum(answer["bytes_total"] for answer in answers.values()),
            "disk_free_bytes": answers["hf"]["disk_free_bytes"],
            "together": self.spec.together,
            "whole_dataset_samples": samples,
            "whole_dataset_tokens": tokens,
            "sides": {
                name: {
                    "gpus": list(self.specs[name].gpus),
                    **{fact: answer[fact] for fact in _OF_A_SIDE},
                }
                for name, answer in answers.items()
            },
            **({"vllm": answers["vllm"]["vllm"]} if "vllm" in answers["vllm"] else {}),
            "versions": versions(),
        }


def plan_compare(spec: CompareSpec, pending: Pending | None = None) -> ComparePlan:
    """Checks both sides and the output folder. Raises JobError and SpecError; what still has facts is its `problem`."""
    output = Path(spec.output)
    anew = earlier(output)
    warnings: list[str] = []
    gpus = _gpus_of_sides(spec, warnings)
    specs: dict[str, ExtractSpec] = {}
    sides: dict[str, ExtractPlan] = {}
    for name in BACKENDS:
        # What dies again and again is not to be measured.
        specs[name] = replace(spec.side(name), gpus=gpus[name], worker_restarts=_RESTARTS)
        specs[name] = replace(specs[name], last=_last(spec, warnings if name == "hf" else []))
        # What an earlier comparison left in the side's own folder is taken away first.
        place = output / (f".{name}" if (output / name).exists() else name)
        sides[name] = plan_extract(replace(specs[name], output=str(place)), pending)
        specs[name] = replace(specs[name], layers=sides[name].layer_ids)
    found = ComparePlan(spec, specs, sides, anew, warnings=warnings)
    found.warnings += _warnings(sides, "hf", "vllm")
    if anew:
        found.warnings.append(f"the earlier comparison in {output} is taken away, with what it kept, and done anew")
    found.problem = _problem(found, held_bytes(output) if anew else 0)
    return found


def _gpus_of_sides(spec: CompareSpec, warnings: list[str]) -> dict[str, tuple[str, ...]]:
    """The GPUs of each side. Raises JobError."""
    if not spec.together:
        return dict.fromkeys(BACKENDS, spec.gpus)
    if not spec.gpus:
        if spec.device == "cuda":
            raise JobError("together needs GPUs for each side, and none were chosen", "choose an even number of GPUs")
        warnings.append(
            "both backends work at a time on the same CPU: each takes the other's cores, so trust no figure"
        )
        return dict.fromkeys(BACKENDS, ())
    if len(spec.gpus) % 2:
        raise JobError(
            f"together gives each side half of the GPUs, and {len(spec.gpus)} cannot be halved",
            "choose an even number of GPUs, or leave out together",
        )
    middle = len(spec.gpus) // 2
    first, second = spec.gpus[:middle], spec.gpus[middle:]
    if len(second) % spec.tensor_parallel:
        raise JobError(
            f"together leaves {len(second)} GPUs to vLLM, which are no whole groups of tensor_parallel"
            f" {spec.tensor_parallel}",
            "choose twice a multiple of it, or leave out together",
        )
    return dict(zip(BACKENDS, (first, second), strict=True))


def _last(spec: CompareSpec, warnings: list[str]) -> int | None:
    """Where the samples end: a dataset that has fewer is compared as a whole. Raises JobError."""
    from backends.environment import require_packages

    require_packages()
    from backends.dataset import PreparedDataset

    rows = len(PreparedDataset(spec.dataset))
    if spec.first < rows < spec.first + spec.samples:
        of = f"from row {spec.first} on the dataset has" if spec.first else "the dataset has"
        warnings.append(f"{of} {rows - spec.first} samples, fewer than {spec.samples}: all of them are compared")
        return None
    return spec.first + spec.samples


def _warnings(sides: dict[str, ExtractPlan], *names: str) -> list[str]:
    """Each side's, with its name where the other does not say the same."""
    found: list[str] = []
    for name in names:
        for line in sides[name].warnings:
            others = [other for other in names if other != name and line in sides[other].warnings]
            found.append(line if others else f"{name}: {line}")
    return list(dict.fromkeys(found))


def _problem(found: ComparePlan, freed: int) -> JobError | None:
    vllm = found.sides["vllm"].problem
    if vllm is not None and (found.sides["vllm"].vllm or {}).get("ok") is False:
        alone = "the hf backend can extract it: `dflash-tui launch --backend hf`"
        remedy = f"{vllm.remedy}; {alone}" if vllm.remedy else alone
        return JobError(f"vLLM cannot be compared: {vllm.message}", remedy)
    size = sum(side.todo_bytes for side in found.sides.values())
    spec = found.spec
    room = max(found.sides["hf"].disk_free_bytes + freed - spec.min_free_bytes, 0)
    if size > room:
        fit = _fitting(found, room)
        fewer = f"compare fewer samples ({fit} fit)" if fit else "free some space"
        return JobError(
            f"both sides together write {size:,} bytes to {spec.output}, and its disk has room for {room:,}"
            f" above the floor of {spec.min_free_bytes:,}",
            f"{fewer}, choose fewer layers, or give a folder on another disk",
        )
    if freed and size <= room:
        return None
    return found.sides["hf"].problem or vllm


def _fitting(found: ComparePlan, room: int) -> int:
    """How many samples both sides have room for."""
    each: Callable[[int], int] = lambda row: sum(s.lengths[row] * s.bytes_per_token for s in found.sides.values())  # noqa: E731 - a name with a type, for what is a line
    size = count = 0
    for row in found.sides["hf"].rows:
        size += each(row)
        count += size <= room
    return count
