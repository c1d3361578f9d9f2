"""Places in files and their text, and a job's start as text for a shell. Pure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_tui.fleet.source import FRAME, Place, SourceText, lines_of, place_of, safe
from dflash_tui.fleet.started import StartedServer, StartedWith, quoted, runner_text, started_text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/a/b.py:12", Place("/a/b.py", 12)),
        ("/a/b.py", Place("/a/b.py")),
        ("/a/b.py:0", Place("/a/b.py:0")),
        ("/a/b:c.py", Place("/a/b:c.py")),
        ("/a/b.py:7:12", Place("/a/b.py:7", 12)),
        (":12", Place(":12")),
        ("/a/b.py:" + "9" * 12, Place("/a/b.py:" + "9" * 12)),
        ("", Place("")),
    ],
)
def test_a_place_is_a_file_with_or_without_a_line(text: str, place: Place) -> None:
    assert place_of(text) == place


def test_the_frames_of_a_line_are_found_whatever_stands_before_them() -> None:
    line = '(EngineCore pid=7) ERROR 11-30 [core.py:1] |   File "/a b/c.py", line 12, in f'
    assert re.findall(FRAME, line) == [("/a b/c.py", "12")]
    assert re.findall(FRAME, 'File "<string>", line 1  File "./x.py", line 2') == [("<string>", "1"), ("./x.py", "2")]
    assert re.findall(FRAME, "File /a.py, line 3") == []


def test_lines_are_counted_as_python_counts_them() -> None:
    assert lines_of(b"a\r\nb\x0cc\nd") == ["a", "b\N{SYMBOL FOR FORM FEED}c", "d"]
    assert lines_of(b"a\n\n") == ["a", ""]
    assert lines_of(b"") == [""]


@pytest.mark.parametrize("code", [*range(32), 127, *range(128, 160), 0x202E, 0x2066, 0x200B, 0xFEFF, 0xD800])
def test_no_character_that_steers_a_terminal_or_hides_is_left(code: int) -> None:
    shown = safe(f"a{chr(code)}b")
    assert shown.isprintable() and shown.startswith("a") and shown.endswith("b") and len(shown) > 2


def test_what_a_file_has_left_is_counted_in_bytes() -> None:
    found = SourceText("/a", 1, 1, offset=100, size=1000, data=b"x" * 50, gap_bytes=25)
    assert (found.end, found.left_off) == (175, 825)


WORDS = ["plain", "two words", "it's", "", "$HOME", "a\nb", "tab\there", "back\\slash\n", "\x1b[2J", "ü", "'\n'"]


@pytest.mark.parametrize("word", WORDS)
def test_a_shell_reads_a_quoted_word_as_it_was_and_a_terminal_sees_no_control_character(word: str) -> None:
    assert quoted(word).isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {quoted(word)}"], capture_output=True, check=True)
    assert done.stdout.decode() == word


def test_the_command_can_be_run_as_it_is_shown() -> None:
    code = "import json, os, sys; print(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]))"
    started = StartedWith(
        argv=(sys.executable, "-c", code, "--output", "/a folder/x", "--flag", "it's"),
        cwd="/usr",
        environment={"PATH": "/bin", "A": "1 2", "API_KEY": None, "PROXY": "http://***@p", "EMPTY": ""},
        hidden=("API_KEY", "PROXY"),
        added=("A", "API_KEY", "EMPTY", "PROXY"),
    )
    outer = {"PATH": "/usr/bin:/bin", "API_KEY": "of the shell", "PROXY": "http://u:p@p"}
    done = subprocess.run(["bash", "-c", runner_text(started)], capture_output=True, env=outer, check=True)
    folder, arguments, environment = json.loads(done.stdout)
    assert folder == "/usr"
    assert arguments == ["--output", "/a folder/x", "--flag", "it's"]
    assert {name: environment[name] for name in ("A", "API_KEY", "EMPTY", "PROXY")} == {
        "A": "1 2",
        "API_KEY": "of the shell",
        "EMPTY": "",
        "PROXY": "http://u:p@p",
    }


def test_all_that_is_no_command_is_a_comment_so_that_the_whole_can_be_pasted(tmp_path: Path) -> None:
    started = StartedWith(
        argv=("true",),
        environment={"ODD": "a\nrm -rf /", "API_KEY": None},
        hidden=("API_KEY",),
        secrets=("HF_TOKEN",),
        host="node\nrm",
        system="Linux 6",
        driver="550.54",
        servers=(StartedServer(0, 77, ("echo", "served"), str(tmp_path / "gone"), {"CUDA_VISIBLE_DEVICES": "GPU-1"}),),
        versions={"python": "3.12.3", "vllm": None, "odd": "1\n2", "a\necho INJECTED": "1"},
    )
    text = started_text("j-1", "gpu-1", started, "12:00:00")
    assert "#   vllm not installed" in text and "#   NVIDIA driver 550.54" in text and "#   API_KEY=***" in text
    assert "HF_TOKEN through a pipe" in text and "# vLLM server 0, process 77" in text
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"served\n", b"")


def test_a_job_that_was_started_before_commands_were_written_says_so() -> None:
    assert "was not written down" in started_text("j-1", "gpu-1", StartedWith(), "N/A")
