"""Whether two model folders hold the same weights, without reading tens of gigabytes. Loads no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from backends.errors import JobError, one_line

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_PIECES = 32
_PIECE_BYTES = 1 << 16


def model_fingerprint(model: Path) -> str:
    """32 hex digits that change with config.json and the weights, and not with the folder's place.

    Covers config.json, and of each weight file the name, the size and 32 pieces of 64 KiB spread evenly: training moves
    every weight, so no piece stays the same. Raises JobError where the folder has no weights.
    """
    files = sorted(path for pattern in _WEIGHTS for path in model.glob(pattern))
    if not files:
        raise JobError(f"the model folder {model} has no weights", "add its *.safetensors files")
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update((model / "config.json").read_bytes())
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            step = max((size - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES)
            with path.open("rb") as file:
                for begin in range(0, size, step):
                    file.seek(begin)
                    digest.update(file.read(_PIECE_BYTES))
    except OSError as error:
        raise JobError(f"the model {model} cannot be read: {one_line(error)}", "mend its permissions") from None
    return digest.hexdigest()
