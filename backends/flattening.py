"""What float8 did to each layer, measured while an extraction writes: the sums, the verdict, and `fp8.json` beside the files.

The extractor has the true states at hand, so every token that is written is measured, at next to no cost. `plan` reads the
file before the next extraction with this model and these layers. Loads no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.errors import one_line
from backends.events import EventLog
from backends.fp8 import LIMIT

FILE = "fp8.json"
REMEDY = "extract without fp8, or choose layers whose sizes are nearer to each other"
VERSION = 1

# Sums over tokens of: |d|^2, |x|^2, |d| / |x|, the values that became 0, and whether this layer made the token's scale;
# x is a token's state at the layer, d the error.
FIGURES = ("error", "size", "by_token", "lost", "made_scale")

_BOUND = ("model_fingerprint", "dataset_fingerprint", "layer_ids", "hidden_size")


@dataclass(slots=True)
class Flattening:
    """The sums of an output folder. bound: what they are of, as in the manifest's header; sums: [L][`FIGURES`]."""

    bound: dict[str, Any]
    tokens: int = 0
    sums: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, output: Path, header: Mapping[str, Any]) -> Flattening:
        """What an earlier run measured in this folder, else nothing yet."""
        bound = {name: header[name] for name in _BOUND}
        found = load(output / FILE)
        return found if found is not None and found.bound == bound else cls(bound)

    @property
    def layer_ids(self) -> list[int]:
        return list(self.bound["layer_ids"])

    def add(self, tokens: int, figures: Sequence[Sequence[float]]) -> None:
        """Takes in what was measured on so many tokens more."""
        old = self.sums or [[0.0] * len(FIGURES)] * len(figures)
        self.sums = [[a + b for a, b in zip(row, more, strict=True)] for row, more in zip(old, figures, strict=True)]
        self.tokens += tokens

    def errors(self) -> dict[int, float]:
        """Relative error by layer id: the larger of that over all tokens together and the mean over tokens each by itself."""
        found = {}
        for layer_id, (error, size, by_token, *_) in zip(self.layer_ids, self.sums, strict=False):
            together = math.sqrt(error / size) if size else 0.0
            found[layer_id] = max(together, by_token / max(self.tokens, 1))
        return found

    def flattened(self) -> dict[int, float]:
        """The layer ids whose error is beyond what rounding explains, and the error."""
        return {layer_id: error for layer_id, error in self.errors().items() if not error <= LIMIT}

    def warning(self) -> str | None:
        """One line that names the layers that are flattened and the one whose values do it; None where there are none."""
        flat = self.flattened()
        if not flat:
            return None
        shares = [row[FIGURES.index("made_scale")] for row in self.sums]
        maker = max(range(len(shares)), key=shares.__getitem__)
        named = ", ".join(f"{layer_id} (relative error {error:.2g})" for layer_id, error in flat.items())
        return (
            f"float8 flattens layer ids {named}; the limit is {LIMIT:.2g}, on {self.tokens:,} tokens. Layer id"
            f" {self.layer_ids[maker]} makes the scale of {shares[maker] / max(self.tokens, 1):.0%} of the tokens"
        )

    def to_json(self) -> dict[str, Any]:
        errors = self.errors()
        values = max(self.tokens * self.bound["hidden_size"], 1)
        layers = {
            str(layer_id): {
                "relative_error": round(errors[layer_id], 6),
                "lost_share": round(row[FIGURES.index("lost")] / values, 6),
                "made_scale_share": round(row[FIGURES.index("made_scale")] / max(self.tokens, 1), 6),
            }
            for layer_id, row in zip(self.layer_ids, self.sums, strict=False)
        }
        return {
            "fp8": VERSION,
            **self.bound,
            "tokens": self.tokens,
            "limit": LIMIT,
            "flattened": list(self.flattened()),
            "layers": layers,
            "sums": self.sums,
        }

    def save(self, output: Path) -> None:
        """Writes `fp8.json` as a whole. Raises OSError."""
        write_json(output / FILE, self.to_json())


class Watch:
    """Takes in what the workers measured, warns of each layer that is flattened, once, and keeps `fp8.json` up to date."""

    def __init__(self, output: Path, header: Mapping[str, Any], events: EventLog) -> None:
        self._output = output
        self._events = events
        self._found = Flattening.of(output, header)
        self._warned: set[int] = set()
        self._packs = 0

    def take(self, tokens: int, figures: Sequence[Sequence[float]]) -> None:
        """What was measured on a pack. Whoever plans meanwhile may read of it after the first one."""
        self._found.add(tokens, figures)
        flat = set(self._found.flattened())
        if flat - self._warned:
            self._warned |= flat
            self._events.emit("warning", message=f"{self._found.warning()}: {REMEDY}")
        self._packs += 1
        if self._packs & (self._packs - 1) == 0:  # the 1st, 2nd, 4th, 8th: ever more rarely
            self.keep()

    def keep(self) -> None:
        """Writes `fp8.json`, where anything was measured; a disk that refuses it does not end the job."""
        if self._packs:
            try:
                self._found.save(self._output)
            except OSError as error:
                self._events.emit("warning", message=f"{self._output / FILE} cannot be written: {one_line(error)}")

    def outcome(self) -> dict[str, Any]:
        """Fields of `finished`: the relative error by layer id, and the layer ids that are flattened."""
        errors = {str(layer_id): round(error, 6) for layer_id, error in self._found.errors().items()}
        return {"float8_error_by_layer": errors, "flattened": list(self._found.flattened())}


def load(path: Path) -> Flattening | None:
    """What a `fp8.json` says; None where there is none, or none that can be read: it is only ever a hint."""
    try:
        data = json.loads(path.read_bytes())
        if data["fp8"] != VERSION:
            return None
        found = Flattening({name: data[name] for name in _BOUND}, int(data["tokens"]))
        sums = [[float(value) for value in row] for row in data["sums"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    right = len(sums) == len(found.layer_ids) and all(len(row) == len(FIGURES) for row in sums)
    found.sums = sums
    return found if right and found.tokens > 0 else None


def write_json(path: Path, data: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Writes a JSON file under a temporary name and renames it. mode: its rights, before the umask. Raises OSError."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(json.dumps(data, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
