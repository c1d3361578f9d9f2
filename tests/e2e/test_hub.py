"""A gated model and a dataset by name on a node behind a real sshd: the token of this machine goes along, and stays nowhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Shared, end_everything_of
from tests.e2e.harness import JobFolder, Site
from tests.fakes.hub import Hub
from tests.sshd import Sshd, running_sshd

PORT = 22287
TOKEN = "hf_ofThisMachineAlone42"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with running_sshd(tmp_path_factory.mktemp("node"), PORT, environment=environment) as server:
        yield server
        end_everything_of(server.state / "dflash-tui")


@pytest.fixture
def hub(shared: Shared, conversations: Path) -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/gated", shared.model, gated=True)
    lines = conversations.read_bytes().splitlines(keepends=True)
    hub.add("org/chats", {"train.jsonl": b"".join(lines[:8])}, kind="datasets", private=True)
    hub.tokens.add(TOKEN)
    hub.may_read.add(TOKEN)
    try:
        yield hub
    finally:
        hub.close()


def holders(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_names_and_the_token_of_this_machine_work_on_a_node_and_the_token_stays_nowhere(
    site: Site, sshd: Sshd, hub: Hub, tmp_path: Path
) -> None:
    node = ["--host", sshd.target, "--ssh-config", sshd.ssh_config, "--python", sys.executable]
    where = ["--env", f"HF_ENDPOINT={hub.url}", "--env", f"HF_HOME={tmp_path / 'hf'}"]
    words = ["prepare", "hf://datasets/org/chats", "--model", "org/gated", "--output", tmp_path / "out", *node, *where]
    refused = site.run(*words, "--json", code=2)
    assert "has no dataset org/chats" in refused.json["error"] or "is gated" in refused.json["error"]
    (tmp_path / "token").write_text(TOKEN + "\n")
    done = site.run(*words, "--hf-token-file", tmp_path / "token", "--json").json
    assert (done["state"], done["result"]["samples"]) == ("done", 8)
    job = JobFolder(sshd.state / "dflash-tui", done["job"])
    phases = [event["phase"] for event in job.events if event["event"] == "phase"]
    assert any("downloading org/gated" in phase for phase in phases)
    assert any("downloading org/chats" in phase for phase in phases)
    (tmp_path / "token").unlink()
    assert [*holders(sshd.state), *holders(tmp_path), *holders(site.home)] == []
    # Its restart names the same hub, and has what the first one downloaded.
    again = site.run("restart", done["job"], *node, "--wait", "--json", HF_TOKEN=TOKEN).json
    assert (again["state"], again["result"]["already_done"]) == ("done", True)
    assert [*holders(sshd.state), *holders(tmp_path), *holders(site.home)] == []
