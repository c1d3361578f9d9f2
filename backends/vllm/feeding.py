"""Feeds one healthy server: so many requests at a time, each file checked and named, what fails done again. Loads no torch.

Requests and files have threads of their own, so that a server is never idle for a file that is checked or on its way to the disk.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.disk import free_bytes
from backends.errors import JobError, WorkerError, one_line
from backends.hsfile import Entry, MisfitError, StatesError, StoreError
from backends.vllm.client import NoAnswer, NoExtractor, Refused, ServerClient
from backends.vllm.filing import Filer, NotThere, is_visible

# Threads that check and name files: they wait for the disk most of the time.
FILERS = 8
# Works beyond those that the server has: some that are filed, and one each for the next ones.
AHEAD = 2 * FILERS
_TRIES = 5
_FILE_TRIES = 3
_BACK_OFF_S = 0.25
_LONGEST_BACK_OFF_S = 8.0
# A server that dies closes its connections a little before its process ends.
_NOTICE_S = 2.0
# A file that is being checked when the server is given up; a slow disk may take longer, and then it is made again.
_FILED_S = 10.0


@dataclass(slots=True)
class Sample:
    """A sample on its way. id: the runner's number of the work. asked: how often; unanswered, bad_files: what went wrong so often."""

    id: int
    row: int
    token_ids: list[int]
    asked: int = 0
    unanswered: int = 0
    bad_files: int = 0
    why: str = ""
    path: Path | None = None
    not_before: float = 0.0


class Lost(Exception):
    """The server is not to be relied on any more; what is in flight is to be done again."""


class Feeder:
    """The threads of one server. Everything that they find is told through `tell`, or raised by `check`.

    model: its name in requests. shape, dtype: (layers, width) of a file, and of its states. direct: a folder for files that we name, where the server takes
    that, else None. tell: called from many threads with an event and its fields.
    explain: what the server said of a write of states that failed (told once for each), and whether of a full disk.
    again: the server was started anew, so that one which delivers nothing may be started once more.
    """

    def __init__(
        self,
        client: ServerClient,
        filer: Filer,
        *,
        model: str,
        shape: tuple[int, int],
        dtype: str,
        bytes_per_token: int,
        output: Path,
        direct: Path | None,
        concurrency: int,
        tell: Callable[..., None],
        explain: Callable[[], tuple[str, bool]],
        again: bool = False,
    ) -> None:
        self._client = client
        self._filer = filer
        self._model = model
        self._shape = shape
        self._dtype = dtype
        self._bytes_per_token = bytes_per_token
        self._output = output
        self._direct = direct
        self._tell = tell
        self._explain = explain
        self._restarted = again
        self._asked: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = 0
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self.delivered = 0
        self.last_good = time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, args=(inbox, work), daemon=True, name=f"{name}-{number}")
            for name, inbox, work, count in (
                ("ask", self._asked, self._ask, concurrency),
                ("file", self._answered, self._file, FILERS),
            )
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, sample: Sample) -> None:
        with self._lock:
            if not self._busy:
                self.last_good = time.monotonic()
            self._busy += 1
        self._asked.put(sample)

    @property
    def busy(self) -> int:
        """Samples that are neither done nor given up."""
        return self._busy

    @property
    def left(self) -> list[Path]:
        """Files of the server that stay where they are."""
        return list(self._filer.left)

    def silent_s(self) -> float:
        """Seconds since a sample was finished while some are in flight; 0 where none are."""
        return time.monotonic() - self.last_good if self._busy else 0.0

    def check(self) -> None:
        """Raises what the threads found: Lost, JobError."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """No more requests; those that wait for an answer are left alone. Files are waited for a while: they are swept next."""
        self._stop.set()
        for thread in self._threads:
            (self._asked if thread.name.startswith("ask") else self._answered).put(None)
        deadline = time.monotonic() + _FILED_S
        for thread in self._threads:
            if thread.name.startswith("file"):
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self, inbox: queue.SimpleQueue[Sample | None], work: Callable[[Sample], None]) -> None:
        while (sample := inbox.get()) is not None and not self._stop.is_set():
            try:
                work(sample)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error

    # --- a request --------------------------------------------------------------------------------------------------

    def _ask(self, sample: Sample) -> None:
        if self._stop.wait(max(sample.not_before - time.monotonic(), 0.0)):
            return None
        sample.asked += 1
        wanted = None
        if self._direct is not None:
            wanted = self._direct / f"hs_{sample.row}-{sample.asked}.safetensors"
        try:
            path = self._client.extract(self._model, sample.token_ids, str(wanted) if wanted else None)
        except NoAnswer as error:
            sample.unanswered += 1
            return self._again(sample, one_line(error), sample.unanswered, _TRIES)
        except NoExtractor as error:
            raise JobError(
                f"the vLLM server at {self._client.url} extracts nothing: {one_line(error)}", error.remedy
            ) from None
        except Refused as error:
            tokens = len(sample.token_ids)
            raise JobError(
                f"the vLLM server refuses row {sample.row} ({tokens} tokens): {one_line(error)}",
                "leave that row out, or see its log",
            ) from None
        if why := self._filer.refusal(path):
            raise JobError(
                f"the vLLM server says that row {sample.row} is in {path[:300]!r}, {why}",
                "see its log: something else answers, or the connector is another",
            )
        sample.path = Path(path)
        return self._answered.put(sample)

    def _again(self, sample: Sample, why: str, tries: int, most: int) -> None:
        """Once more after a while, or a failure where it was tried `most` times."""
        sample.why = why
        if tries < most:
            sample.not_before = time.monotonic() + min(_BACK_OFF_S * 2**sample.asked, _LONGEST_BACK_OFF_S)
            self._asked.put(sample)
            return
        # A server that dies is noticed by its end, which tells more.
        if self._stop.wait(_NOTICE_S):
            return
        line = f"row {sample.row}: {why} ({tries} times)"
        if not self.delivered and not self._restarted:
            raise WorkerError(f"the vLLM server does not deliver: {line}", "see the log")
        raise Lost(line)

    # --- a file -----------------------------------------------------------------------------------------------------

    def _file(self, sample: Sample) -> None:
        path = sample.path
        assert path is not None
        try:
            entry = self._filer.take(sample.row, sample.token_ids, path, self._stop.is_set)
        except MisfitError as error:
            self._misfit(error)
            return self._no_file(sample, f"its file is no good: {error}")
        except StatesError as error:
            why = str(error).removeprefix(f"{path.name}: ")
            sample.bad_files += 1
            if sample.bad_files < 2:
                return self._again(sample, why, sample.bad_files, _FILE_TRIES)
            return self._done(sample, None, why)
        except StoreError as error:
            return self._no_file(sample, f"its file is no good: {error}")
        except NotThere as error:
            if self._stop.is_set():
                return None
            if not is_visible(path.parent):
                raise JobError(
                    f"the vLLM server answered, and {path} is not visible from this machine",
                    "give a server of this machine, or one that writes to a folder that is shared with it",
                ) from None
            return self._no_file(sample, f"it answered, and wrote no file: {error}")
        except OSError as error:
            if self._stop.is_set():
                return None
            self._tell("disk", id=sample.id, entries=[], message=one_line(error))
            return self._one_less()
        return self._done(sample, entry, "")

    def _no_file(self, sample: Sample, why: str) -> None:
        said, full = self._explain()
        needed = len(sample.token_ids) * self._bytes_per_token
        if full or free_bytes(self._output) < needed:
            message = f"{OSError(errno.ENOSPC, 'No space left on device')}: vLLM could not write row {sample.row}"
            self._tell("disk", id=sample.id, entries=[], message=message)
            return self._one_less()
        sample.bad_files += 1
        return self._again(sample, f"{why}; it says: {said}" if said else why, sample.bad_files, _FILE_TRIES)

    def _misfit(self, found: MisfitError) -> None:
        """Raises JobError where a file is of other layers, another width or another dtype than the job's."""
        *_, layers, width = found.shape if len(found.shape) == 3 else (0, 0)
        wanted = *self._shape, self._dtype
        if (layers, width, found.dtype) == wanted:
            return  # a sample of another length: it may come right
        raise JobError(
            f"the vLLM server writes {layers} layers of width {width} in {found.dtype}, and this job wants {wanted[0]} of"
            f" width {wanted[1]} in {wanted[2]}",
            "give the server the job's model, dtype and layer ids (eagle_aux_hidden_state_layer_ids)",
        )

    def _done(self, sample: Sample, entry: Entry | None, why: str) -> None:
        entries: list[list[Any]] = []
        bad: list[list[Any]] = []
        if entry is None:
            bad.append([sample.row, why])
        else:
            entries.append([entry.row, entry.file, entry.tokens, entry.bytes])
        self._tell("done", id=sample.id, entries=entries, bad=bad, float8=None)
        self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._busy -= 1
            self.delivered += 1
            self.last_good = time.monotonic()
