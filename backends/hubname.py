"""Names of models and datasets on a hub, told apart from folders. Loads nothing but the standard library.

A model:    org/name, org/name@revision, or hf://org/name[@revision], which is never taken for a folder.
A dataset:  hf://datasets/org/name[@revision], then nothing (its split "train", or its only one), :SPLIT, or /PATH with * and ?.

What begins with /, . or ~ is always a path. What could be either is a folder where one of that name is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from backends.spec import CompareSpec, ExtractSpec, PrepareSpec, Spec, SpecError, VerifySpec

SCHEME = "hf://"
DATASETS = SCHEME + "datasets/"
_PATHS = ("/", ".", "~")
# The hub's own rule: letters, digits, _, - and ., not at the ends, none of the last two doubled.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[-.](?![-.]))*(?<![-.])"
_REVISION = r"(?:refs/[A-Za-z]+/)?[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_MODEL = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_./\-]*))?")
_DATASET = re.compile(
    rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?(?::(?P<split>[A-Za-z0-9_.\-]+)|/(?P<path>[^:]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """typed: as it was given. name: org/name. split, path: of a dataset, which of its files."""

    typed: str
    name: str
    revision: str | None = None
    kind: str = "model"
    split: str = ""
    path: str = ""

    @property
    def commit(self) -> str | None:
        """The revision where it is a whole commit hash: that needs nobody to be asked."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None


def model_name(text: str) -> HubName | None:
    """The name that a text is by its form; None for a path. Raises SpecError for one that begins with hf:// and is none."""
    if text.startswith(DATASETS):
        raise SpecError(f"model: {text!r} names a dataset; name a model as {SCHEME}org/name")
    found = _MODEL.fullmatch(text.removeprefix(SCHEME))
    if found is None or (not text.startswith(SCHEME) and text.startswith(_PATHS)):
        if text.startswith(SCHEME):
            raise SpecError(f"model: {text!r} is no name of a model; write it as {SCHEME}org/name or org/name@revision")
        return None
    return HubName(text, found["name"], found["revision"])


def wanted_model(text: str) -> HubName | None:
    """The name to look up on the hub; None where the text is a path, or a folder of that name is here. Raises SpecError."""
    name = model_name(text)
    return None if name is None or (not text.startswith(SCHEME) and Path(text).exists()) else name


def dataset_name(text: str) -> HubName | None:
    """The dataset that an input names; None for a path. Raises SpecError."""
    if not text.startswith(SCHEME):
        return None
    found = _DATASET.fullmatch(text.removeprefix(DATASETS)) if text.startswith(DATASETS) else None
    if found is None:
        raise SpecError(
            f"prepare: the input {text!r} is no name of a dataset; write {DATASETS}org/name, with :SPLIT or /PATH after it"
        )
    return HubName(text, found["name"], found["revision"], "dataset", found["split"] or "", found["path"] or "")


def uses_hub(spec: Spec) -> bool:
    """Whether a spec may need the hub, by the form of what it names: also what is a folder on the node. Raises SpecError."""
    if isinstance(spec, PrepareSpec) and any(dataset_name(text) is not None for text in spec.inputs):
        return True
    if isinstance(spec, VerifySpec) and (spec.model is None or not spec.recompute):
        return bool(spec.recompute)  # the manifest may name one
    model = spec.model if isinstance(spec, (ExtractSpec, CompareSpec, PrepareSpec, VerifySpec)) else None
    return model is not None and model_name(model) is not None
