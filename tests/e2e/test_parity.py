"""float8 files and `parity` by their commands: real jobs on the local node."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash_tui.commands.outcome import Exit
from tests.e2e.conftest import Shared
from tests.e2e.harness import Site

SAMPLES = 6


def test_float8_files_are_half_as_large_and_parity_tells_good_from_bad_by_its_exit_code(
    site: Site, shared: Shared, tmp_path: Path
) -> None:
    exact, small = tmp_path / "exact", tmp_path / "small"
    site.run("launch", *shared.extract(exact, "--last", SAMPLES), "--wait")
    (plan,) = site.run("plan", *shared.extract(small, "--last", SAMPLES, "--fp8"), "--json").json
    assert plan["file_dtype"] == "float8_e4m3fn"
    assert plan["bytes_per_token"] == len(plan["layer_ids"]) * 128 + 12
    assert any("not known yet" in line and "dflash-tui parity" in line for line in plan["warnings"])
    site.run("launch", *shared.extract(small, "--last", SAMPLES, "--fp8"), "--wait")
    (plan,) = site.run("plan", *shared.extract(small, "--fp8"), "--json").json
    assert (plan["warnings"], plan["already_done"]) == ([], SAMPLES)
    mixed = site.run("launch", *shared.extract(small), code=Exit.BAD_INPUT)
    assert "dtype of the files: float8_e4m3fn there, float32 here" in mixed.line

    good = site.run("parity", exact, small, "--samples", 4)
    assert good.out.count("good") == len(plan["layer_ids"]) and "BAD" not in good.out
    assert "parity is good: hf float32 with hf float32 stored as float8_e4m3fn, 4 samples" in good.err

    path = small / "hs_3.safetensors"
    tensors = load_file(path)
    tensors["hidden_states"] = -tensors["hidden_states"].float()
    save_file({**tensors, "hidden_states": tensors["hidden_states"].to(torch.float8_e4m3fn)}, path)
    bad = site.run("parity", exact, small, "--json", code=Exit.FAILED).json
    assert (bad["state"], bad["exit_code"], bad["result"]["verdict"]) == ("done", Exit.FAILED, "bad")
    assert {layer["worst_row"] for layer in bad["result"]["layers"].values()} == {3}
    assert json.loads((small / "parity.json").read_text())["reasons"] == bad["result"]["reasons"]
    site.run("restart", bad["job"], "--wait", code=Exit.FAILED)
    same = site.run("parity", exact, exact, code=Exit.BAD_INPUT)
    assert "would be compared with itself" in same.line
