"""Which files of a repository are needed. Loads nothing but the standard library."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from backends.errors import JobError
from backends.hubname import HubName

_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_TABLES = (".parquet", ".jsonl", ".json")
# What describes a dataset and is none of its rows.
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"(?P<split>.+?)[-_.]\d{4,}(?:-of-\d+)?")


def model_files(name: HubName, sizes: Mapping[str, int], *, weights: bool) -> dict[str, int]:
    """Config, tokenizer and chat templates of a model, and its weights once: in safetensors where there are some.

    sizes: bytes of every file of the repository. Raises JobError where it is no model of Transformers.
    """
    if "config.json" not in sizes:
        raise JobError(
            f"the hub's model {name.name} has no config.json",
            "name a repository of Transformers weights, not of GGUF ones",
        )
    top = [path for path in sizes if "/" not in path]
    wanted = [path for path in top if path.endswith(_SMALL)]
    wanted += [path for path in sizes if fnmatch.fnmatch(path, "additional_chat_templates/*.jinja")]
    tensors = [path for path in top if path.endswith(".safetensors")]
    # A repository may hold the same weights a second time, in another project's layout (consolidated.safetensors).
    tensors = [path for path in tensors if path.startswith("model")] or tensors
    if tensors:
        wanted = [path for path in wanted if not path.endswith(".bin.index.json")]
    if weights:
        chosen = tensors or [path for path in top if fnmatch.fnmatch(path, "pytorch_model*.bin")]
        if not chosen:
            raise JobError(
                f"the hub's model {name.name} has no weights that Transformers reads",
                "name one with *.safetensors files",
            )
        wanted += chosen
    return {path: sizes[path] for path in sorted(set(wanted))}


def dataset_files(name: HubName, sizes: Mapping[str, int]) -> dict[str, int]:
    """The files of a dataset that a name stands for: of its path, of its split, else of "train" or of its only split.

    A file's split is what its name has before the number of the shard, or its folder's name. Of several formats that a split
    is kept in the first of Parquet, JSONL and JSON is taken. Raises JobError.
    """
    tables = {
        path: size
        for path, size in sizes.items()
        if path.endswith(_TABLES) and PurePosixPath(path).name not in _NO_ROWS and not path.startswith(".")
    }
    if name.path:
        pattern = name.path.rstrip("/")
        found = {
            path: size
            for path, size in tables.items()
            if fnmatch.fnmatchcase(path, pattern) or path.startswith(f"{pattern}/")
        }
        if not found:
            raise JobError(f"the hub's dataset {name.name} has no {name.path} in Parquet or JSON", _there_are(tables))
        return found
    if not tables:
        raise JobError(
            f"the hub's dataset {name.name} has no file in Parquet, JSONL or JSON",
            f"try its converted copy: hf://datasets/{name.name}@refs/convert/parquet",
        )
    splits: dict[str, dict[str, int]] = {}
    for path, size in tables.items():
        splits.setdefault(_split(path), {})[path] = size
    wanted = name.split or ("train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else "")
    if wanted not in splits:
        remedy = f"there are: {', '.join(sorted(splits)[:12])}; write hf://datasets/{name.name}:SPLIT, or /PATH"
        what = f"has no split {wanted!r}" if wanted else "has several splits"
        raise JobError(f"the hub's dataset {name.name} {what}", remedy)
    found = splits[wanted]
    ending = next(end for end in _TABLES if any(path.endswith(end) for path in found))
    folders = {str(PurePosixPath(path).parent) for path in found if path.endswith(ending)}
    if len(folders) > 1:
        paths = ", ".join(sorted(folders)[:12])
        raise JobError(
            f"the hub's dataset {name.name} has its split {wanted!r} in several folders ({paths})",
            f"name one: hf://datasets/{name.name}/FOLDER/{wanted}*",
        )
    return {path: size for path, size in found.items() if path.endswith(ending)}


def _split(path: str) -> str:
    file = PurePosixPath(path)
    shard = _SHARD.fullmatch(file.stem)
    if shard:
        return shard["split"]
    # 0000.parquet in a folder that is called as the split is
    return file.parent.name if file.stem.isdecimal() and file.parent.name else file.stem


def _there_are(tables: Mapping[str, int]) -> str:
    return f"there are: {', '.join(sorted(tables)[:8])}" if tables else "it has no file in Parquet, JSONL or JSON"
