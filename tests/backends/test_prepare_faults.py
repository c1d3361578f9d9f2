"""Bad conversations, models and places: one line each, and the output is whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conversation_rows import chat, parts, run_prepare, write_lines

from backends.dataset import PreparedDataset
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.prepare import RECORD, PrepareError, prepare
from backends.sources import SourceError
from backends.spec import PrepareSpec
from backends.template import TemplateError


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["qwen3"]


# --- bad input: nothing is written ---


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"conversations": [', "line 3 is not JSON: .* at column"),
        (b"[1, 2]", "line 3 is a JSON list, not an object"),
        (b'{"text": "hi", "id": 3}', r"line 3 has no list `conversations` or `messages` \(its keys: text, id\)"),
        (b'{"conversations": ["hi"]}', "line 3 has a turn without `role` or `from`"),
        (b'{"conversations": "\xff"}', "line 3 is not UTF-8"),
        (b'{"n": ' + b"9" * 5000 + b"}", "line 3 is not JSON that can be read"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_written(model: Path, tmp_path: Path, line: bytes, words: str) -> None:
    good = json.dumps(chat("2+2?", "4")).encode()
    source = tmp_path / "in.jsonl"
    # After a good line and an empty one, and before another good one.
    source.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    with pytest.raises(SourceError, match=words) as caught:
        run_prepare(model, tmp_path / "out", str(source))
    assert str(source) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + json.dumps(chat("2+2?", "4")).encode() + b"\r\n")
    assert run_prepare(model, tmp_path / "out", str(source))["samples"] == 1


def test_missing_and_empty_files_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"missing\.jsonl cannot be read"):
        run_prepare(model, tmp_path / "out", str(tmp_path / "missing.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(SourceError, match=r"empty\.jsonl holds no conversation"):
        run_prepare(model, tmp_path / "out", str(empty))


def test_a_model_without_tokenizer_or_template_is_refused(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    with pytest.raises(TemplateError, match="nowhere is not a folder"):
        run_prepare(tmp_path / "nowhere", tmp_path / "out", source)
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    with pytest.raises(TemplateError, match="bare has no tokenizer"):
        run_prepare(tmp_path / "bare", tmp_path / "out", source)
    shutil.copytree(model, tmp_path / "mute", ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    with pytest.raises(TemplateError, match="has no chat template"):
        run_prepare(tmp_path / "mute", tmp_path / "out", source)


# --- the output: whole or not at all ---


def test_the_same_prepare_again_finishes_at_once_and_changes_nothing(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    first = run_prepare(model, tmp_path / "out", source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    # Neither the name of the file nor that of the model matters, only what is in them.
    renamed = str(Path(source).rename(tmp_path / "renamed.jsonl"))
    again = run_prepare(model, tmp_path / "out", renamed)
    assert again["already_done"] and not first["already_done"]
    assert again["samples"] == first["samples"] == again["done"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_an_output_of_another_prepare_or_of_nobody_is_left_alone(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    run_prepare(model, tmp_path / "out", source)
    with pytest.raises(PrepareError, match=r"holds another dataset \(differs in max_tokens\): delete it or"):
        run_prepare(model, tmp_path / "out", source, max_tokens=100)
    write_lines(tmp_path / "in.jsonl", chat("2+3?", "5"))
    with pytest.raises(PrepareError, match="differs in inputs_sha256"):
        run_prepare(model, tmp_path / "out", source)
    assert parts(model, tmp_path / "out", 0)[1] == "4<|im_end|>\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(PrepareError, match="was not written by `prepare`"):
        run_prepare(model, tmp_path / "mine", source)
    with pytest.raises(PrepareError, match="is a file"):
        run_prepare(model, tmp_path / "in.jsonl", source)


def test_nobody_is_told_to_delete_a_dataset_with_hidden_states_in_its_folder(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    run_prepare(model, tmp_path / "out", source)
    (tmp_path / "out" / "hidden_states").mkdir()
    assert run_prepare(model, tmp_path / "out", source)["already_done"]
    with pytest.raises(
        PrepareError, match="give another output folder; in this one hidden_states would be lost"
    ) as caught:
        run_prepare(model, tmp_path / "out", source, max_tokens=100)
    assert "delete it" not in str(caught.value)


def test_a_dataset_of_an_older_prepare_is_refused_by_its_version(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    run_prepare(model, tmp_path / "out", source)
    record = tmp_path / "out" / RECORD
    record.write_text(record.read_text().replace('"version": 3', '"version": 2'))
    with pytest.raises(PrepareError, match=r"differs in the version of prepare, 2 there and 3 here"):
        run_prepare(model, tmp_path / "out", source)


def test_the_same_conversations_give_the_same_fingerprint_elsewhere(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    for name in ("a", "b"):
        run_prepare(model, tmp_path / name, source)
    assert PreparedDataset(tmp_path / "a").fingerprint == PreparedDataset(tmp_path / "b").fingerprint


def test_a_stop_leaves_nothing_behind(model: Path, tmp_path: Path, conversation_files: tuple[str, str]) -> None:
    answers = iter([False, True])
    spec = PrepareSpec(model=str(model), inputs=conversation_files, output=str(tmp_path / "out"))
    with pytest.raises(Interrupted, match="nothing was written"):
        prepare(spec, EventLog(None), lambda: next(answers))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_prepare_left_is_swept_by_the_next(model: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.preparing"
    (work / "whole").mkdir(parents=True)
    (work / "rows.arrow").write_bytes(b"half")
    (work / "whole" / "state.json").write_text("{}")
    run_prepare(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", chat("2+2?", "4")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]
    assert (tmp_path / "out" / RECORD).is_file()


def test_two_prepares_of_one_output_do_not_disturb_each_other(model: Path, tmp_path: Path) -> None:
    import fcntl

    work = tmp_path / ".out.preparing"
    work.mkdir()
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(JobError, match="another prepare is writing"):
            run_prepare(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", chat("2+2?", "4")))
        assert work.is_dir() and not (tmp_path / "out").exists()
    finally:
        os.close(descriptor)


def test_a_full_disk_is_one_clear_line_and_leaves_no_dataset(model: Path, tmp_path: Path) -> None:
    # A limit on the size of a file stands for the full disk: the same error from the same call, in a process of its own.
    source = write_lines(tmp_path / "in.jsonl", *[chat("2+2?", "four " * 200)] * 50)
    spec = {"model": str(model), "inputs": [source], "output": str(tmp_path / "out")}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    main = Path(sys.modules["backends"].__file__ or "").with_name("__main__.py")
    script = (
        "import resource, signal, runpy, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536));"
        f"sys.argv = ['backends', 'prepare', {str(tmp_path / 'spec.json')!r}];"
        f"runpy.run_path({str(main)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert f"the dataset {tmp_path / 'out'} cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "spec.json"]
