"""Reading a log whatever its size: bounded, its lines counted, what is no log refused."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_tui.node.diagnose import find, read

PAGE_SIZE = Path(__file__).resolve().parents[1] / "data" / "logs" / "v0.20.1-hybrid-page-size.log"


def test_lines_are_counted_through_a_middle_that_is_not_read(tmp_path: Path) -> None:
    noise = b"".join(b"INFO line %d\n" % number for number in range(50_000))
    data = noise + PAGE_SIZE.read_bytes()
    path = tmp_path / "log"
    path.write_bytes(data)
    found = find.diagnose(str(path), head=40_000, tail=60_000)
    assert found["skipped_bytes"] == len(data) - 100_000
    assert found["lines"] == data.count(b"\n")
    assert (found["cause"]["id"], found["cause"]["line"]) == ("vllm-hybrid-page-size", 50_117)


def test_a_hole_that_was_given_back_to_the_disk_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"starting\n")
        file.seek(1 << 40)
        file.write(PAGE_SIZE.read_bytes())
    found = find.diagnose(str(path))
    assert found["cause"]["id"] == "vllm-hybrid-page-size"
    assert found["skipped_bytes"] > (1 << 40) - (1 << 22)


@pytest.mark.parametrize("kind", ["lines", "one line", "one bar", "tracebacks"])
def test_200_megabytes_of_noise_are_read_in_bounded_memory(kind: str, tmp_path: Path) -> None:
    part = {
        "lines": b"(EngineCore pid=1) INFO 11-30 01:25:26 [core.py:11] step took 12 ms, all is well as it can be\n"
        * 10,
        "one line": b"x" * 1000,
        "one bar": b"\r 10%|###       | 1/10 [00:01<00:09, 1.0s/it]" * 20,
        "tracebacks": b'Traceback (most recent call last):\n  File "/a.py", line 1, in f\nKeyboardInterrupt\n' * 10,
    }[kind]
    path = tmp_path / "log"
    block = part * (1_000_000 // len(part))
    with path.open("wb") as file:
        for _ in range(200):
            file.write(block)
        file.write(b"\n" + PAGE_SIZE.read_bytes())
    code = (
        "import re, sys; sys.path.insert(0, sys.argv[2])\n"
        "from dflash_tui.node.diagnose.find import diagnose\n"
        "found = diagnose(sys.argv[1], head=4 << 20, tail=4 << 20)\n"
        # Not ru_maxrss: what executed this program counts in it.
        "print(found['cause']['id'], re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read()).group(1))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(path), str(root)], capture_output=True, text=True, check=True
    )
    id_, kilobytes = done.stdout.split()
    assert id_ == "vllm-hybrid-page-size"
    assert int(kilobytes) < 80_000


def test_what_is_no_log_is_refused_with_its_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "pipe", ""):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with pytest.raises(OSError, match=r"No such file|not a regular file"):
            find.diagnose(str(tmp_path / name))
        assert before == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_lines_come_out_as_they_went_in_however_the_parts_fall(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"line %d" % number for number in range(300)]
    path.write_bytes(b"\n".join(lines))
    log = read.Log(str(path), head=777, tail=555)
    seen = {raw.number: raw.data for raw in log if raw.data is not None}
    log.close()
    assert log.lines == 300
    cut = {number for number, data in seen.items() if data != lines[number - 1]}
    assert len(cut) <= 2 and len(seen) > 100
