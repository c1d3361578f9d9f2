"""The bundle, and the script that brings it to a node; run by a real /bin/sh."""

from __future__ import annotations

import base64
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dflash_tui.link import LinkError, bootstrap
from dflash_tui.link.bootstrap import Booted, BundleWanted, Preface, agent_script, remote_command
from dflash_tui.link.bundle import Bundle, build_bundle, node_bundle

AGENT = (
    b"import sys\nprint('dflash-tui-agent ' + sys.argv[sys.argv.index('--nonce') + 1], flush=True)\nprint(sys.argv)\n"
)
SMALL = build_bundle({"dflash_tui/node/__main__.py": AGENT, "backends/__init__.py": b""})


def run(cache: Path, bundle: Bundle, stdin: bytes, *, shell: tuple[str, ...] = ("/bin/sh", "-c")) -> bytes:
    line = remote_command(agent_script(bundle, "n0nce", None, sys.executable))
    env = {"XDG_CACHE_HOME": str(cache), "PATH": os.environ["PATH"], "HOME": str(cache)}
    return subprocess.run([*shell, line], input=stdin, env=env, capture_output=True, check=False).stdout


def test_the_bundle_has_what_a_node_needs_and_nothing_compiled() -> None:
    bundle = node_bundle()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(bundle.data))) as tar:
        names = set(tar.getnames())
    wanted = {
        "dflash_tui/__init__.py",
        "dflash_tui/node/agent.py",
        "backends/__main__.py",
        "backends/spec.py",
        "pynvml.py",
    }
    assert wanted <= names
    assert any(name.startswith("backends/demo/data/") for name in names)
    assert not [
        name for name in names if name.endswith(".pyc") or name.startswith(("dflash_tui/app", "dflash_tui/link"))
    ]


def test_the_same_files_give_the_same_bundle_and_other_files_another() -> None:
    files = {"b": b"2", "a": b"1"}
    assert build_bundle(files) == build_bundle(dict(reversed(files.items())))
    assert build_bundle(files).hash != build_bundle({"a": b"1", "b": b"3"}).hash
    assert len(node_bundle().hash) == 16


def test_the_command_line_has_nothing_that_a_login_shell_could_take_for_its_own() -> None:
    line = remote_command(agent_script(node_bundle(), "n0nce", "/opt/a b/'python", None))
    assert line.startswith("exec /bin/sh -c '") and line.endswith("'")
    assert not set("'\\!\n") & set(line.removeprefix("exec /bin/sh -c '")[:-1])
    assert len(line) < 16384


def test_a_missing_bundle_is_asked_for_and_a_present_one_is_not(tmp_path: Path) -> None:
    first = run(tmp_path, SMALL, SMALL.data)
    assert first.startswith(b"dflash-tui-boot n0nce need\ndflash-tui-agent n0nce\n")
    again = run(tmp_path, SMALL, b"")
    assert again.startswith(b"dflash-tui-agent n0nce\n")
    assert str(tmp_path / "dflash-tui" / SMALL.hash).encode() in again


SHELLS = [path for name in ("sh", "bash", "dash", "zsh", "fish", "tcsh", "csh", "ksh") if (path := shutil.which(name))]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_that_is_here_passes_the_line_on(tmp_path: Path, shell: str) -> None:
    assert b"dflash-tui-agent n0nce\n" in run(tmp_path, SMALL, SMALL.data, shell=(shell, "-c"))


def test_exactly_the_bundle_is_read_and_the_rest_is_left_for_the_agent(tmp_path: Path) -> None:
    echo = build_bundle({"dflash_tui/node/__main__.py": b"import sys\nprint(sys.stdin.read())\n"})
    assert run(tmp_path, echo, echo.data + b"the first frame").endswith(b"the first frame\n")


def test_a_bundle_that_arrives_damaged_or_short_is_not_unpacked(tmp_path: Path) -> None:
    damaged = gzip.compress(gzip.decompress(SMALL.data).replace(b"print", b"pr1nt"))
    said = run(tmp_path, Bundle(SMALL.hash, damaged), damaged)
    assert b"dflash-tui-boot n0nce failed" in said and b"damaged" in said
    run(tmp_path, SMALL, SMALL.data[:-1])
    assert not list(tmp_path.rglob("__main__.py"))


def test_a_bundle_that_somebody_changed_is_named_and_not_run(tmp_path: Path) -> None:
    run(tmp_path, SMALL, SMALL.data)
    agent = tmp_path / "dflash-tui" / SMALL.hash / "dflash_tui" / "node" / "__main__.py"
    agent.write_bytes(b"print('something else entirely')")
    said = run(tmp_path, SMALL, SMALL.data)
    assert b"dflash-tui-boot n0nce failed" in said and str(tmp_path).encode() in said
    assert b"something else" not in said
    assert agent.read_bytes() == b"print('something else entirely')"


def test_a_bundle_that_a_power_loss_cut_short_is_put_right_and_run(tmp_path: Path) -> None:
    run(tmp_path, SMALL, SMALL.data)
    files = [path for path in (tmp_path / "dflash-tui" / SMALL.hash).rglob("*.*") if path.suffix in (".py", ".files")]
    whole = {path: path.read_bytes() for path in files}
    for number, path in enumerate(files):
        path.write_bytes((b"", whole[path][:3], whole[path][:3] + b"\0" * 9)[number % 3])
    said = run(tmp_path, SMALL, SMALL.data)
    assert said.startswith(b"dflash-tui-boot n0nce need\ndflash-tui-agent n0nce\n")
    assert {path: path.read_bytes() for path in files} == whole


def test_the_agent_and_its_jobs_have_the_umask_of_the_user_and_the_bundle_is_private(tmp_path: Path) -> None:
    told = build_bundle({"dflash_tui/node/__main__.py": AGENT + b"import os\nprint('umask %o' % os.umask(0))\n"})
    before = os.umask(0o027)
    try:
        said = run(tmp_path / "cache", told, told.data)
    finally:
        os.umask(before)
    assert b"umask 27\n" in said
    made = [path for path in (tmp_path / "cache").rglob("*") if "__pycache__" not in path.parts]
    assert made and not [path for path in made if path.stat().st_mode & 0o077]


def test_nothing_is_made_behind_a_link_that_somebody_put_in_a_public_place(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    public = tmp_path / "dflash-tui-1000"
    public.symlink_to(elsewhere)
    source = Path(bootstrap.__file__).with_name("on_node.py").read_text()
    functions = source[: source.index("\ntry:\n    main()")]
    call = f"unpack(gzip.decompress(sys.stdin.buffer.read()), {str(public / 'dflash-tui')!r})"
    config = base64.b64encode(f'{{"hash": "{SMALL.hash}"}}'.encode())
    ran = subprocess.run(
        [sys.executable, "-c", functions + "\n" + call, "", config], input=SMALL.data, capture_output=True, check=False
    )
    assert b"belongs to somebody else" in ran.stderr
    assert not list(elsewhere.iterdir())


def test_the_program_for_the_node_speaks_python_3_8() -> None:
    source = Path(bootstrap.__file__).with_name("on_node.py")
    vermin = Path(sys.executable).with_name("vermin")
    ran = subprocess.run(
        [vermin, "-t=3.8-", "--eval-annotations", "--no-tips", source], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout


def test_noise_before_the_first_frame_is_passed_over_even_on_the_same_line() -> None:
    preface = Preface("abc")
    assert preface.feed(b"Welcome\nfoo dflash-tui-agent wrong\nno newline ") is None
    assert preface.noise == "no newline"
    assert preface.feed(b"dflash-tui-boot abc ne") is None
    assert preface.feed(b"ed\nmore noise\n") == BundleWanted()
    assert preface.feed(b"dflash-tui-agent abc\n{}\n") == Booted(b"{}\n")


def test_a_node_that_cannot_says_why() -> None:
    with pytest.raises(LinkError) as caught:
        Preface("abc").feed(b"\ndflash-tui-boot abc no-python\n")
    assert caught.value.code == "no-python"
    with pytest.raises(LinkError, match="no space") as caught:
        Preface("abc").feed(b"dflash-tui-boot abc failed no space\n")
    assert caught.value.code == "bootstrap-failed"


def test_noise_without_end_is_given_up() -> None:
    preface = Preface("abc")
    with pytest.raises(LinkError, match="without end"):
        for _ in range(1000):
            preface.feed(b"y\n" * 5000)


def test_a_default_python_with_odd_letters_travels_whole() -> None:
    script = agent_script(SMALL, "n0nce", "/opt/a b/'py$thon", None)
    config = base64.b64decode(script.split("; fi; done")[0].rsplit(" ", 1)[1])
    assert b"/opt/a b/'py$thon" in config
