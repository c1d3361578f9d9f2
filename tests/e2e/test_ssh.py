"""Over a real sshd on 127.0.0.1:22280 with a login by key: jobs survive consoles, logs survive connections."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_tui.commands.outcome import Exit
from tests.e2e.conftest import Shared, end_everything_of
from tests.e2e.harness import JobFolder, Site, Terminal, assert_nothing_half, assert_whole, manifest_rows, poll
from tests.e2e.test_console import start_by_form
from tests.sshd import Sshd, running_sshd

PORT = 22280


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with running_sshd(tmp_path_factory.mktemp("node"), PORT, environment=environment) as server:
        yield server
        end_everything_of(server.state / "dflash-tui")


@pytest.fixture
def node(sshd: Sshd) -> list[object]:
    """The options that name the node."""
    import sys

    return ["--host", sshd.target, "--ssh-config", sshd.ssh_config, "--python", sys.executable]


@pytest.fixture
def on_node(sshd: Sshd) -> Path:
    return sshd.state / "dflash-tui"


def test_status_tells_who_the_node_is(site: Site, sshd: Sshd, node: list[object]) -> None:
    (shown,) = site.run("status", *node, "--json").json
    assert (shown["host"], shown["link"], shown["user"]) == (sshd.target, "live", sshd.user)
    assert shown["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert shown["state_dir"] == str(sshd.state / "dflash-tui")


def test_a_job_outlives_the_console_that_is_killed_and_a_new_one_shows_it_done(
    site: Site, node: list[object], on_node: Path, shared: Shared, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    console = terminal(100, 30, *node)
    console.wait_for("1/1 nodes live")
    console.keys("j")
    console.wait_for(r"\[2 Jobs\]")
    by_console = start_by_form(console, on_node, shared.model, shared.dataset, tmp_path / "by_console")
    command = site.run(
        "launch", *node, *shared.extract(tmp_path / "by_command", "--last", 60), "--name", "by-command", "--json"
    ).json
    by_command = JobFolder(on_node, command["job"])
    by_console.wait_done(1)
    console.wait_for("by-command")
    console.kill()
    assert not by_console.ended, "the job was not caught in the middle"
    assert (by_console.wait_ended(), by_command.wait_ended()) == ("done", "done")

    again = terminal(100, 30, *node)
    again.wait_for("1/1 nodes live")
    again.keys("j")
    again.wait_for(r"(?s)done .*100%.*done .*100%")
    (listed,) = site.run("status", *node, "--json").json
    states = {job["id"]: job["state"] for job in listed["jobs"]}
    assert states == {**states, by_console.id: "done", by_command.id: "done"}
    for job, samples in ((by_console, shared.samples), (by_command, 60)):
        assert_whole(job.output, samples)
        verified = site.run("verify", job.output, *node, "--recompute", 2, "--json").json
        assert verified["result"]["verified"] == samples
        assert job.processes() == {}


def test_a_job_that_is_stopped_leaves_no_process_and_no_half_file(
    site: Site, node: list[object], on_node: Path, shared: Shared, tmp_path: Path
) -> None:
    job = JobFolder(on_node, site.run("launch", *node, *shared.extract_long(tmp_path / "out"), "--json").json["job"])
    job.wait_done(10)
    assert site.run("stop", job.id, *node, "--wait", "--json").json["state"] == "interrupted"
    assert job.processes() == {}
    assert_nothing_half(job.output)
    assert 10 <= len(manifest_rows(job.output)) < shared.long_samples


def test_a_followed_log_is_the_file_to_the_byte_after_its_connections_were_cut(
    site: Site, sshd: Sshd, node: list[object], on_node: Path, shared: Shared, tmp_path: Path
) -> None:
    rows = shared.long_samples // 8
    job_of = shared.extract_long(tmp_path / "out", "--last", rows)
    job = JobFolder(on_node, site.run("launch", *node, *job_of, "--json").json["job"])
    copy = tmp_path / "copy"
    with copy.open("wb") as file:
        follower = site.start("logs", "-f", job.id, *node, stdout=file, stderr=subprocess.PIPE)
    for cut in range(1, 4):
        size = copy.stat().st_size
        poll("more of the log", lambda size=size: copy.stat().st_size > size)
        assert sshd.drop_connections() > 0
        assert not job.ended, f"the job ended before cut {cut}"
    _, err = follower.communicate(timeout=240)
    assert follower.returncode == Exit.OK, err
    assert b"trying again" in err
    assert job.wait_ended() == "done"
    assert hashlib.sha256(copy.read_bytes()).digest() == hashlib.sha256((job.path / "log").read_bytes()).digest()
    assert_whole(job.output, rows)


def test_a_wait_outlives_its_connection(
    site: Site, sshd: Sshd, node: list[object], on_node: Path, shared: Shared, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    waiting = site.start(
        "launch",
        *node,
        *shared.extract(output, "--last", 120),
        "--wait",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    poll("the first samples", lambda: len(manifest_rows(output)) >= 2)
    sshd.drop_connections()
    out, err = waiting.communicate(timeout=240)
    assert waiting.returncode == Exit.OK, err
    assert b"the job goes on there" in err
    assert JobFolder(on_node, out.decode().strip()).state == "done"
    assert_whole(output, 120)
