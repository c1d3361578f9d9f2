"""A file that a vLLM server wrote, checked and given its final name. Loads no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.errors import one_line
from backends.hsfile import TMP_PREFIX, Entry, StoreError, file_name
from backends.store import check_sample

# Beside what a server writes: a link to the folder of its sockets and other temporary files, which lies where such files do.
TEMPORARY = "temporary"
TEMPORARY_PREFIX = "dflash-vllm-"
_POLL_S = 0.01
# Renaming is not possible, but copying may be.
_ELSEWHERE = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)


class NotThere(Exception):
    """The server answered, and there is no file."""


class Filer:
    """Takes the files of one server into an output folder.

    header: of the manifest, which says what a file must hold. storage: the folder that the files must lie in, None for any (a
    server that is not ours). appear_s: how long a file may take to show after the answer. lock_s: how long one may be locked.
    left: files that are the server's and stay where they are.

    A server that is not ours may name whatever it likes: of its files one alone is touched that was found to hold this very
    sample, and the others are left.
    """

    def __init__(
        self,
        output: Path,
        header: Mapping[str, Any],
        *,
        storage: Path | None,
        appear_s: float,
        lock_s: float,
    ) -> None:
        self._output = output
        self._header = dict(header)
        self._storage = storage
        self._appear_s = appear_s
        self._lock_s = lock_s
        self.left: list[Path] = []

    def refusal(self, path: str) -> str:
        """Why the file that a server names cannot be its answer; "" where it can."""
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            return "which is no name of a file"
        if "\0" in path or not path.startswith("/"):
            return "which is no whole path"
        if self._storage is not None:
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self._storage))
            return "" if inside else "which is not where it was told to write"
        if not path.endswith(".safetensors"):
            return "which is no *.safetensors"
        own = os.path.realpath(self._output) == os.path.realpath(Path(path).parent)
        return "which is in the job's own output folder" if own else ""

    def take(self, row: int, token_ids: Sequence[int], path: Path, given_up: Callable[[], bool]) -> Entry:
        """Waits until the file is written, checks it, and names it. Raises NotThere, StoreError, OSError (a full disk)."""
        lock = path.with_name(path.name + ".lock")
        try:
            self._wait(path, lock, given_up)
            size = self._checked(path, token_ids)
        except OSError as error:  # unreadable; or whoever sweeps after a server that is gone was faster
            raise NotThere(one_line(error)) from None
        try:
            self._name(path, self._output / file_name(row))
        except FileNotFoundError as error:
            if not self._output.is_dir():
                raise
            raise NotThere(one_line(error)) from None
        self._remove(lock)
        return Entry(row, file_name(row), len(token_ids), size)

    def _checked(self, path: Path, token_ids: Sequence[int]) -> int:
        """The bytes of a file that holds this sample. Raises NotThere, StoreError, OSError."""
        try:
            if path.is_symlink() or not path.is_file():
                raise NotThere(f"{path} is not there")
            check_sample(self._header, path, token_ids)
            return path.stat().st_size
        except (StoreError, NotThere):
            self._drop(path)
            raise

    def _drop(self, path: Path) -> None:
        """Removes a file that is no good, and its lock, where they are surely the server's."""
        if self._storage is not None:
            self._remove(path)
            self._remove(path.with_name(path.name + ".lock"))
        elif path.exists():
            self.left.append(path)

    def _wait(self, path: Path, lock: Path, given_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._appear_s
        while not lock.exists() and not path.exists():
            if time.monotonic() > deadline or given_up() or not path.parent.is_dir():
                raise NotThere(f"{path} is not there")
            time.sleep(_POLL_S)
        try:
            fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:  # versions before 0.22 have none, and write before they answer
            return
        try:
            deadline = time.monotonic() + self._lock_s
            while not _locked(fd):
                if given_up():
                    raise NotThere(f"{path} was still locked when the server was given up")
                if time.monotonic() > deadline:
                    raise NotThere(f"{path} was locked for {self._lock_s:g} s")
                time.sleep(_POLL_S)
        finally:
            os.close(fd)

    def _name(self, path: Path, final: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        try:
            path.rename(final)
            return
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
        temporary = final.with_name(f"{TMP_PREFIX}{os.getpid()}-{threading.get_ident()}-{final.name}")
        try:
            shutil.copyfile(path, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(final)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # another user's server; its files stay
            self.left.append(path)


def is_visible(folder: Path) -> bool:
    """Whether there is such a folder, and this user may see it."""
    try:
        return folder.is_dir()
    except OSError:
        return False


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def drop_temporary(link: Path) -> None:
    """Removes the folder of a server's temporary files, and the link that leads there."""
    with contextlib.suppress(OSError):
        target = link.readlink()
        if target.name.startswith(TEMPORARY_PREFIX):
            shutil.rmtree(target, ignore_errors=True)
        link.unlink()


def sweep(folder: Path) -> None:
    """Removes a folder of a server, or that of all servers, and all in it; a line in the log says what stays."""
    for link in (folder / TEMPORARY, *folder.glob(f"*/{TEMPORARY}")):
        drop_temporary(link)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        print(f"{folder} cannot be removed whole; it may be, by hand", flush=True)
