"""Runs of the real speculators trainer on the CPU, and what their logs say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from backends.store import read_manifest

CPU_TRAINER = Path(__file__).with_name("cpu_trainer.py")
LIMIT_S = 800
EPOCHS = 2


def target_layer_ids(states: Path) -> list[int]:
    """What the trainer's `--target-layer-ids` takes: the ids of the manifest without the last one."""
    return list(read_manifest(states).header["layer_ids"][:-1])


class TrainerRun:
    """A drafter trained on hidden-state files, in a process of its own.

    A small drafter and the CPU's options; the others are those of the README. The rate and the uniform weights of the
    positions in a block make 168 steps enough, from any seed that was tried.
    """

    def __init__(self, model: Path, data: Path, states: Path, ids: Sequence[int], save: Path) -> None:
        self.save = save
        self.log = save.with_suffix(".log")
        command = [
            *(sys.executable, str(CPU_TRAINER), "--verifier-name-or-path", str(model), "--data-path", str(data)),
            *("--hidden-states-path", str(states), "--speculator-type", "dflash", "--on-missing", "raise"),
            *("--target-layer-ids", *map(str, ids), "--total-seq-len", "256", "--epochs", str(EPOCHS)),
            *("--save-path", str(save), "--num-layers", "2", "--full-attention-indices", "0", "1", "--block-size", "4"),
            *("--max-anchors", "48", "--lr", "6e-3", "--per-position-loss-weight", "fixed-exp-decay"),
            *("--hidden-states-dtype", "float32", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
            *("--num-workers", "0", "--optimizer", "adamw"),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A record wraps at the terminal's width.
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "4000", "TERM": "dumb"},
                start_new_session=True,
            )

    def wait(self) -> str:
        """Waits for a good end; the log."""
        status = self.process.wait(LIMIT_S)
        text = self.log.read_text("utf-8", "replace")
        assert status == 0, "\n".join(line.rstrip()[:400] for line in text.splitlines()[-30:])
        return text

    def end(self) -> None:
        """For a test's `finally`."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def train_losses(self) -> list[float]:
        """The loss of every step, in order."""
        return _numbers("train/loss", self.log)

    def validated(self, metric: str) -> list[float]:
        """A validation metric after every epoch: "loss", "eal" (with the bonus token), "position_1_acc"."""
        return _numbers(f"val/{metric}_epoch", self.log)


def _numbers(name: str, log: Path) -> list[float]:
    text = log.read_text("utf-8", "replace")
    return [float(number) for number in re.findall(rf"\b{name}=(-?[\d.]+(?:e-?\d+)?|nan|inf)", text)]
