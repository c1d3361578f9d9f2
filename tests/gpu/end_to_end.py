"""The main job on a real GPU, by the commands that a user types; prints one JSON document of what was seen.

    python3 tests/gpu/end_to_end.py --out FOLDER [--gpu 0] [--hidden 1024] [--blocks 24] [--rows 220]

Runs where the console and a worker Python with CUDA are one (`--host local`). It makes a model with the demo's builder,
then extracts on the GPU in bfloat16 and in float32, recomputes samples in float32 there, looks at the card while a job
holds it, tries to launch on it twice, kills a worker, and stops a job. Every expectation that fails is listed under
`failed`, and the exit status is then 1. The card's settings are left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


class Check:
    """Runs commands, and notes what was not as it should be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[str] = []
        self.seen: dict[str, Any] = {}
        self.env = {
            **os.environ,
            "HOME": str(folder / "home"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        (folder / "home").mkdir(parents=True, exist_ok=True)

    def expect(self, what: str, holds: bool, found: Any = None) -> None:
        if not holds:
            self.failed.append(f"{what}: {found}")

    def run(self, *words: object, code: int = 0) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "dflash_tui.cli", *map(str, words), "--json"],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        told = (done.stderr.strip() or done.stdout)[-800:]
        self.expect(f"dflash-tui {words[0]} ends with {code}", done.returncode == code, f"{done.returncode} {told}")
        self.expect(f"dflash-tui {words[0]} prints no traceback", "Traceback" not in told, told)
        try:
            return json.loads(done.stdout)
        except ValueError:
            return {}

    def job(self, name: str) -> dict[str, Any]:
        jobs = self.status().get("jobs", [])
        return next((job for job in jobs if job["name"] == name), {})

    def status(self) -> dict[str, Any]:
        nodes = self.run("status", "--host", "local")
        return nodes[0] if nodes else {}

    def wait(self, what: str, name: str, holds: Any, limit: float = 240.0) -> dict[str, Any]:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            job = self.job(name)
            if job and holds(job):
                return job
            time.sleep(0.5)
        self.failed.append(f"waited {limit:.0f} s for {what}: {self.job(name)}")
        return self.job(name)


def make_data(folder: Path, hidden: int, blocks: int, rows: int) -> tuple[Path, list[Path]]:
    """A model and its conversations, `rows` of them and more by repetition."""
    import backends.demo
    from backends.demo.model import build_model

    files = sorted((Path(backends.demo.__file__).parent / "data").glob("*.jsonl"))
    texts = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    build_model(folder / "model", texts[:rows], layers=blocks, hidden=hidden)
    return folder / "model", files


def progressed(job: dict[str, Any]) -> bool:
    return ((job.get("progress") or {}).get("done") or 0) > 0 or job.get("state") not in ("starting", "running")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rows", type=int, default=220)
    args = parser.parse_args()
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    check = Check(folder)
    seen = check.seen

    before = check.status()
    gpus = (before.get("metrics") or {}).get("gpus") or []
    seen["gpus"] = [{key: value for key, value in gpu.items() if key not in ("uuid", "processes")} for gpu in gpus]
    seen["gpu_source"] = (before.get("metrics") or {}).get("gpu_source")
    check.expect("the agent reads at least one card", bool(gpus), before)

    model, files = make_data(folder, args.hidden, args.blocks, args.rows)
    data = folder / "data"
    seen["prepare"] = check.run("prepare", *files, "--model", model, "--output", data, "--host", "local")

    for dtype in ("bfloat16", "float32"):
        output = folder / f"states-{dtype}"
        common = ["--model", model, "--dataset", data, "--output", output, "--dtype", dtype, "--host", "local"]
        seen[f"plan {dtype}"] = check.run("plan", *common, "--gpus", args.gpu)
        seen[f"extract {dtype}"] = check.run("launch", *common, "--gpus", args.gpu, "--name", dtype, "--wait")
        verified = check.run("verify", output, "--recompute", 6, "--gpus", args.gpu, "--host", "local")
        seen[f"verify {dtype}"] = verified
    check.run("launch", *common, "--gpus", "99", code=2)

    # A job that holds the card long enough to be looked at: the same samples again, small packs.
    slow = ["--model", model, "--dataset", data, "--host", "local", "--gpus", args.gpu, "--pack-tokens", "64"]
    check.run("launch", *slow, "--output", folder / "held", "--name", "held")
    held = check.wait("samples of the job `held`", "held", progressed)
    now = check.status()
    card = next((gpu for gpu in (now.get("metrics") or {}).get("gpus") or [] if str(gpu["index"]) == args.gpu), {})
    seen["card while a job holds it"] = {key: value for key, value in card.items() if key != "uuid"}
    mine = [process for process in card.get("processes") or [] if process.get("job") == held.get("id")]
    check.expect("the card's processes name the job", bool(mine), card)
    seen["second launch"] = check.run("launch", *slow, "--output", folder / "second", code=2)
    for process in mine:
        os.kill(process["pid"], 9)
    ended = check.wait("the end of `held`", "held", lambda job: job["state"] not in ("starting", "running"))
    check.expect("a job whose worker was killed is done all the same", ended.get("state") == "done", ended)
    seen["held"] = {"state": ended.get("state"), "result": ended.get("result")}

    check.run("launch", *slow, "--output", folder / "stopped", "--name", "stopped")
    check.wait("samples of the job `stopped`", "stopped", progressed)
    stopped = check.job("stopped")
    told = check.run("stop", stopped.get("id", "?"), "--yes", "--wait", "--host", "local")
    ended = check.wait("its end", "stopped", lambda job: job["state"] == "interrupted", limit=90)
    cards = [{key: value for key, value in card.items() if key != "uuid"} for card in told.get("gpu_memory") or []]
    seen["stopped"] = {"state": ended.get("state"), "reason": ended.get("reason"), "gpu_memory": cards}
    check.expect("a stopped job's memory is freed", bool(cards) and all(card["freed"] for card in cards), told)

    seen["failed"] = check.failed
    text = json.dumps(seen, indent=1)
    (folder / "seen.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
