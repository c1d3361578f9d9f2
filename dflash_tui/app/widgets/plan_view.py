"""What a plan says, as lines: the facts, or the refusal with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from textual.content import Content

from dflash_tui.app.fields import BESIDE
from dflash_tui.app.widgets.job_detail import plain
from dflash_tui.app.widgets.labelled import labelled
from dflash_tui.app.widgets.vllm_view import server_lines, vllm_lines
from dflash_tui.fleet import format as fmt

LABEL_WIDTH = 18


def plan_content(plan: Mapping[str, Any], width: int = 80) -> Content:
    """A plan for `width` columns: its verdict first, then its warnings, then the facts that it has (a refusal may have some too)."""
    lines: list[Content] = []
    if plan.get("ok"):
        lines.append(Content.assemble(("This can run.", "bold $text-success")))
    else:
        lines += refusal_lines(str(plan.get("error") or "the node refused it"), str(plan.get("remedy") or ""))
    warnings = plan.get("warnings")
    if isinstance(warnings, list):
        lines += [Content.assemble(("warning: ", "$text-warning"), fmt.one_line(str(line))) for line in warnings]
    lines += vllm_lines(plan, label_width=LABEL_WIDTH, width=width)
    lines += [labelled(label, text, label_width=LABEL_WIDTH, width=width) for label, text in plan_facts(plan)]
    lines += server_lines(plan, width=width)
    return Content("\n").join(lines)


def refusal_content(error: str, remedy: str = "") -> Content:
    return Content("\n").join(refusal_lines(error, remedy))


def refusal_lines(error: str, remedy: str) -> list[Content]:
    lines = [Content.assemble(("! ", "bold $text-error"), (fmt.one_line(error), "$text-error"))]
    if remedy:
        lines.append(Content.assemble(("remedy: ", "bold"), fmt.one_line(remedy)))
    return lines


def plan_facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts of the facts, those that we know first and in our words."""
    facts: list[tuple[str, str]] = []
    for label, keys, text in _KNOWN:
        if all(plan.get(key) is not None for key in keys):
            facts.append((label, text(plan)))
    known = {"ok", "error", "remedy", "warnings", "vllm"}.union(*(keys for _, keys, _ in _KNOWN), _ALSO)
    facts += [
        (key.replace("_", " "), fmt.size(value) if key.endswith("bytes") and isinstance(value, int) else plain(value))
        for key, value in plan.items()
        if key not in known and value is not None
    ]
    return facts


def _sides(plan: Mapping[str, Any]) -> str:
    """Of a comparison: what each backend gets."""
    sides = plan["sides"]
    if not isinstance(sides, Mapping):
        return plain(sides)
    return "; ".join(f"{name} {_side(side)}" for name, side in sides.items() if isinstance(side, Mapping))


def _side(side: Mapping[str, Any]) -> str:
    workers, gpus = side.get("workers"), side.get("gpus") or ()
    device = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}" if gpus else str(side.get("device") or fmt.NOT_AVAILABLE)
    memory = side.get("memory_bytes_per_worker")
    each = f", {fmt.size(memory)} of memory each" if isinstance(memory, int) else ""
    packing = f", {side['packing']}" if side.get("packing") else ""
    return f"{plain(workers)} on {device}{each}{packing}"


def _whole(plan: Mapping[str, Any]) -> str:
    tokens = plan.get("whole_dataset_tokens")
    of = f" of {tokens:,} tokens" if isinstance(tokens, int) else ""
    return f"{fmt.count(plan['whole_dataset_samples'])} samples{of}"


def _model(plan: Mapping[str, Any]) -> str:
    return f"{plan['family']}, {plain(plan['num_layers'])} layers, hidden size {plain(plan['hidden_size'])}"


def _layers(plan: Mapping[str, Any]) -> str:
    dtype, stored = plan.get("dtype"), plan.get("file_dtype")
    computed = f" in {dtype}" if dtype else ""
    return f"{plain(plan['layer_ids'])}{computed}" + (f", files in {stored}" if stored not in (None, dtype) else "")


def _samples(plan: Mapping[str, Any]) -> str:
    done = plan.get("already_done")
    text = f"{plan['samples']:,}" if isinstance(plan["samples"], int) else plain(plan["samples"])
    tokens = plan.get("tokens")
    text += f" of {tokens:,} tokens" if isinstance(tokens, int) else ""
    return text + (f", {done:,} done already" if isinstance(done, int) and done else "")


def _bytes(plan: Mapping[str, Any]) -> str:
    per_token = plan.get("bytes_per_token")
    each = f" ({per_token:,} bytes a token)" if isinstance(per_token, int) else ""
    return f"{fmt.size(plan['bytes_total'])}{each}"


def _disk(plan: Mapping[str, Any]) -> str:
    fit = plan.get("samples_that_fit")
    room = f", room for {fit:,} samples" if isinstance(fit, int) else ""
    return f"{fmt.size(plan['disk_free_bytes'])} free{room}"


def _download(plan: Mapping[str, Any]) -> str:
    free = plan.get("download_free_bytes")
    room = f", {fmt.size(free)} free for it" if isinstance(free, int) and plan["download_bytes"] else ""
    size = fmt.size(plan["download_bytes"]) if plan["download_bytes"] else "nothing, all of it is there"
    return f"{size}{room} ({plain(plan['hub'])})"


def _workers(plan: Mapping[str, Any]) -> str:
    memory = plan.get("memory_bytes_per_worker")
    each = f", {fmt.size(memory)} of memory each" if isinstance(memory, int) else ""
    return f"{plain(plan['workers'])} on {plan.get('device') or fmt.NOT_AVAILABLE}{each}"


def _versions(plan: Mapping[str, Any]) -> str:
    versions = plan["versions"]
    if not isinstance(versions, Mapping):
        return plain(versions)
    return ", ".join(f"{name} {plain(value)}" for name, value in versions.items() if value)


_KNOWN: tuple[tuple[str, tuple[str, ...], Callable[[Mapping[str, Any]], str]], ...] = (
    ("model", ("family", "num_layers", "hidden_size"), _model),
    ("layer ids", ("layer_ids",), _layers),
    ("samples", ("samples",), _samples),
    ("bytes to write", ("bytes_total",), _bytes),
    ("download", ("hub", "download_bytes"), _download),
    ("disk", ("disk_free_bytes",), _disk),
    ("workers", ("workers",), _workers),
    ("packing", ("packing",), lambda plan: plain(plan["packing"])),
    ("backends run", ("together",), lambda plan: BESIDE[bool(plan["together"])]),
    ("workers", ("sides",), _sides),
    ("whole dataset", ("whole_dataset_samples",), _whole),
    ("versions", ("versions",), _versions),
)
_ALSO = (
    "dtype",
    "file_dtype",
    "already_done",
    "tokens",
    "bytes_per_token",
    "samples_that_fit",
    "device",
    "memory_bytes_per_worker",
    "download_files",
    "download_free_bytes",
    "whole_dataset_tokens",
)
