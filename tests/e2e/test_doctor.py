"""`dflash-tui doctor` as a user types it: through a real sshd, with several hosts, at 80 columns, and for scripts."""

from __future__ import annotations

import json
import re
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.commands.outcome import Exit
from tests.backends.vllm_environments import environment
from tests.e2e.harness import Site, Terminal
from tests.sshd import Sshd, running_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("node")) as server:
        yield server


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return str(folder / "bin" / "python")


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


def test_two_hosts_are_looked_at_at_once_and_a_problem_shows_in_the_exit_code(
    site: Site, sshd: Sshd, bare: str, tmp_path: Path
) -> None:
    hosts = ["--host", sshd.target, "--host", "local", "--ssh-config", sshd.ssh_config, "--python", bare]
    done = site.run("doctor", *hosts, "--path", tmp_path / "states", "--json", code=Exit.FAILED)
    over_ssh, local = done.json
    assert (over_ssh["host"], local["host"]) == (sshd.target, "local")
    for document in (over_ssh, local):
        found = by_name(document)
        assert found["packages"]["status"] == "problem"
        assert found["packages"]["remedy"].endswith(f"dflash-tui setup --host {document['host']}")
        assert "MB/s" in found[f"disk {tmp_path}/states"]["found"]
        assert found["file locks"]["status"] == "ok" and found["clock"]["status"] == "ok"
        assert document["problems"] == sum(check["status"] == "problem" for check in document["checks"])
        assert set(document["checks"][0]) == {"name", "status", "found", "remedy"}
    assert str(sshd.state) in by_name(over_ssh)["state folder"]["found"]
    assert done.err == ""


def test_a_host_that_is_down_hides_no_other(site: Site, sshd: Sshd, bare: str) -> None:
    hosts = ["--host", "nobody@127.0.0.1:1", "--host", sshd.target, "--ssh-config", sshd.ssh_config]
    done = site.run("doctor", *hosts, "--python", bare, "--read-only", "--json", code=Exit.UNREACHABLE)
    down, up = done.json
    assert down["exit_code"] == Exit.UNREACHABLE and down["remedy"]
    assert "packages" in by_name(up) and "file locks" not in by_name(up)
    assert len(done.err.splitlines()) == 1


def test_the_table_fits_80_columns_with_the_problem_on_top(terminal: Callable[..., Terminal], bare: str) -> None:
    shown = terminal(80, 60, "doctor", "--python", bare, "--read-only")
    shown.wait_for(r"\* ok +clock")
    lines = shown.screen.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("local: 1 problem"))
    assert re.match(r"status +check +found", lines[first + 1])
    assert re.match(r"! problem +packages +\S", lines[first + 2])
    column = lines[first + 1].index("found")
    last = next(number for number, line in enumerate(lines) if re.match(r"\* ok +clock", line))
    for line in lines[first + 2 : last]:
        # A long line goes on under its own column, not at the edge of the terminal.
        assert re.match(r"[!~?*] ", line) or line[:column].isspace(), line


def test_the_console_shows_it_from_the_palette(terminal: Callable[..., Terminal], bare: str) -> None:
    console = terminal(80, 24, "--host", "local", "--python", bare)
    console.wait_for("1/1 nodes live")
    console.keys("C-p")
    console.wait_for("Search for commands")
    console.type("doctor")
    console.wait_for("What local can do")
    console.keys("Enter")
    console.wait_for(r"(?s)Doctor: local.*! problem +packages.*-> ")
    console.keys("Escape")
    console.wait_for(r"\[1 Fleet\]")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--limit", "0"), "is not a number of seconds from 1 to 600"),
        (("--limit", "soon"), "'soon' is not a number of seconds"),
        (("--path", ""), "a path is empty"),
    ],
)
def test_bad_options_are_one_line(site: Site, words: tuple[str, ...], told: str) -> None:
    done = site.run("doctor", *words, code=Exit.BAD_INPUT)
    assert told in done.line


def test_the_exit_code_is_0_exactly_where_there_is_no_problem(site: Site) -> None:
    done = site.run("doctor", "--python", sys.executable, "--limit", 120, "--json", code=None)
    (document,) = done.json
    found = by_name(document)
    assert {found[name]["status"] for name in ("worker Python", "torch", "transformers", "datasets")} == {"ok"}
    # A container with 64 MiB of shared memory, say, is a problem that this test cannot mend.
    assert done.code == (Exit.FAILED if document["problems"] else Exit.OK)


def model_folder(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), 64)
    text = {"model_type": "qwen3", "num_hidden_layers": 8, "num_key_value_heads": 2, **sizes, **fields}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def test_a_model_is_judged_for_hf_and_for_every_vllm_of_the_node(site: Site, sshd: Sshd, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    old = environment(tmp_path / "old", "0.16.0")
    hosts = ["--host", sshd.target, "--ssh-config", sshd.ssh_config, "--python", sys.executable]
    asked = ["doctor", "--model", model, "--dtype", "float32", "--cpu", "--vllm-python", old, *hosts]
    (document,) = site.run(*asked, "--json").json
    assert (document["host"], document["family"], document["dtype"]) == (sshd.target, "qwen3", "float32")
    assert document["hf"]["ok"] is True and document["hf"]["packing"] == "packs"
    assert [(one["version"], one["ok"]) for one in document["vllm"]] == [("0.16.0", False)]
    told = site.run(*asked).out
    assert f"{model}: qwen3 in float32 on the CPU" in told
    assert re.search(r"! problem +vLLM 0\.16\.0 .*no extract_hidden_states yet", told)
    assert re.search(r"\* ok +hf .*Qwen3 is known, 8 blocks", told)


def test_a_model_that_nothing_here_can_extract_from_shows_in_the_exit_code(site: Site, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", model_type="mamba9")
    done = site.run("doctor", "--model", model, "--python", sys.executable, code=Exit.FAILED)
    assert "the model family 'mamba9'" in done.out and re.search(r"~ warning +vLLM +none is found", done.out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "/nowhere"], "local: the model /nowhere is not a folder: give the folder"),
        (["--gpus", "0"], "--gpus without --model means nothing: name the model"),
        (["--model", "/nowhere", "--vllm-options"], "--model and --vllm-options are two questions"),
        (["--model", "/nowhere", "--path", "/data"], "--path is of the checkup"),
        (["--model", "/nowhere", "--tensor-parallel", "0"], "tensor_parallel must be a whole number of at least 1"),
        (
            ["--vllm-options", "--vllm-python", "/nowhere/python"],
            "the Python /nowhere/python (--vllm-python) is not on",
        ),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(site: Site, words: list[str], told: str) -> None:
    done = site.run("doctor", *words, "--python", sys.executable, code=Exit.BAD_INPUT)
    assert told in done.err and len(done.err.splitlines()) == 1 and not done.out
