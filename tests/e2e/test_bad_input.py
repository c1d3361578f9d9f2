"""Bad input: one clear line that names the thing, the exit code, no traceback, and everything else still works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_tui.commands.outcome import Exit
from tests.e2e.conftest import Shared
from tests.e2e.harness import JobFolder, Site
from tests.sshd import Sshd, free_port, keygen, running_sshd

FAKES = Path(__file__).parents[1] / "fakes"
RECORDING = Path(__file__).parents[1] / "data" / "gpu" / "h200.json"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("node")) as server:
        yield server


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of a fresh environment: it has no torch."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


# --- hosts that cannot be reached ------------------------------------------------------------------------------------


def assert_only_it_fails(site: Site, sshd: Sshd, host: str, *named: str) -> None:
    """The bad host has its line, the good one beside it is shown, and the exit code tells."""
    done = site.run(
        "jobs", "--host", host, "--host", "local", "--ssh-config", sshd.ssh_config, "--json", code=Exit.UNREACHABLE
    )
    bad, good = done.json
    assert (bad["host"], good["host"]) == (host, "local")
    assert "error" not in good
    assert isinstance(good["jobs"], list)
    assert host in done.line
    line = f"{bad['error']}: {bad['remedy']}"
    for word in named:
        assert word in line
        assert word in done.line


def test_an_unknown_host(site: Site, sshd: Sshd) -> None:
    assert_only_it_fails(site, sshd, "no-such-host.invalid", "no-such-host.invalid")


def test_a_refused_port(site: Site, sshd: Sshd) -> None:
    port = free_port()
    assert_only_it_fails(site, sshd, f"127.0.0.1:{port}", str(port), "refuses")


def test_an_unknown_host_key_is_shown_with_its_fingerprint(site: Site, sshd: Sshd) -> None:
    sshd.know_host_key("")
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", f"{sshd.host_key}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    try:
        assert_only_it_fails(site, sshd, sshd.target, fingerprint)
        assert sshd.known_hosts.read_text() == ""
    finally:
        sshd.know_host_key()


def test_a_changed_host_key_is_refused_whatever_is_accepted(site: Site, sshd: Sshd, tmp_path: Path) -> None:
    kind, blob = Path(f"{keygen(tmp_path / 'other')}.pub").read_text().split()[:2]
    old = f"[127.0.0.1]:{sshd.port} {kind} {blob}\n"
    sshd.know_host_key(old)
    try:
        assert_only_it_fails(site, sshd, sshd.target, "ssh-keygen -R")
        words = ["status", "--host", sshd.target, "--ssh-config", sshd.ssh_config, "--accept-new-host-key"]
        assert "ssh-keygen -R" in site.run(*words, code=Exit.UNREACHABLE).line
        assert sshd.known_hosts.read_text() == old
    finally:
        sshd.know_host_key()


def test_a_node_without_python(site: Site, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("sh", "mkdir", "cat", "tar", "rm", "mv", "ls", "uname", "id"):
        (bare / name).symlink_to(f"/bin/{name}")
    shell = tmp_path / "shell"
    # As on an image without Python: nothing on the PATH, nothing in the usual places.
    shell.write_text(f'#!/bin/sh\nPATH={bare}; export PATH\nexec /bin/sh "$@"\n')
    shell.chmod(0o755)
    prefix = no_usual_pythons(tmp_path)
    with running_sshd(tmp_path / "node", login_shell=str(shell), prefix=prefix) as server:
        assert_only_it_fails(site, server, server.target, "Python")


def no_usual_pythons(folder: Path) -> tuple[str, ...]:
    """A command prefix in whose mount namespace no Python stands in the usual places."""
    empty = folder / "empty"
    empty.write_text("")
    script = folder / "hide"
    hide = f'[ -e "$python" ] && mount --bind {empty} "$python"'
    places = "/usr/bin/python3* /usr/local/bin/python3* /opt/*/bin/python3*"
    script.write_text(f'#!/bin/sh\nfor python in {places}; do {hide}; done\nexec "$@"\n')
    script.chmod(0o755)
    return ("unshare", "-m", str(script))


# --- Pythons, models, data -------------------------------------------------------------------------------------------


def refused(site: Site, words: list[object], *named: str, output: Path | None = None) -> None:
    """The command is refused before anything starts: one line, code 2, no job, nothing written."""
    (before,) = site.run("jobs", "--json").json
    done = site.run(*words, "--json", code=Exit.BAD_INPUT)
    for word in named:
        assert word in done.line, done
        assert word in f"{done.json['error']}: {done.json['remedy']}"
    (after,) = site.run("jobs", "--json").json
    assert [job["id"] for job in after["jobs"]] == [job["id"] for job in before["jobs"]]
    assert output is None or not output.exists()


def test_a_worker_python_without_torch(site: Site, shared: Shared, bare_python: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(site, ["launch", *shared.extract(out), "--python", bare_python], str(bare_python), "torch", output=out)


def test_a_worker_python_that_is_not_there(site: Site, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(site, ["launch", *shared.extract(out), "--python", "/no/such/python"], "/no/such/python", output=out)


def test_a_model_folder_without_config(site: Site, shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    out = tmp_path / "out"
    words = ["launch", "--model", tmp_path / "model", "--dataset", shared.dataset, "--output", out]
    refused(site, words, "config.json", str(tmp_path / "model"), output=out)


def test_a_family_that_is_not_supported(site: Site, shared: Shared, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((shared.model / "config.json").read_text())
    config |= {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    refused(site, ["launch", "--model", model, "--dataset", shared.dataset, "--output", out], "mamba2", output=out)


def test_a_dataset_that_is_none(site: Site, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(
        site, ["launch", "--model", shared.model, "--dataset", tmp_path, "--output", out], str(tmp_path), output=out
    )


@pytest.mark.parametrize("layers", ["2,9", "0,1000"])
def test_a_layer_id_out_of_range(site: Site, shared: Shared, tmp_path: Path, layers: str) -> None:
    out = tmp_path / "out"
    refused(site, ["launch", *shared.extract(out, "--layers", layers)], layers.split(",")[1], "8", output=out)


def test_a_sample_longer_than_the_limit(site: Site, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(site, ["launch", *shared.extract(out, "--max-sample-tokens", 50)], "row ", "50", output=out)


def test_an_output_that_cannot_be_written(site: Site, shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    refused(site, ["launch", *shared.extract(out)], str(tmp_path / "file"))
    refused(site, ["launch", *shared.extract(Path("/proc/none/out"))], "/proc")


def test_a_disk_that_is_too_small(site: Site, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["launch", *shared.extract(out)]
    words[words.index("--min-free-bytes") + 1] = 1 << 60
    refused(site, words, "bytes", output=out)


def test_a_broken_line_of_conversations_is_named_with_its_number(
    site: Site, shared: Shared, conversations: Path, tmp_path: Path
) -> None:
    good = conversations.read_text().splitlines()[:3]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([*good, '{"conversations": [', ""]))
    out = tmp_path / "dataset"
    done = site.run("prepare", broken, "--model", shared.model, "--output", out, "--json", code=Exit.BAD_INPUT)
    assert "broken.jsonl" in done.json["error"]
    assert "4" in done.json["error"].split("broken.jsonl")[1]
    assert not out.exists()


def test_an_input_that_is_not_there(site: Site, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "dataset"
    refused(
        site, ["prepare", tmp_path / "none.jsonl", "--model", shared.model, "--output", out], "none.jsonl", output=out
    )


def test_a_folder_that_no_extraction_wrote(site: Site, tmp_path: Path) -> None:
    refused(site, ["verify", tmp_path], str(tmp_path), "manifest")


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_gpu_on_a_node_that_has_none(site: Site, shared: Shared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(site, ["launch", *shared.extract(out, "--gpus", "0")], "0", "GPU", output=out)


@pytest.fixture
def with_gpus(site: Site) -> Iterator[Site]:
    """The same site with two idle GPUs, as nvidia-smi tells of them."""
    saved = dict(site.env)
    site.env |= {
        "PATH": f"{FAKES}{os.pathsep}{site.env['PATH']}",
        "DFLASH_TUI_FAKE_SMI": str(RECORDING),
        "DFLASH_TUI_FAKE_GPUS": "2",
        "DFLASH_TUI_FAKE_SMI_PHASE": "idle",
    }
    yield site
    site.env.clear()
    site.env.update(saved)


def test_a_gpu_index_that_does_not_exist(with_gpus: Site, shared: Shared, tmp_path: Path) -> None:
    (status,) = with_gpus.run("status", "--json").json
    assert [gpu["index"] for gpu in status["metrics"]["gpus"]] == [0, 1]
    out = tmp_path / "out"
    refused(with_gpus, ["launch", *shared.extract(out, "--gpus", "0,7")], "7", output=out)


HOLD = """
import json, sys
from dflash_tui.link import LinkOptions, NodeLink, new_job_id, parse_target
from dflash_tui.node.protocol import Launch
link = NodeLink(parse_target("local"), lambda fact: None, LinkOptions(default_python=sys.executable))
link.start()
link.wait_live(120)
launch = Launch("holder", "prepare", "", json.loads(sys.argv[1]), ("1",))
print(link.launch(new_job_id("prepare"), launch).result(120).id)
link.close()
"""


def test_a_gpu_that_another_job_holds(
    with_gpus: Site, state_dir: Path, shared: Shared, conversations: Path, tmp_path: Path
) -> None:
    # Without CUDA no extraction can hold a card; any other job can, and this one takes long enough.
    spec = {"model": str(shared.model), "inputs": [str(conversations)] * 1000, "output": str(tmp_path / "first")}
    command = [sys.executable, "-c", HOLD, json.dumps(spec)]
    holder = subprocess.run(command, env=with_gpus.env, capture_output=True, text=True, check=True).stdout.strip()
    job = JobFolder(state_dir, holder)
    try:
        out = tmp_path / "second"
        refused(with_gpus, ["launch", *shared.extract(out, "--gpus", "1")], holder, output=out)
        refused(with_gpus, ["launch", *shared.extract(out, "--gpus", "0,1")], holder, output=out)
        free = with_gpus.run("plan", *shared.extract(out, "--gpus", "0"), code=None)
        assert holder not in free.err
        assert not job.ended, "the holder ended before the questions"
    finally:
        with_gpus.run("stop", holder, "--force", "--wait", "--yes")
    assert job.processes() == {}
    again = with_gpus.run("plan", *shared.extract(out, "--gpus", "1"), code=None)
    assert holder not in again.err
