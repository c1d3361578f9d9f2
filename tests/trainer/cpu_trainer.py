"""`python -m speculators.train` on a machine without a GPU, for tests: takes the trainer's own arguments.

speculators 0.9.0 moves model and batches to the device with the number of its rank, which a CPU does not have; nothing else
of it is changed.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch
from speculators.train import trainer


def on_the_cpu() -> None:
    """Batches and model stay where they are, autocast is the CPU's, and there is no accelerator to wait for."""
    set_up = trainer.Trainer.setup_trainer

    def setup_trainer(self: Any) -> None:
        self.device_type = "cpu"
        set_up(self)

    trainer.Trainer.setup_trainer = setup_trainer
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_args: None


if __name__ == "__main__":
    on_the_cpu()
    runpy.run_module("speculators.train", run_name="__main__")
