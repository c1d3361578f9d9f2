"""The node bundle: what runs on a node, in one tar named by its content.

It holds `dflash_tui/__init__.py`, `dflash_tui/node`, `backends` and the console's own `pynvml.py`, and `bundle.files`, a
list of `SIZE PATH` lines by which a node sees whether an unpacked bundle is still whole.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LISTING = "bundle.files"
HASH_LENGTH = 16
_BUILDING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Bundle:
    """data: a tar.gz. hash: the first 16 hex digits of the SHA-256 of the tar in it."""

    hash: str
    data: bytes


def node_bundle() -> Bundle:
    """The bundle of this install; the same files give the same hash. Raises OSError."""
    # `cache` alone lets every link that starts at the same moment build its own.
    with _BUILDING:
        return _built()


@cache
def _built() -> Bundle:
    return build_bundle(dict(_installed_files()))


def build_bundle(files: dict[str, bytes]) -> Bundle:
    """The bundle of `files` (path in the bundle -> content)."""
    listing = "".join(f"{len(data)} {path}\n" for path, data in sorted(files.items()))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, data in sorted({**files, LISTING: listing.encode()}.items()):
            entry = tarfile.TarInfo(path)  # time, owner and group stay 0: only the content counts
            entry.size = len(data)
            entry.mode = 0o600
            tar.addfile(entry, io.BytesIO(data))
    plain = buffer.getvalue()
    # The hash is of the plain tar: compressors of two consoles may differ.
    name = hashlib.sha256(plain).hexdigest()[:HASH_LENGTH]
    return Bundle(name, gzip.compress(plain, compresslevel=6, mtime=0))


def _installed_files() -> Iterator[tuple[str, bytes]]:
    console = _folder_of("dflash_tui")
    yield "dflash_tui/__init__.py", (console / "__init__.py").read_bytes()
    yield from _tree(console / "node", "dflash_tui/node")
    yield from _tree(_folder_of("backends"), "backends")
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin and Path(pynvml.origin).name == "pynvml.py":
        yield "pynvml.py", Path(pynvml.origin).read_bytes()


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {package} is not installed beside the console")
    return Path(spec.origin).parent


def _tree(folder: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            yield from _tree(path, f"{prefix}/{path.name}")
        elif path.is_file():
            yield f"{prefix}/{path.name}", path.read_bytes()
