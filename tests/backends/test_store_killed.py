"""A process that dies between any two calls to the system while it writes and lists samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test_store import HEADER, check, tensor, write

from backends.store import Entry, Store, read_manifest

# Two samples in two commits; the call number `at` is its last: a write does half of its work, the others none or all of it.
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from backends.hsfile import write_sample
from backends.store import Store
root, header, calls = Path(sys.argv[2]), eval(sys.argv[3]), 0

def deadly(name, at, after):
    real = getattr(os, name)
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            if name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            elif after:
                real(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    setattr(os, name, call)

def work(folder):
    store = Store.open(folder, header)
    for row in range(2):
        states = np.random.default_rng(row).integers(1, 9999, (70, 3, 16), dtype=np.uint16)
        store.commit([write_sample(folder, row, states, np.arange(70), dtype="bfloat16", layers=3, hidden_size=16)])

for after in (False, True):
    for at in range(1, 1000):
        (root / f"{after}-{at}").mkdir()
        if os.fork() == 0:
            for name in ("open", "write", "fsync", "ftruncate", "replace", "mkdir"):
                deadly(name, at, after)
            work(root / f"{after}-{at}" / "out")
            os._exit(0)
        if os.wait()[1] == 0:
            break
    print(at)
"""


def test_a_kill_at_any_call_loses_no_listed_sample_and_lists_none_that_is_not_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parents[2]), str(tmp_path), repr(HEADER)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    kills = [int(number) for number in done.stdout.split()]
    assert min(kills) > 15
    folders = [folder / "out" for folder in tmp_path.iterdir()]
    assert len(folders) == sum(kills)
    seen = set()
    for folder in folders:
        store = Store.open(folder, HEADER)
        for row in (*store.listed, *store.stray):
            check(folder / f"hs_{row}.safetensors")
        seen.add((len(store.listed), len(store.stray)))
        # What is missing is made, and then everything is there once.
        store.commit(Entry(row, store.path(row).name, 70, store.path(row).stat().st_size) for row in store.stray)
        store.commit([write(folder, row, tensor()) for row in range(2) if row not in store.listed])
        store.close()
        assert sorted(read_manifest(folder).entries) == [0, 1]
        assert len((folder / "manifest.jsonl").read_text().splitlines()) == 3
        assert list(folder.glob(".tmp-*")) == []
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
