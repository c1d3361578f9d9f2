"""The command that the README gives for training is run as it stands there, on an output of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from trainer_runs import LIMIT_S, target_layer_ids

README = Path(__file__).parents[2] / "README.md"


def _command() -> str:
    """The first indented block of the section "Train on it"."""
    section = README.read_text(encoding="utf-8").partition("\n## Train on it\n")[2].partition("\n## ")[0]
    block = re.search(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert block, "the README has no command in 'Train on it'"
    return "".join(line.removeprefix("    ") for line in block.group().splitlines(keepends=True))


def test_the_readmes_training_command_makes_a_drafter_of_the_manifests_layers(
    verifier: tuple[Path, Path], states: Path, tmp_path: Path
) -> None:
    model, data = verifier
    command = _command().rstrip()
    # `states` is where the README has it: in the dataset's folder.
    for said, here in (("/models/Qwen3-8B", model), ("/data/chats", data), ("/data/drafter", tmp_path / "drafter")):
        assert said in command
        command = command.replace(said, str(here))
    # No training: on a machine without a GPU only the set-up of it can be had.
    command += " --dry-run"
    done = subprocess.run(
        ["sh", "-euc", command],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == target_layer_ids(states)
    assert config["speculators_model_type"] == "dflash"
