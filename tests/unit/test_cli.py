"""The command line: where options may stand, how each kind of trouble ends, and what is not loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backends.spec import ExtractSpec, SpecError
from dflash_tui import cli
from dflash_tui.commands.outcome import EXIT_CODES_HELP, CommandError, Exit, of_job, of_link_error
from dflash_tui.commands.plan import extract_order
from dflash_tui.config import Settings
from dflash_tui.fleet.facts import Job, JobState
from dflash_tui.link import LinkError, RequestRefused
from dflash_tui.node import protocol

EXTRACT = ["--model", "/m/tiny", "--dataset", "/d", "--output", "/o"]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("DFLASH_TUI_CONFIG", raising=False)
    return tmp_path


def settings_of(*words: str) -> Settings:
    return cli.settings_of(cli.make_parser().parse_args(words))


def test_options_of_the_console_stand_before_or_after_the_command() -> None:
    before = settings_of("--host", "a", "--python", "/p", "--read-only", "--theme", "chalk", "jobs")
    after = settings_of("jobs", "--host", "a", "--python", "/p", "--read-only", "--theme", "chalk")
    assert before == after
    assert (before.hosts, before.read_only, before.theme, before.python_for("a")) == (("a",), True, "chalk", "/p")


def test_hosts_before_and_after_the_command_add_up_each_once() -> None:
    assert settings_of("--host", "a", "--host", "b", "status", "--host", "b", "--host", "c").hosts == ("a", "b", "c")


def test_without_a_host_a_command_takes_those_of_the_configuration_and_else_local(own_home: Path) -> None:
    assert settings_of("status").hosts == ("local",)
    (own_home / "dflash-tui").mkdir()
    (own_home / "dflash-tui" / "config.toml").write_text('hosts = ["a", "b"]\n[python]\na = "/p"')
    assert settings_of("status").hosts == ("a", "b")
    assert settings_of("status", "--host", "c").hosts == ("c",)
    assert settings_of("status").python_for("a") == "/p"
    assert settings_of("--python", "/q", "status").python_for("a") == "/q"


def test_the_console_without_a_host_says_how_to_name_one(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == Exit.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "--host local" in line
    assert "config.toml" in line


def test_every_option_of_an_extraction_reaches_its_spec() -> None:
    words = "--layers 2,5,8 --dtype float32 --device cpu --gpus 0,GPU-1 --share --backend hf --first 3 --last 9"
    more = "--pack-tokens 512 --max-sample-tokens 99 --min-free-bytes 7 --worker-restarts 0"
    options = [*words.split(), *more.split()]
    order = extract_order(cli.make_parser().parse_args(["launch", *EXTRACT, *options]), "node")
    assert order.spec == ExtractSpec(
        model="/m/tiny",
        dataset="/d",
        output="/o",
        backend="hf",
        layers=(2, 5, 8),
        dtype="float32",
        device="cpu",
        first=3,
        last=9,
        pack_tokens=512,
        max_sample_tokens=99,
        min_free_bytes=7,
        worker_restarts=0,
    )
    assert (order.gpus, order.share, order.name) == (("0", "GPU-1"), True, "o")


@pytest.mark.parametrize("verb", ["plan", "launch"])
def test_what_stands_after_two_dashes_is_for_vllm_untouched(verb: str) -> None:
    words = [*EXTRACT, "--backend", "vllm", "--tensor-parallel", "2", "--vllm-python", "/v/bin/python"]
    engine = ["--", "--max-num-seqs", "64", "--host", "--enforce-eager"]
    spec = extract_order(cli.make_parser().parse_args([verb, *words, *engine]), "node").spec
    assert isinstance(spec, ExtractSpec)
    assert (spec.backend, spec.tensor_parallel, spec.vllm_python) == ("vllm", 2, "/v/bin/python")
    assert spec.extra_args == ("--max-num-seqs", "64", "--host", "--enforce-eager")
    with pytest.raises(SpecError, match=r"extra_args \(stray\) is of the backend vllm"):
        extract_order(cli.make_parser().parse_args([verb, *EXTRACT, "stray"]), "node")


def test_without_options_the_spec_keeps_its_own_defaults() -> None:
    order = extract_order(cli.make_parser().parse_args(["plan", *EXTRACT]), "node")
    assert order.spec == ExtractSpec(model="/m/tiny", dataset="/d", output="/o")


def test_a_path_on_this_machine_may_be_relative_and_elsewhere_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--model", "m", "--dataset", "~/d", "--output", "../o"]
    spec = extract_order(cli.make_parser().parse_args(words), "local").spec
    assert isinstance(spec, ExtractSpec)
    assert (spec.model, spec.dataset) == (str(tmp_path / "m"), str(tmp_path / "d"))
    with pytest.raises(CommandError, match="'m' is no whole path") as caught:
        extract_order(cli.make_parser().parse_args(words), "gpu-1")
    assert "gpu-1" in caught.value.remedy


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fly"], "fly"),
        (["--colour"], "--colour"),
        (["launch", "--model", "/m"], "--dataset"),
        (["plan", *EXTRACT, "--layers", "two"], "'two'"),
        (["plan", *EXTRACT, "--layers", "8,2"], "must rise"),
        (["plan", *EXTRACT, "--layers", "9999999999999999999,x"], "layer ids"),
        (["plan", *EXTRACT, "--first", "-1"], "first"),
        (["plan", *EXTRACT, "--first", "4", "--last", "4"], "last"),
        (["plan", *EXTRACT, "--gpus", "0,0"], "'0,0'"),
        (["plan", *EXTRACT, "--dtype", "int3"], "int3"),
        (["plan", *EXTRACT, "--host", "gpu-1:99999"], "99999"),
        (["plan", *EXTRACT, "--host", "-oProxyCommand=x"], "--host"),
        (["launch", *EXTRACT, "--host", "a", "--host", "b"], "a, b"),
        (["launch", *EXTRACT, "--read-only"], "read-only"),
        (["stop", "j", "--read-only"], "read-only"),
        (["restart", "j", "--read-only"], "read-only"),
        (["prepare", "f", "--model", "/m", "--output", "/o", "--read-only"], "read-only"),
        (["verify", "/o", "--read-only"], "read-only"),
        (["export", "/o", "--to", "/e", "--read-only"], "read-only"),
        (["export", "/o"], "--to"),
        (["export", "/o", "--to", "/e", "--rows-per-folder", "0"], "rows_per_folder"),
        (["demo", "--read-only"], "read-only"),
        (["demo", "--host", "gpu-1"], "gpu-1"),
        (["verify", ""], "path is empty"),
        (["verify", "/o", "--recompute", "-1"], "recompute"),
        (["prepare", "f", "--model", "/m", "--output", "/o", "--limit", "0"], "limit"),
        (["logs", "j", "-f", "--json"], "--json"),
        (["logs", "j", "-n", "-1"], "--lines"),
        (["logs"], "JOB"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_usage_is_one_line_that_names_it_and_code_2(
    words: list[str], named: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if as_json and "--json" not in words:
        words = [*words, "--json"]
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert code == Exit.BAD_INPUT, err
    (line,) = err.splitlines()
    assert named in line
    if as_json or "--json" in words:
        document = json.loads(out)
        assert named in f"{document['error']}: {document['remedy']}"
        assert document["exit_code"] == 2
    else:
        assert out == ""


def test_a_fault_in_the_configuration_ends_every_command_with_its_line(
    own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_home / "dflash-tui").mkdir()
    (own_home / "dflash-tui" / "config.toml").write_text("colour = 3")
    for words in ([], ["status"], ["demo"]):
        assert cli.main(words) == Exit.BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert "config.toml" in line
        assert "'colour'" in line


def test_help_tells_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for code in Exit:
        assert f"\n  {int(code)} " in EXIT_CODES_HELP
    for words in (["--help"], *([name, "--help"] for name in cli.COMMANDS)):
        assert cli.main(words) == 0
        assert EXIT_CODES_HELP.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "worker", "code"),
    [
        (JobState.DONE, 0, Exit.OK),
        (JobState.INTERRUPTED, 3, Exit.INTERRUPTED),
        (JobState.FAILED, 1, Exit.FAILED),
        (JobState.FAILED, 2, Exit.BAD_INPUT),
        (JobState.FAILED, 0, Exit.FAILED),
        (JobState.KILLED, None, Exit.FAILED),
        (JobState.LOST, None, Exit.FAILED),
        (JobState.ORPHANED, None, Exit.FAILED),
    ],
)
def test_the_exit_code_follows_from_how_the_job_ended(state: JobState, worker: int | None, code: Exit) -> None:
    assert of_job(Job("j", "n", "extract", state, 0.0, exit_code=worker)) is code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LinkError("bad-target", "m"), Exit.BAD_INPUT),
        (LinkError("changed-host-key", "m"), Exit.UNREACHABLE),
        (LinkError("lost", "m"), Exit.UNREACHABLE),
        (RequestRefused(protocol.NOT_FOUND, "m"), Exit.NOT_FOUND),
        (RequestRefused(protocol.GPU_LOCKED, "m"), Exit.BAD_INPUT),
        (RequestRefused(protocol.PYTHON_UNUSABLE, "m"), Exit.BAD_INPUT),
        (RequestRefused(protocol.INTERNAL, "m"), Exit.FAILED),
    ],
)
def test_the_exit_code_tells_a_refusal_from_a_host_out_of_reach(error: LinkError, code: Exit) -> None:
    assert of_link_error(error).code is code


def test_a_fault_of_ours_goes_to_a_file_and_shows_no_traceback(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(words: list[str]) -> int:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(cli, "_run", broken)
    assert cli.main(["status", "--json"]) == Exit.FAILED
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    (file,) = (own_home / "dflash-tui").glob("crash-*.txt")
    assert str(file) in line
    assert "Traceback" in file.read_text()
    assert "ZeroDivisionError" in json.loads(out)["error"]


def test_a_fault_of_ours_is_told_even_where_no_file_can_be_written(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_home / "dflash-tui").write_text("a file where the folder should be")

    def broken(words: list[str]) -> int:
        raise ZeroDivisionError("why")

    monkeypatch.setattr(cli, "_run", broken)
    assert cli.main(["status"]) == Exit.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: why" in line


def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["status"]) == Exit.CTRL_C
    assert capsys.readouterr().err == "dflash-tui: interrupted\n"


def test_a_reader_that_goes_away_ends_it_without_a_word() -> None:
    command = [sys.executable, "-m", "dflash_tui.cli", "fly", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait() in (Exit.BAD_INPUT, Exit.BROKEN_PIPE)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_the_commands_load_neither_torch_nor_paramiko_nor_textual() -> None:
    script = (
        "import sys, dflash_tui.cli as cli\n"
        "cli.make_parser(); cli.main(['fly'])\n"
        "print([name for name in ('torch', 'paramiko', 'textual', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
