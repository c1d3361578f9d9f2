"""The recorder of GPU machines: nothing stops it, and nothing in a recording names a machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDER = ROOT / "tests" / "gpu" / "record.py"
UUIDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


def test_where_nothing_answers_the_recording_says_so_call_by_call(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\ndef nvmlInit(): raise NVMLError('no driver')\n"
    )
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    out = tmp_path / "out.json"
    env = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(RECORDER), "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    idle = found["phases"]["idle"]
    assert idle["nvml"] is None and "no driver" in found["notes"][0]
    assert idle["smi"]["gpus"]["exit"] is None and "nvidia-smi" in idle["smi"]["gpus"]["stderr"]
    assert idle["agent"]["exit"] == 0 and idle["agent"]["last"][0]["gpus"] == []
    assert found["phases"]["busy"] is None and "no torch here" in found["notes"][1]


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "data" / "gpu").glob("*.json")), ids=lambda path: path.name)
def test_a_recording_is_small_and_holds_no_identity_of_a_card(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text) < 400_000
    assert all(uuid.startswith("00000000-0000-4000-8000-") for uuid in UUIDS.findall(text))
    serials = re.findall(r"<(?:serial|board_serial|chassis_serial_number|pdi)>([^<]*)<", text)
    assert all(serial in ("0", "N/A") for serial in serials)


def test_the_same_card_gets_the_same_false_name_everywhere() -> None:
    sys.path.insert(0, str(RECORDER.parent))
    try:
        from disguise import Disguise
    finally:
        sys.path.remove(str(RECORDER.parent))
    hide = Disguise()
    one, two = "GPU-12345678-1234-1234-1234-123456789abc", "GPU-12345678-1234-1234-1234-123456789abd"
    found = hide.value({"a": one, "b": [two, one], "c": "00000000:3B:00.0", "d": "NVRM: Xid (PCI:0000:3b:00): 79"})
    assert found["a"] == found["b"][1] != found["b"][0] and "1234" not in json.dumps(found)
    assert found["c"] == "00000000:10:00.0" and "PCI:0000:10:00" in found["d"]
    line = hide.kernel_line("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=secret, serial: 132")
    assert "secret" not in line and "132" not in line and "pid=7" in line
