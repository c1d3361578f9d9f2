"""What an export would write, and whether the disk holds it. Loads no torch."""

from __future__ import annotations

from typing import Any

from backends.disk import free_bytes
from backends.environment import require_packages, versions
from backends.errors import JobError
from backends.plan.output import check_output
from backends.spec import ExportSpec


def plan_export(spec: ExportSpec) -> tuple[dict[str, Any], list[str]]:
    """The facts and warnings of an export. Raises JobError where it cannot be."""
    require_packages()
    from backends.export import Source
    from backends.specforge import check_described

    source = Source.open(spec)
    check_output(source.to)
    begun = check_described(source.to, source.described)
    todo = [entry for entry in source.entries if not (begun and source.path(entry.row).is_file())]
    todo_bytes = sum(map(source.file_bytes, todo))
    free = free_bytes(source.to)
    room = max(free - spec.min_free_bytes, 0)
    if todo_bytes > room:
        raise JobError(
            f"{todo_bytes:,} bytes are to be written to {source.to}, and its disk has room for {room:,}"
            f" above the floor of {spec.min_free_bytes:,}",
            "free some space, or give a folder on another disk",
        )
    return {
        "samples": len(source.entries),
        "tokens": sum(entry.tokens for entry in source.entries),
        "bytes_total": sum(map(source.file_bytes, source.entries)),
        "already_done": len(source.entries) - len(todo),
        "not_extracted": len(source.dataset) - len(source.entries),
        "disk_free_bytes": free,
        "layer_ids": list(source.layout.layer_ids),
        "target_layer_ids": list(source.layout.target_layer_ids),
        "dtype": source.layout.dtype,
        "versions": versions(),
    }, []
