"""What a job would download, for its plan: sizes and small files only, never weights. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backends import hub
from backends.disk import existing, free_bytes
from backends.environment import require_packages
from backends.errors import JobError
from backends.hubname import HubName, dataset_name, uses_hub
from backends.spec import CompareSpec, ExtractSpec, PrepareSpec, Spec

# What a plan reads of a model: shape and template. A tokenizer itself may be of many megabytes.
_READ = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
# Of the whole of it, all that is asked for.
_LIMIT_S = 60.0


@dataclass(slots=True)
class Pending:
    """What is not in the cache yet.

    bytes, files: to be downloaded. model: whether some of the model is, and `names` what its folder will hold then.
    inputs, input_bytes: of datasets, files that are not here yet. folder: where the cache is, or will be.
    """

    bytes: int = 0
    files: int = 0
    model: bool = False
    names: frozenset[str] = frozenset()
    inputs: int = 0
    input_bytes: int = 0
    folder: Path | None = None
    found: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problem: JobError | None = None

    def add(self, snapshot: hub.Snapshot) -> None:
        missing = snapshot.missing()
        self.found.append(f"{snapshot.name.name}@{snapshot.commit}")
        self.bytes += sum(missing.values())
        self.files += len(missing)
        self.folder = snapshot.folder
        if snapshot.note:
            self.warnings.append(snapshot.note)

    def on_disk_of(self, folder: Path) -> int:
        """The bytes of the download that will be written to the disk of a folder."""
        if self.folder is None:
            return 0
        same = existing(self.folder).stat().st_dev == existing(folder).stat().st_dev
        return self.bytes if same else 0

    def over(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A plan's answer with what is known of the download."""
        answer = {**answer, "warnings": [*self.warnings, *answer["warnings"]], **self.facts()}
        if self.problem is not None:
            answer |= {"ok": False, "error": self.problem.message, "remedy": self.problem.remedy}
        return answer

    def facts(self) -> dict[str, Any]:
        """The fields that a plan's answer has more; {} where the spec names nothing on a hub."""
        if self.folder is None:
            return {}
        return {
            "hub": self.found,
            "download_bytes": self.bytes,
            "download_files": self.files,
            "download_free_bytes": free_bytes(self.folder),
        }


def looked_up(spec: Spec) -> tuple[Spec, tuple[str, ...], Pending]:
    """The spec with folders in the place of names, the inputs of a prepare that are here already, and what is not.

    Raises JobError and SpecError. A disk without room for the download is the `problem` of what is pending.
    """
    pending = Pending()
    inputs = spec.inputs if isinstance(spec, PrepareSpec) else ()
    if not uses_hub(spec):
        return spec, inputs, pending
    require_packages()
    floor = spec.min_free_bytes if isinstance(spec, (ExtractSpec, CompareSpec)) else hub.FLOOR_BYTES
    wanted = hub.wanted_by(spec)
    if wanted is not None:
        name, pinned = wanted
        weights = not isinstance(spec, PrepareSpec)
        snapshot = _ask(name, lambda: hub.locate(name, weights=weights, pinned=pinned))
        pending.add(snapshot)
        pending.model = bool(snapshot.missing())
        pending.names = frozenset(snapshot.files)
        small = [path for path in snapshot.missing() if path in _READ[: 1 if weights else None]]
        if small:
            _ask(name, lambda: hub.fetch_small(snapshot, small))
        spec = replace(spec, model=str(snapshot.folder))  # type: ignore[call-arg]  # each spec that the hub is asked for has a model
    here: list[str] = []
    for text in inputs:
        dataset = dataset_name(text)
        if dataset is None:
            here.append(text)
            continue
        snapshot = _ask(dataset, lambda named=dataset: hub.locate(named, weights=False))
        pending.add(snapshot)
        missing = snapshot.missing()
        here += [str(snapshot.folder / path) for path in sorted(snapshot.files) if path not in missing]
        pending.inputs += len(missing)
        pending.input_bytes += sum(missing.values())
    if pending.folder is not None and pending.bytes:
        try:
            hub.check_room(
                pending.folder, pending.bytes, floor, ", ".join(name.split("@")[0] for name in pending.found)
            )
        except JobError as error:
            pending.problem = error
    return spec, tuple(here), pending


def _ask(name: HubName, call: Any) -> Any:
    return hub.stoppable(call, lambda: False, name, limit_s=_LIMIT_S)
