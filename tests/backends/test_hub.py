"""Names on a hub become folders: the real client, a hub of our own on 127.0.0.1, and everything that goes wrong with one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.hub_jobs import Machine, until
from tests.fakes.hub import Hub

WEIGHTS = os.urandom(400_000)
# As real repositories are: the weights several times over, in several formats.
TINY = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"chat_template": "x"}',
    "model-00001-of-00002.safetensors": WEIGHTS[:250_000],
    "model-00002-of-00002.safetensors": WEIGHTS[250_000:],
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "pytorch_model.bin": WEIGHTS,
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": WEIGHTS,
    "original/model.safetensors": WEIGHTS,
    "tiny-q4.gguf": WEIGHTS,
    "README.md": b"# Tiny",
    "additional_chat_templates/tools.jinja": b"x",
}
SMALL = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model.safetensors.index.json", "additional_chat_templates/tools.jinja"),
}
NEEDED = SMALL | {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
TOKEN = "hf_aTokenOfTheTests"


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/tiny", dict(TINY))
    hub.tokens |= {TOKEN, "hf_ofSomebodyElse"}
    hub.may_read.add(TOKEN)
    try:
        yield hub
    finally:
        hub.close()


@pytest.fixture
def machine(tmp_path: Path, hub: Hub) -> Machine:
    return Machine(tmp_path, hub)


def snapshot(machine: Machine, hub: Hub, name: str = "org/tiny") -> Path:
    commit = hub.repositories[f"models/{name}"].commit
    return machine.cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# What is downloaded.


def test_a_model_arrives_with_what_is_needed_and_its_weights_once(machine: Machine, hub: Hub) -> None:
    done = machine.run()
    assert done.status == 0, done.err
    folder = snapshot(machine, hub)
    assert done.last["spec"]["model"] == str(folder)
    assert files(folder) == NEEDED
    assert sorted(hub.downloads()) == sorted(NEEDED)
    total = sum(len(TINY[name]) for name in NEEDED)
    assert [found["phase"] for found in done.of("phase")] == [
        f"downloading org/tiny, commit {folder.name[:12]}: {total:,} bytes"
    ]
    told = done.of("progress")
    assert (told[0]["done"], told[-1]["done"], told[-1]["total"]) == (0, total, total)
    assert {(each["unit"], each["phase"], each["samples_per_s"]) for each in told} == {
        ("bytes", "downloading org/tiny", None)
    }


def test_a_tokenizer_alone_comes_without_the_weights(machine: Machine, hub: Hub) -> None:
    done = machine.run("prepare", machine.spec("prepare", inputs=["x.jsonl"]))
    assert done.status == 0, done.err
    assert files(snapshot(machine, hub)) == SMALL


def test_what_is_in_the_cache_is_not_downloaded_again(machine: Machine, hub: Hub) -> None:
    assert machine.run().status == 0
    hub.seen.clear()
    again = machine.run()
    assert (again.status, hub.downloads(), again.of("progress")) == (0, [], [])
    hub.seen.clear()
    commit = snapshot(machine, hub).name
    assert machine.run(spec=machine.spec(model=f"org/tiny@{commit}")).status == 0
    assert not [path for _, path, _ in hub.seen if "org/tiny" in path]


@pytest.mark.parametrize("without", ["a network", "being allowed to ask"])
def test_a_whole_copy_in_the_cache_is_used_without_the_hub(machine: Machine, hub: Hub, without: str) -> None:
    commit = json.loads(json.dumps(machine.run().last["spec"]["model"])).rpartition("/")[2]
    env = {"HF_HUB_OFFLINE": "1"} if without == "being allowed to ask" else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = machine.run(env=env)
    assert done.status == 0, done.err
    assert done.last["spec"]["model"].endswith(commit)
    [warning] = done.of("warning")
    assert f"the copy in the cache is used, commit {commit[:12]}" in warning["message"]


def test_a_copy_with_a_missing_shard_is_not_taken_for_whole(machine: Machine, hub: Hub) -> None:
    assert machine.run().status == 0
    (snapshot(machine, hub) / "model-00002-of-00002.safetensors").unlink()
    assert "cannot be reached" in machine.run(env={"HF_ENDPOINT": "http://127.0.0.1:9"}).line
    hub.seen.clear()
    assert machine.run().status == 0
    assert files(snapshot(machine, hub)) == NEEDED


def test_a_folder_that_is_there_wins_and_hf_means_the_hub(machine: Machine, hub: Hub) -> None:
    (machine.folder / "org" / "tiny").mkdir(parents=True)
    assert machine.run().last["spec"]["model"] == "org/tiny"
    assert machine.run(spec=machine.spec(model="/org/tiny")).last["spec"]["model"] == "/org/tiny"
    assert machine.run(spec=machine.spec(model="./org/tiny")).last["spec"]["model"] == "./org/tiny"
    assert hub.seen == []
    assert machine.run(spec=machine.spec(model="hf://org/tiny")).last["spec"]["model"] == str(snapshot(machine, hub))


def test_more_samples_of_a_folder_come_from_the_commit_of_the_first(machine: Machine, hub: Hub) -> None:
    first = hub.repositories["models/org/tiny"].commit
    assert machine.run().status == 0
    (machine.folder / "out").mkdir()
    header = {"manifest": 1, "model_hub": "org/tiny", "model_commit": first}
    (machine.folder / "out" / "manifest.jsonl").write_text(json.dumps(header) + "\n")
    hub.repositories["models/org/tiny"].files["README.md"] = b"# Another commit"
    assert hub.repositories["models/org/tiny"].commit != first
    assert machine.run().last["spec"]["model"].endswith(first)
    elsewhere = machine.spec(output=str(machine.folder / "elsewhere"))
    assert machine.run(spec=elsewhere).last["spec"]["model"] == str(snapshot(machine, hub))


# Stops, and transfers that break.


def test_a_stop_in_the_middle_keeps_whole_files_and_the_same_again_goes_on(machine: Machine, hub: Hub) -> None:
    hub.faults.hold = threading.Event()
    run = machine.begin("extract", machine.spec())
    until(lambda: hub.holding.is_set(), "a transfer in its middle")
    folder = machine.cache / "models--org--tiny"
    until(
        lambda: {p.name for p in folder.glob("snapshots/*/*.json")} >= {"config.json", "tokenizer.json"}, "small files"
    )
    run.stop()
    done = run.wait()
    assert (done.status, done.last["event"]) == (3, "interrupted"), done
    assert "files that are whole are kept" in done.last["message"]
    assert not list(folder.rglob("*.incomplete"))
    hub.faults.hold.set()
    hub.faults.hold = None
    hub.seen.clear()
    assert machine.run().status == 0
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= set(hub.downloads())
    assert "config.json" not in hub.downloads()
    assert files(snapshot(machine, hub)) == NEEDED


def test_half_files_that_a_killed_download_left_are_removed_and_young_or_foreign_ones_are_not(
    machine: Machine, hub: Hub
) -> None:
    blobs = machine.cache / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    dead, young, foreign = (blobs / f"{'a' * 64}.{name}incomplete" for name in ("0123abcd.", "4567abcd.", ""))
    for path in (dead, young, foreign):
        path.write_bytes(b"half")
    for path in (dead, foreign):
        os.utime(path, (1, 1))
    assert machine.run().status == 0
    assert (dead.exists(), young.exists(), foreign.exists()) == (False, True, True)


SMALL_DISK = 'mount -t tmpfs -o size=700k none "$1" && shift && exec "$@"'


def test_a_disk_that_fills_up_during_the_download_is_said(machine: Machine, hub: Hub) -> None:
    folder = machine.home / "hf"
    folder.mkdir()
    hub.faults.hold = threading.Event()
    around = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh", str(folder)]
    run = machine.begin("extract", machine.spec(), around=around)
    until(hub.holding.is_set, "a transfer in its middle")
    filler = Path(f"/proc/{run.process.pid}/root{folder}/filler")
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    hub.faults.hold.set()
    done = run.wait()
    assert done.status == 2, done
    assert f"the disk of the hub's cache {folder}/hub is full" in done.line
    assert "HF_HOME" in done.line


def test_a_transfer_that_breaks_off_goes_on_by_itself(machine: Machine, hub: Hub) -> None:
    hub.faults.cut = 1
    done = machine.run()
    assert done.status == 0, done.err
    assert (
        b"".join((snapshot(machine, hub) / f"model-0000{i}-of-00002.safetensors").read_bytes() for i in (1, 2))
        == WEIGHTS
    )


def test_a_file_of_another_size_than_the_hub_says_is_refused(machine: Machine, hub: Hub) -> None:
    hub.faults.wrong_size = True
    done = machine.run()
    assert done.status == 1
    assert "run it again: files that are whole are kept" in done.line


def test_a_disk_without_room_is_known_before_the_download(machine: Machine, hub: Hub) -> None:
    spec = machine.spec(min_free_bytes=1 << 60)
    done = machine.run(spec=spec)
    assert done.status == 2
    assert "bytes of org/tiny are to be downloaded" in done.line
    assert "HF_HOME" in done.line
    assert hub.downloads() == []


# Refusals.


def refusal(machine: Machine, status: int, model: str = "org/tiny", **options: Any) -> str:
    done = machine.run(spec=machine.spec(model=model), **options)
    assert done.status == status, done
    assert TOKEN not in done.out + done.err + json.dumps(done.events)
    return done.line


def test_a_gated_model_names_its_page_and_the_token(machine: Machine, hub: Hub) -> None:
    hub.add("org/gated", dict(TINY), gated=True)
    without = refusal(machine, 2, "org/gated")
    assert "is gated, and no token was sent" in without
    assert f"accept its terms at {hub.url}/org/gated" in without
    assert "--hf-token-file" in without
    assert "the token's account has no access" in refusal(machine, 2, "org/gated", token="hf_ofSomebodyElse")
    done = machine.run(spec=machine.spec(model="org/gated"), token=TOKEN)
    assert done.status == 0
    # What the runner's workers inherit.
    assert "DFLASH_TUI_SECRETS_FD" not in done.last["environment"]
    assert TOKEN not in json.dumps(done.last)


def test_a_private_model_is_as_if_it_were_not_there(machine: Machine, hub: Hub) -> None:
    hub.add("org/private", dict(TINY), private=True)
    said = refusal(machine, 2, "org/private")
    assert said.startswith("no folder on the node is called org/private, and the hub")
    assert "for a private one give a token" in said
    assert machine.run(spec=machine.spec(model="org/private"), token=TOKEN).status == 0


def test_a_token_that_is_wrong_is_said(machine: Machine, hub: Hub) -> None:
    assert "refuses the token (401)" in refusal(machine, 2, token="hf_wrong")


def test_the_nodes_own_login_serves_where_no_token_is_sent(machine: Machine, hub: Hub) -> None:
    hub.add("org/gated", dict(TINY), gated=True)
    (machine.home / "hf").mkdir()
    (machine.home / "hf" / "token").write_text(TOKEN + "\n")
    assert machine.run(spec=machine.spec(model="org/gated")).status == 0


def test_names_that_nobody_has_are_said_with_both_meanings(machine: Machine) -> None:
    said = refusal(machine, 2, "models/qwen3")
    assert "no folder on the node is called models/qwen3" in said
    assert "has no model models/qwen3" in said
    assert "begin a folder with / or ./" in said
    assert "has no revision 'v9'" in refusal(machine, 2, "org/tiny@v9")
    assert "is no name of a model" in refusal(machine, 2, "hf://org")


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (429, {"Retry-After": "17"}, ("too many requests (429)", "run it again in 17 s", "with a token")),
        (503, {}, ("fails (503)", "run it again later")),
        (403, {}, ("does not let the hub's model org/tiny be read (403)", "--hf-token-file")),
    ],
)
def test_a_hub_that_does_not_serve_is_said(
    machine: Machine, hub: Hub, status: int, headers: dict[str, str], words: tuple[str, ...]
) -> None:
    hub.faults.status, hub.faults.headers = status, headers
    said = refusal(machine, 2 if status == 403 else 1)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("why", ["no network", "offline"])
def test_without_a_network_every_way_out_is_named(machine: Machine, why: str) -> None:
    env = {"HF_HUB_OFFLINE": "1"} if why == "offline" else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    said = refusal(machine, 1, env=env)
    ways = ("hf download org/tiny --local-dir", "rsync", "HF_HOME", *(["HF_ENDPOINT"] if why == "no network" else []))
    assert all(way in said for way in ways), said


def test_a_repository_that_is_no_transformers_model_is_refused(machine: Machine, hub: Hub) -> None:
    hub.add("org/gguf", {"tiny-q4.gguf": WEIGHTS})
    assert "has no config.json" in refusal(machine, 2, "org/gguf")
    hub.add("org/shell", {"config.json": b"{}"})
    assert "has no weights" in refusal(machine, 2, "org/shell")
