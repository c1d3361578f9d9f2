"""Models and datasets by name: looked up on the hub, downloaded into its own cache, pinned to a commit. Loads no torch.

All of it goes by huggingface_hub, so that HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and the node's own login mean what they mean
everywhere. A download that was stopped goes on with the files that are not whole yet.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from backends import credentials
from backends.disk import free_bytes
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.huberrors import HubUnavailable, explain
from backends.hubfiles import dataset_files, model_files
from backends.hubname import HubName, dataset_name, model_name, wanted_model
from backends.progress import Progress
from backends.spec import CompareSpec, ExtractSpec, PrepareSpec, Spec, VerifySpec
from backends.template import TOKENIZER_FILES

# Where a spec has no floor of its own.
FLOOR_BYTES = 1 << 30
_ASK_S = 20.0
_POLL_S = 0.1
# How long a transfer may take to end by itself once it is to be stopped.
_STOP_S = 2.0
# Files at once: each is lost where the download is stopped, and Xet fetches one over several connections anyway.
_AT_ONCE = 4
_SNAPSHOT = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a name stands for now. files: those that are needed and their bytes; folder: where the cache has or will have them.

    note: why the hub's own word was done without, "" where it was asked.
    """

    name: HubName
    commit: str
    files: dict[str, int]
    folder: Path
    note: str = ""

    def missing(self) -> dict[str, int]:
        """The files that are not there in their size."""
        return {path: size for path, size in self.files.items() if _size(self.folder / path) != size}

    def paths(self) -> list[Path]:
        return [self.folder / path for path in sorted(self.files)]


def origin(model: Path) -> dict[str, str]:
    """`model_hub` and `model_commit` of a folder that is a snapshot in a hub's cache; {} for any other."""
    found = _SNAPSHOT.fullmatch("/".join(model.absolute().parts[-3:]))
    return {"model_hub": f"{found['org']}/{found['name']}", "model_commit": found["commit"]} if found else {}


def localised(spec: Spec, events: EventLog, should_stop: Callable[[], bool]) -> Spec:
    """The spec with folders and files in the place of names, downloaded where they are not in the cache.

    Raises JobError, SpecError and Interrupted.
    """
    floor = spec.min_free_bytes if isinstance(spec, (ExtractSpec, CompareSpec)) else FLOOR_BYTES

    def there(name: HubName, weights: bool, pinned: str | None) -> Snapshot:
        snapshot = stoppable(lambda: locate(name, weights=weights, pinned=pinned), should_stop, name)
        if snapshot.note:
            events.emit("warning", message=snapshot.note)
        fetch(snapshot, events, should_stop, floor)
        if pinned is None:
            _remember(snapshot)
        return snapshot

    wanted = wanted_by(spec)
    if wanted is not None:
        name, pinned = wanted
        folder = there(name, not isinstance(spec, PrepareSpec), pinned).folder
        spec = replace(spec, model=str(folder))  # type: ignore[call-arg]  # each spec that the hub is asked for has a model
    if isinstance(spec, PrepareSpec):
        inputs: list[str] = []
        for text in spec.inputs:
            dataset = dataset_name(text)
            inputs += [text] if dataset is None else map(str, there(dataset, False, None).paths())
        spec = replace(spec, inputs=tuple(inputs))
    return spec


def wanted_by(spec: Spec) -> tuple[HubName, str | None] | None:
    """The model that a spec names on the hub, and the commit that an earlier run of it went by. Raises SpecError."""
    if isinstance(spec, VerifySpec) and spec.model is None:
        header = _header(Path(spec.output)) if spec.recompute else {}
        # Of a model that is planned and not downloaded the config is there.
        if "model_hub" not in header or _looks_whole(Path(str(header.get("model"))), weights=True):
            return None
        name = model_name(f"{header['model_hub']}@{header.get('model_commit')}")
        return None if name is None else (name, name.commit)
    if not isinstance(spec, (ExtractSpec, CompareSpec, PrepareSpec, VerifySpec)) or spec.model is None:
        return None
    if isinstance(spec, VerifySpec) and not spec.recompute:
        return None  # then the model is not looked at
    name = wanted_model(spec.model)
    if name is None:
        return None
    # Samples of one folder are of one commit, also where the hub's branch has moved since.
    header = {} if isinstance(spec, PrepareSpec) or name.revision else _header(Path(spec.output))
    return name, str(header["model_commit"]) if header.get("model_hub") == name.name else None


def _header(output: Path) -> dict[str, Any]:
    try:
        with (output / "manifest.jsonl").open(encoding="utf-8") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) and isinstance(header.get("model_commit"), str) else {}


def known_fingerprint(output: Path, model: Path) -> str | None:
    """The fingerprint of a model that is not downloaded, where an earlier run into `output` went by the same commit."""
    header = _header(output)
    same = header and all(header.get(key) == value for key, value in origin(model).items())
    return header.get("model_fingerprint") if same else None


def locate(name: HubName, *, weights: bool, pinned: str | None = None) -> Snapshot:
    """Asks the hub what a name stands for; a whole commit that the cache has needs no asking. Raises JobError.

    weights: of a model, whether its weights are needed. Where the hub cannot be asked, a whole copy in the cache is taken.
    """
    import huggingface_hub

    commit = pinned or name.commit
    cached = _in_cache(name, commit, weights) if commit else None
    if cached is not None:
        return cached
    try:
        api = huggingface_hub.HfApi(token=credentials.hf_token())
        info = api.repo_info(
            name.name, repo_type=name.kind, revision=commit or name.revision, timeout=_ASK_S, files_metadata=True
        )
    except Exception as error:  # the library and its transport raise what they like
        problem = explain(error, name, credentials.hf_token() is not None)
        cached = _in_cache(name, commit, weights) if isinstance(problem, HubUnavailable) else None
        if cached is None:
            raise problem from error
        return replace(cached, note=f"{problem.message}: the copy in the cache is used, commit {cached.commit[:12]}")
    sizes = {item.rfilename: item.size or 0 for item in getattr(info, "siblings", None) or ()}
    return Snapshot(name, str(info.sha), _wanted(name, sizes, weights), _folder(name, str(info.sha)))


def _wanted(name: HubName, sizes: dict[str, int], weights: bool) -> dict[str, int]:
    return model_files(name, sizes, weights=weights) if name.kind == "model" else dataset_files(name, sizes)


def cache() -> Path:
    """Where the hub's files are on this machine."""
    from huggingface_hub import constants

    return Path(os.path.expanduser(constants.HF_HUB_CACHE))


def _repository(name: HubName) -> Path:
    return cache() / f"{name.kind}s--{name.name.replace('/', '--')}"


def _folder(name: HubName, commit: str) -> Path:
    return _repository(name) / "snapshots" / commit


def _in_cache(name: HubName, commit: str | None, weights: bool) -> Snapshot | None:
    """The snapshot where the cache has all of it; by the listing that the library kept, else by the index of the weights."""
    import huggingface_hub

    if commit is None:
        try:
            commit = (_repository(name) / "refs" / (name.revision or "main")).read_text().strip()
        except OSError:
            return None
    folder = _folder(name, commit)
    try:
        tree = huggingface_hub.get_cached_repo_tree(name.name, repo_type=name.kind, revision=commit)
    except Exception:  # an older library has no such listing, and a copied cache may lack it
        if name.kind != "model" or not _looks_whole(folder, weights):
            return None
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    else:
        sizes = {file.path: file.size for file in tree}
    try:
        snapshot = Snapshot(name, commit, _wanted(name, sizes, weights), folder)
    except JobError:
        return None
    return None if snapshot.missing() else snapshot


def _looks_whole(folder: Path, weights: bool) -> bool:
    if not weights:
        return any((folder / name).is_file() for name in TOKENIZER_FILES)
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files = set(index["weight_map"].values())
    except FileNotFoundError:
        files = {"model.safetensors"}
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in {"config.json", *files})


def _remember(snapshot: Snapshot) -> None:
    """Writes down in the cache which commit a branch is at, so that its name means something without a network too."""
    name = snapshot.name
    file = _repository(name) / "refs" / (name.revision or "main")
    if name.commit is not None or snapshot.note:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.write_text(snapshot.commit)
        draft.rename(file)
    except OSError:
        return  # a cache that others own can be read all the same


def fetch(snapshot: Snapshot, events: EventLog, should_stop: Callable[[], bool], floor: int) -> None:
    """Downloads what is missing, with progress in bytes. Raises JobError and Interrupted; files that are whole are kept."""
    missing = snapshot.missing()
    if not missing:
        return
    need, total = sum(missing.values()), sum(snapshot.files.values())
    name = snapshot.name
    check_room(snapshot.folder, need, floor, name.name)
    events.emit("phase", phase=f"downloading {name.name}, commit {snapshot.commit[:12]}: {need:,} bytes")
    progress = Progress(events, total=total, already_done=total - need, unit="bytes")
    progress.phase = f"downloading {name.name}"
    from backends.hubtransfer import Transfer

    transfer = Transfer()

    def tick() -> None:
        new = min(transfer.bytes, need) - progress.bytes
        if new > 0:
            progress.add(samples=new, tokens=0, nbytes=new)
        progress.tell()

    def download() -> None:
        try:
            transfer.run(name, snapshot.commit, _repository(name), list(missing), _AT_ONCE)
        except Exception as error:  # as above
            if transfer.stopped:
                return
            raise explain(error, name, credentials.hf_token() is not None) from error

    try:
        stoppable(download, should_stop, name, tick=tick, stop=transfer.stop)
    except Interrupted:
        transfer.remove_partial(_repository(name))
        have = total - sum(snapshot.missing().values())
        raise Interrupted(
            f"stopped while downloading {name.name}, with {have:,} of {total:,} bytes; files that are whole are kept",
            0,
            0,
        ) from None
    left = snapshot.missing()
    if left:
        raise HubUnavailable(
            f"{name.name} did not arrive whole: {next(iter(left))} has not its {left[next(iter(left))]:,} bytes",
            "run it again: only what is missing is downloaded",
        )
    tick()
    progress.tell(now=True)


def fetch_small(snapshot: Snapshot, files: list[str]) -> None:
    """Downloads some small files of a snapshot, without progress. Raises JobError."""
    import huggingface_hub

    name = snapshot.name
    for path in files:
        try:
            huggingface_hub.hf_hub_download(
                name.name, path, repo_type=name.kind, revision=snapshot.commit, token=credentials.hf_token()
            )
        except Exception as error:  # as above
            raise explain(error, name, credentials.hf_token() is not None) from error


def check_room(folder: Path, need: int, floor: int, what: str) -> None:
    """Raises JobError where a disk has no room for so many bytes above the floor."""
    free = free_bytes(folder)
    if free - need < floor:
        raise JobError(
            f"{need:,} bytes of {what} are to be downloaded, and the disk of the hub's cache {cache()} has room for"
            f" {max(free - floor, 0):,} above the floor of {floor:,}",
            "free some space, or set HF_HOME to a folder on another disk",
        )


def stoppable(
    call: Callable[[], Result],
    should_stop: Callable[[], bool],
    name: HubName,
    *,
    tick: Callable[[], None] = lambda: None,
    stop: Callable[[], None] = lambda: None,
    limit_s: float | None = None,
) -> Result:
    """The result of a call that waits for the network, in a thread that nobody waits for once it is to stop.

    Raises what the call raises, Interrupted, and HubUnavailable past `limit_s`.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=run, daemon=True, name="hub")
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if should_stop():
            stop()
            thread.join(_STOP_S)
            raise Interrupted(f"stopped while asking for {name.name}", 0, 0)
        if limit_s is not None and time.monotonic() - began > limit_s and thread.is_alive():
            raise HubUnavailable(f"the hub did not answer within {limit_s:g} s about {name.name}", "try again")
        tick()
    if errors:
        raise errors[0]
    return results[0]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
