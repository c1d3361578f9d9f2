"""`python -m tests.fidelity [--device cuda]`: the table, its last line JSON; exit status 1 unless all is as it must be.

The plain forward is always the CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

# Before torch is imported: the models are tiny.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fidelity")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the backend runs")
    device = parser.parse_args().device

    from transformers.utils import logging

    from tests.fidelity.table import all_well, run

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        totals = run(Path(root), lambda line: print(line, flush=True), device)
    print()
    print(json.dumps(totals))
    return 0 if all_well(totals) else 1


if __name__ == "__main__":
    sys.exit(main())
