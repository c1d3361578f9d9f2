"""The doctor as an agent runs it: real Pythons, good and broken, a hanging one, a small disk, low limits, a recorded GPU."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node import processes
from dflash_tui.node.doctor import folders, pythons, request
from dflash_tui.node.doctor.checks import Check, of_json
from tests.fakes.nvml import RECORDING, SMI
from tests.node.client import Client, Refusal, until

Connect = Callable[..., Client]

SLOW_S = 280.0  # importing torch and a model class, on a machine that has much else to do

# Sleeps as long as the test lets it; the pid is left where the test finds it.
HANGS = """#!/bin/sh
echo $$ > "{pid}"
exec sleep 1000
"""
LIMITED = """#!/bin/sh
ulimit -n 200
exec {python} "$@"
"""
# 64 MiB are what a container gets that nobody gave more; the other folder has few inodes.
SMALL = """#!/bin/sh
exec unshare --map-root-user --mount /bin/sh -c '
mount -t tmpfs -o size=64m none /dev/shm && mkdir -p "$SMALL_FOLDER" &&
mount -t tmpfs -o size=8m,nr_inodes=20 none "$SMALL_FOLDER" && exec "$@"
' sh {python} "$@"
"""


def script(path: Path, text: str, *, anew: bool = False) -> str:
    if anew:
        path.unlink()  # a link would lead to the real Python
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class OwnPython:
    """A virtual environment without pip, in which packages are put by hand."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = str(folder / "bin" / "python")
        self.site = next((folder / "lib").glob("python3*")) / "site-packages"

    def add(self, name: str, version: str, code: str) -> None:
        (self.site / name).mkdir()
        (self.site / name / "__init__.py").write_text(code)
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def take_the_rest_from_here(self) -> None:
        """Everything that this very Python has comes after what was added."""
        (self.site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")


@pytest.fixture
def own(tmp_path: Path) -> OwnPython:
    return OwnPython(tmp_path / "own")


def checks(agent: Client, **fields: Any) -> dict[str, Check]:
    """What the doctor says, by name; every check has its one line."""
    number = agent.send("doctor", **fields)
    until(lambda: (agent.receive() and False) or number in agent._answers or agent._check(), "the doctor", SLOW_S)
    answer = agent.answer(number).header
    found = [of_json(fields) for fields in answer["checks"]]
    assert answer["ntp"] in (True, False, None)
    by_name = {check.name: check for check in found if check is not None}
    assert len(by_name) == len(answer["checks"]), answer
    for check in by_name.values():
        assert check.found and "\n" not in check.found + check.remedy, check
        assert check.status == "ok" or check.remedy or check.status == "unknown", check
    return by_name


def with_gpus(environment: Mapping[str, str], **more: str) -> dict[str, str]:
    """A node whose nvidia-smi answers from the recording of two cards."""
    path = os.pathsep.join([str(SMI.parent), str(Path(sys.executable).parent), environment["PATH"]])
    fake = {"DFLASH_TUI_FAKE_SMI": str(RECORDING), "DFLASH_TUI_FAKE_GPUS": "2", "DFLASH_TUI_FAKE_SMI_PHASE": "idle"}
    return {**environment, "PATH": path, **fake, **more}


def test_a_real_worker_python_beside_recorded_gpus_is_seen_through(
    connect: Connect, environment: dict[str, str], tmp_path: Path
) -> None:
    agent = connect(env=with_gpus(environment))
    found = checks(agent, paths=[str(tmp_path / "states" / "new")], host="gpu-1", limit_s=240)
    assert found["worker Python"].status == "ok" and sys.executable in found["worker Python"].found
    for name in ("torch", "transformers", "datasets", "safetensors"):
        assert found[name].status == "ok", found[name]
    assert found["driver"].found == "NVIDIA 580.159.04, for CUDA up to 13.0"
    assert found["GPUs"].found.startswith("2 x NVIDIA H200 (140 GiB)")
    # This torch is built for the CPU, which is no fault until there are GPUs.
    assert found["torch on GPUs"].status == "problem"
    assert "the cu130 build of torch" in found["torch on GPUs"].remedy
    assert "dflash-tui setup --host gpu-1" in found["torch on GPUs"].remedy
    assert found["varlen_attn"].status == "ok"
    assert "pip install flash-linear-attention" in found["flash-linear-attention"].remedy
    assert "not there yet" in found[f"disk {tmp_path}/states/new"].found
    assert "MB/s" in found["state folder"].found
    assert found["file locks"].status == "ok"
    assert not (tmp_path / "states").exists()
    assert list(tmp_path.rglob("*dflash-tui-doctor*")) == []


def test_a_torchvision_that_does_not_fit_is_named_as_what_keeps_models_from_loading(
    agent: Client, own: OwnPython
) -> None:
    own.take_the_rest_from_here()
    own.add("torchvision", "0.28.0", "raise RuntimeError('operator torchvision::nms does not exist')")
    # Transformers looks for torchvision only beside Pillow.
    own.add("PIL", "11.0", "")
    (own.site / "PIL" / "Image.py").write_text("class Image: ...\nclass Resampling: ...\n")
    (own.site / "PIL" / "ImageOps.py").write_text("")
    found = checks(agent, python=own.python, write=False, limit_s=240)
    assert found["torch"].status == "ok", found
    for name in ("torchvision", "transformers"):
        assert found[name].status == "problem", found[name]
        assert "torchvision::nms" in found[name].found
        assert "-m pip uninstall torchvision" in found[name].remedy


def test_a_python_without_torch_gets_one_problem_and_one_command(agent: Client, own: OwnPython) -> None:
    found = checks(agent, python=own.python, host="user@gpu-1:22")
    assert found["worker Python"].status == "ok"
    missing = found["packages"]
    assert missing.status == "problem"
    assert missing.found == f"{own.python} has no torch, transformers, datasets, safetensors"
    assert f"{own.python} -m pip install 'torch>=2.11' 'transformers>=5.16.1,<5.20'" in missing.remedy
    assert missing.remedy.endswith("or dflash-tui setup --host user@gpu-1:22")
    assert found["GPUs"].status == "warning" and found["GPUs"].found == "no GPU: CPU only"
    assert found["vLLM"].remedy == "dflash-tui setup --host user@gpu-1:22 --vllm VERSION"
    assert found["trainer"].remedy == "dflash-tui setup --host user@gpu-1:22 --trainer"
    assert "torch on GPUs" not in found and "varlen_attn" not in found


def test_environments_that_setup_made_are_found_and_half_ones_are_told(
    agent: Client, environment: dict[str, str]
) -> None:
    envs = Path(environment["HOME"]) / ".local" / "share" / "dflash-tui" / "envs"
    built = envs / ".built"
    built.mkdir(parents=True)
    for name, package, version in (("vllm-0.26.0", "vllm", "0.26.0"), ("trainer", "speculators", "0.9.0")):
        OwnPython(built / f"{name}-0123456789").add(package, version, "")
        (built / f"{name}-0123456789" / "env.json").write_text(json.dumps({"name": name}))
        (envs / name).symlink_to(f".built/{name}-0123456789")
    OwnPython(built / "worker-9876543210")
    found = checks(agent, python=str(envs / "trainer" / "bin" / "python"), write=False)
    assert found["vLLM"].status == "ok"
    assert found["vLLM"].found == f"0.26.0 in {built}/vllm-0.26.0-0123456789/bin/python"
    assert found["trainer"].found == "speculators 0.9.0 in the worker Python"
    half = found["environments"]
    assert (half.status, half.found) == ("warning", f"not made to the end: {built}/worker-9876543210")
    script(built / "vllm-0.26.0-0123456789" / "bin" / "python", "#!/bin/sh\nexit 1\n", anew=True)
    found = checks(agent, python="no-such-python", write=False)
    assert found["environment vllm-0.26.0"].status == "problem" and found["vLLM"].status == "warning"


def test_environments_that_do_not_answer_are_unknown_and_not_missing(
    agent: Client, environment: dict[str, str]
) -> None:
    envs = Path(environment["HOME"]) / ".local" / "share" / "dflash-tui" / "envs"
    folder = envs / ".built" / "vllm-0.26.0-0123456789"
    OwnPython(folder)
    (folder / "env.json").write_text(json.dumps({"name": "vllm-0.26.0"}))
    (envs / "vllm-0.26.0").symlink_to(".built/vllm-0.26.0-0123456789")
    script(folder / "bin" / "python", "#!/bin/sh\nexec sleep 600\n", anew=True)
    found = checks(agent, python="no-such-python", write=False, limit_s=3)
    assert found["environments"].status == "unknown" and "vLLM" not in found and "trainer" not in found


def test_a_python_that_is_not_there_or_cannot_be_run_is_one_problem(agent: Client, tmp_path: Path) -> None:
    for python in ("no-such-python", "/nowhere/bin/python"):
        worker = checks(agent, python=python, write=False)["worker Python"]
        assert worker.status == "problem" and python in worker.found and "setup" in worker.remedy
    python = script(tmp_path / "python", "#!/nowhere/bin/sh\n")
    worker = checks(agent, python=python, write=False)["worker Python"]
    assert worker.found == f"{python} does not run: No such file or directory"


def test_packages_that_a_job_would_see_count(connect: Connect, environment: dict[str, str], tmp_path: Path) -> None:
    info = tmp_path / "mine" / "speculators-0.9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: speculators\nVersion: 0.9.0\n")
    python = OwnPython(tmp_path / "own").python
    agent = connect(env={**environment, "PYTHONPATH": str(tmp_path / "mine")})
    assert checks(agent, python=python, write=False)["trainer"].found == "speculators 0.9.0 in the worker Python"


def test_a_python_that_hangs_is_ended_while_the_agent_beats_on(agent: Client, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    python = script(tmp_path / "hangs", HANGS.format(pid=pid))
    number = agent.send("doctor", python=python, limit_s=2, write=False)
    until(lambda: (agent.receive() and False) or (pid.exists() and pid.read_text().strip()), "the Python to start")
    beats = len([frame for frame in agent.pushes if frame.header["ev"] == "beat"])
    answer = agent.answer(number).header
    worker = next(check for check in answer["checks"] if check["name"] == "worker Python")
    assert (worker["status"], worker["found"]) == ("problem", f"{python} did not answer within 2 s")
    assert len([frame for frame in agent.pushes if frame.header["ev"] == "beat"]) > beats
    until(lambda: int(pid.read_text()) not in processes.snapshot(), "its end")


def test_a_hanging_python_does_not_outlive_the_console(connect: Connect, tmp_path: Path) -> None:
    agent = connect()
    pid = tmp_path / "pid"
    agent.send("doctor", python=script(tmp_path / "hangs", HANGS.format(pid=pid)), limit_s=600, write=False)
    until(lambda: pid.exists() and pid.read_text().strip(), "the Python to start")
    agent.close()
    until(lambda: int(pid.read_text()) not in processes.snapshot(), "its end")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(1000)", "importing torch 2.13.0 had not ended after 6 s"),
        ("import os; os.kill(os.getpid(), 11)", "importing torch 2.13.0 ended the Python with signal 11"),
        (
            "import os; os.write(2, b'half-way'); os._exit(7)",
            "importing torch 2.13.0 ended the Python with status 7: half-way",
        ),
        ("import no_such_module", "2.13.0 cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["hangs", "is killed", "ends", "raises"],
)
def test_a_torch_that_cannot_be_imported_is_a_problem_and_the_rest_is_still_told(
    agent: Client, own: OwnPython, code: str, said: str
) -> None:
    own.add("torch", "2.13.0", code)
    own.add("safetensors", "0.8.0", "")
    (own.site / "safetensors" / "torch.py").write_text("")
    found = checks(agent, python=own.python, limit_s=6, write=False)
    assert found["torch"].status == "problem" and found["torch"].found == said
    assert found["packages"].found.endswith("has no transformers, datasets")
    assert found["safetensors"].status == ("ok" if "cannot be imported" in said else "unknown")
    assert found["memory"].found


def test_a_driver_that_hangs_is_a_problem_and_ends_with_its_limit(
    connect: Connect, environment: dict[str, str], own: OwnPython
) -> None:
    agent = connect(env=with_gpus(environment, DFLASH_TUI_FAKE_SMI_MODE="hang"))
    found = checks(agent, python=own.python, limit_s=2, write=False)
    assert found["GPUs"].status == "problem"
    assert "did not answer within 2 s" in found["GPUs"].found
    # Whether torch can use GPUs is not claimed where nobody knows of any.
    assert "torch on GPUs" not in found


def test_a_lost_card_is_among_the_cards_beside_the_good_one(
    connect: Connect, environment: dict[str, str], own: OwnPython
) -> None:
    agent = connect(env=with_gpus(environment, DFLASH_TUI_FAKE_SMI_MODE="lost:1"))
    good, lost = agent.ask("doctor", python=own.python, write=False)["gpus"]
    assert (good["name"], good["error"]) == ("NVIDIA H200", None)
    assert "GPU is lost" in lost["error"]


def test_low_limits_and_an_odd_locale_are_told(connect: Connect, environment: dict[str, str], tmp_path: Path) -> None:
    python = script(tmp_path / "limited", LIMITED.format(python=sys.executable))
    agent = connect(python=python, env={**environment, "LC_ALL": "xx_XX.ISO-8859-1"})
    found = checks(agent, python="no-such-python", write=False)
    assert found["open files"].status == "problem"
    assert found["open files"].found.startswith("200 open files")
    assert "ulimit -n 65536" in found["open files"].remedy
    assert found["locale"].status == "warning" and "xx_XX" in found["locale"].found


def test_a_small_shared_memory_a_full_disk_and_few_inodes_are_told(
    connect: Connect, environment: dict[str, str], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    python = script(tmp_path / "small-python", SMALL.format(python=sys.executable))
    agent = connect(python=python, env={**environment, "SMALL_FOLDER": str(small)})
    inside = Path(f"/proc/{agent.process.pid}/root{small}")
    until(lambda: inside.stat().st_dev != tmp_path.stat().st_dev, "the small disk")
    for number in range(18):
        (inside / str(number)).touch()
    (inside / "0").write_bytes(bytes((8 << 20) - (200 << 10)))
    found = checks(agent, python="no-such-python", paths=[str(small)])
    shared = found["shared memory"]
    assert shared.status == "problem" and "64.0 MiB" in shared.found and "--shm-size" in shared.remedy
    disk = found[f"disk {small}"]
    assert disk.status == "problem" and "inodes free of 20" in disk.found and "as good as full" in disk.found


def test_a_read_only_console_writes_nothing(agent: Client, state: Path) -> None:
    before = sorted(path.relative_to(state) for path in state.rglob("*"))
    times = state.stat().st_mtime_ns
    found = checks(agent, python="no-such-python", write=False)
    assert "MB/s" not in found["state folder"].found and "file locks" not in found
    assert (sorted(path.relative_to(state) for path in state.rglob("*")), state.stat().st_mtime_ns) == (before, times)


def test_what_cannot_be_asked_is_refused_by_name(agent: Client) -> None:
    bad: list[dict[str, Any]] = [{"paths": ["here"]}, {"paths": "/"}, {"limit_s": 0}, {"limit_s": True}, {"write": 1}]
    for fields in [*bad, {"python": 3}]:
        with pytest.raises(Refusal) as refusal:
            agent.ask("doctor", **fields)
        assert refusal.value.code == "bad-request"
        assert next(iter(fields)) in refusal.value.message


def test_the_op_takes_the_default_python_of_the_agent(state: Path) -> None:
    asked = request.request_of({"paths": ["/a/", "/a"]}, "/usr/bin/python3", str(state))
    assert (asked["python"], asked["paths"], asked["write"]) == ("/usr/bin/python3", ["/a"], True)


def test_the_versions_that_are_asked_for_are_those_of_the_project() -> None:
    import tomllib

    from backends import environment as backends_environment

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["worker"]
    for text in wanted:
        name, _, rest = text.partition(">=")
        least, _, most = rest.partition(",<")
        assert pythons.TRIED_FROM[name] == tuple(map(int, least.split(".")))
        assert pythons.TOO_NEW.get(name) == (tuple(map(int, most.split("."))) if most else None)
    assert pythons.OLDEST == backends_environment._OLDEST
    assert set(pythons.NEEDED) == set(pythons.TRIED_FROM)
    assert folders.IN_MEMORY
