"""What the end-to-end tests share: a site of one's own, commands as a user types them, a terminal, and looking at /proc."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")

LIMIT_S = 150.0  # nothing waits so long on a machine that is well; a slow one must not turn a test red


def poll(what: str, look: Callable[[], Found | None], limit: float = LIMIT_S, every: float = 0.05) -> Found:
    """What `look` finds, as soon as it finds something. Fails with `what` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit:.0f} s for {what}")
        time.sleep(every)


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self
        return lines[0]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Site:
    """A user's machine: a home folder, an environment, and `dflash-tui` in it."""

    def __init__(self, home: Path, **more: str) -> None:
        self.home = home
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        self.env = {
            **kept,
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **more,
        }
        home.mkdir(parents=True, exist_ok=True)

    def command(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "dflash_tui.cli", *map(str, words)]

    def run(self, *words: object, code: int | None = 0, **more: str) -> Done:
        """One command, to its end. No traceback may be seen, whatever happens."""
        finished = subprocess.run(
            self.command(*words),
            env={**self.env, **more},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        done = Done(
            finished.returncode, finished.stdout.decode("utf-8", "replace"), finished.stderr.decode("utf-8", "replace")
        )
        assert "Traceback" not in done.out + done.err, done
        assert code is None or done.code == code, done
        return done

    def start(self, *words: object, **how: Any) -> subprocess.Popen[bytes]:
        """One command in the background, a process group of its own."""
        return subprocess.Popen(self.command(*words), env=self.env, cwd=self.home, start_new_session=True, **how)


class JobFolder:
    """A job as the node's files show it, without asking the program under test."""

    def __init__(self, state_dir: Path, job: str) -> None:
        self.id = job
        self.path = state_dir / "jobs" / job

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_bytes())

    @property
    def state(self) -> str:
        try:
            return str(self.json("state.json")["state"])
        except FileNotFoundError:
            return "starting"

    @property
    def events(self) -> list[dict[str, Any]]:
        try:
            data = (self.path / "events.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]

    @property
    def output(self) -> Path:
        return Path(self.json("spec.json")["output"])

    def wait_done(self, at_least: int) -> int:
        """Waits until so many samples are listed in the manifest; says how many are."""
        return poll(f"{at_least} samples of {self.id}", lambda: self._listed(at_least))

    def _listed(self, at_least: int) -> int | None:
        assert not self.ended, (self.json("state.json"), self.log)
        rows = manifest_rows(self.output)
        return len(rows) if len(rows) >= at_least else None

    @property
    def ended(self) -> bool:
        return self.state in ("done", "interrupted", "failed", "killed", "lost", "orphaned")

    def wait_ended(self) -> str:
        return poll(f"the end of {self.id} ({self.path})", lambda: self.state if self.ended else None)

    @property
    def log(self) -> str:
        try:
            return (self.path / "log").read_text("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def process(self, role: str) -> int:
        """The pid of `supervisor` or `runner`."""
        return int(self.json("state.json")[role]["pid"])

    def processes(self) -> dict[int, str]:
        """Every living process that belongs to the job: by its environment, its command line or its open log."""
        return {pid: command for pid, command in living() if pid != os.getpid() and self._owns(pid, command)}

    def _owns(self, pid: int, command: str) -> bool:
        if self.id in command:
            return not re.search(r"dflash_tui\.cli|tmux", command)
        try:
            if f"DFLASH_TUI_JOB={self.id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
            return any(Path(f"/proc/{pid}/fd/{fd}").readlink() == self.path / "log" for fd in (1, 2))
        except OSError:
            return False


def living() -> Iterator[tuple[int, str]]:
    """Every process that is no zombie, with its command line."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if state not in "ZX":
            yield int(entry.name), command


def children(pid: int) -> list[int]:
    """The living children of a process."""
    found = []
    for child, _ in living():
        try:
            parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(child)
    return found


def manifest_rows(output: Path) -> list[int]:
    """The rows that the manifest of an output folder lists, in its order; a torn last line counts for nothing."""
    try:
        data = (output / "manifest.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line)["row"] for line in data[: data.rfind(b"\n") + 1].splitlines()[1:]]


def assert_whole(output: Path, samples: int) -> None:
    """Every sample is listed once and its file is there; nothing half-written is."""
    rows = manifest_rows(output)
    assert sorted(rows) == list(range(samples)), "lost or done twice"
    assert_nothing_half(output)
    assert {file.name for file in output.glob("hs_*.safetensors")} == {f"hs_{row}.safetensors" for row in rows}


def assert_nothing_half(output: Path) -> None:
    """A folder holds final names only, and each of them is listed."""
    listed = {f"hs_{row}.safetensors" for row in manifest_rows(output)}
    strange = [file.name for file in output.iterdir() if file.name not in {*listed, "manifest.jsonl", ".lock"}]
    assert not strange, strange


class Terminal:
    """A tmux of its own with one pane: keys in, the screen out."""

    def __init__(self, width: int, height: int, command: list[str], env: Mapping[str, str], cwd: Path) -> None:
        # Not in the test's own folder: the name of a socket may have no more than 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-")
        self._socket = Path(self._folder.name) / "socket"
        self._env = {**env, "TERM": "xterm-256color", "SHELL": "/bin/sh"}
        size = ["-x", str(width), "-y", str(height)]
        quoted = " ".join(f"'{word}'" for word in command)
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(cwd), f"exec {quoted}")
        self._tmux("set-option", "-g", "remain-on-exit", "on")
        self.width, self.height = width, height

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", str(self._socket), *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        for key in keys:
            self._tmux("send-keys", key)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", "--", text)

    def wait_for(self, pattern: str, limit: float = LIMIT_S) -> re.Match[str]:
        """Waits until the screen shows `pattern`; shows the screen where it never does."""
        try:
            return poll(pattern, lambda: re.search(pattern, self.screen), limit)
        except AssertionError as error:
            raise AssertionError(f"{error}; the screen:\n{self.screen}") from None

    def focus(self, label: str) -> None:
        """Goes to the field of a form that stands after `label`, by Tab; each key only after the last one was heard."""
        for _ in range(40):
            here = poll("a field with the focus", self._focused)
            if here == label:
                return
            self.keys("Tab")
            poll(f"the focus to leave {here}", lambda here=here: (self._focused() or here) != here)
        raise AssertionError(f"no field {label}; the screen:\n{self.screen}")

    def _focused(self) -> str | None:
        """The label of the field that has the focus: the one that is drawn with a background of its own."""
        for row in self._tmux("capture-pane", "-p", "-e").splitlines():
            text = re.sub(r"\x1b\[[0-9;]*m", "", row)
            if re.match(r" {1,3}\S", text) and len(set(re.findall(r"48;[0-9;]+", row))) > 1:
                return re.split(r" {2,}", text.strip())[0]
        return None

    def fill(self, label: str, text: str) -> None:
        """Types into a text field."""
        self.focus(label)
        self.type(text)
        # A long text is scrolled to its end.
        self.wait_for(rf"(?m)^ *{label} .*{re.escape(text[-10:])} *$")

    @property
    def pid(self) -> int:
        """Of the process in the pane."""
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    @property
    def dead(self) -> bool:
        return self._tmux("display-message", "-p", "#{pane_dead}").strip() == "1"

    @property
    def exit_code(self) -> int:
        """Of the process that ended; minus the signal, if one ended it."""
        return int(poll("how it ended", self._ended))

    def _ended(self) -> str:
        # tmux 3.3a at times misses that its child ended on a busy machine, and leaves it a zombie: it is told again.
        os.kill(int(self._tmux("display-message", "-p", "#{pid}")), signal.SIGCHLD)
        asked = "#{pane_dead_status}#{?pane_dead_signal,-#{pane_dead_signal},}"
        return self._tmux("display-message", "-p", asked).strip()

    def kill(self) -> None:
        """kill -9 of the process in the pane."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        poll("the console's end", lambda: self.dead)

    def close(self) -> None:
        subprocess.run(
            ["tmux", "-S", str(self._socket), "kill-server"],
            env=self._env,
            capture_output=True,
            timeout=60,
            check=False,
        )
        self._folder.cleanup()
