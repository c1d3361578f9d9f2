"""From a request to a running supervisor: the fields checked, the Python tried, the folder made whole, the locks handed over."""

import os
import selectors
import shutil
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from dflash_tui.node import gpus, jobs, locks, paths, protocol, secrets
from dflash_tui.node.children import Ended, Program
from dflash_tui.node.loop import Loop
from dflash_tui.node.protocol import Launch, Refused

WORKER_PYTHON = (3, 11)  # what `backends` is written for
_PROBE_S = 30.0
_READY_S = 30.0
_VERSION = "import sys; print('dflash-tui %d %d' % sys.version_info[:2])"
MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")

Fail = Callable[[Refused], None]


def node_command(*arguments: str) -> List[str]:
    return [sys.executable, "-I", "-S", MAIN, *arguments]


def environment() -> Dict[str, str]:
    """Ours, less the mark of a job that we may run in: what is started here is none of that job's. And less secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DFLASH_TUI_JOB") and name not in (*secrets.NAMES, secrets.VARIABLE)
    }


def launch_of(data: Any) -> Launch:
    """The launch of a request. Raises Refused (bad-request), naming the field and its value."""
    if not isinstance(data, dict):
        raise _bad("launch must be an object, not %r" % (data,))
    unknown = sorted(set(data) - set(Launch._fields))
    if unknown:
        raise _bad("launch has no field %r; the fields are %s" % (unknown[0], ", ".join(Launch._fields)))
    for name in ("name", "verb", "spec"):
        if name not in data:
            raise _bad("launch must have the field %r" % name)
    try:
        launch = Launch(**dict({"python": ""}, **data))
        launch = launch._replace(gpus=tuple(str(gpu) for gpu in launch.gpus))
    except TypeError:
        raise _bad("launch: gpus must be a list of indices or UUIDs, not %r" % (data.get("gpus"),)) from None
    checks = {
        "name": isinstance(launch.name, str) and 0 < len(launch.name) <= 200,
        "verb": isinstance(launch.verb, str) and launch.verb.replace("-", "").isalnum() and launch.verb[0] != "-",
        "python": isinstance(launch.python, str),
        "spec": isinstance(launch.spec, dict),
        "share": isinstance(launch.share, bool),
        "env": _is_environment(launch.env),
        "stop_grace_s": _number(launch.stop_grace_s) and 0 <= launch.stop_grace_s <= 86400,
        "stop_target": launch.stop_target == "runner",
        "log_limit_bytes": isinstance(launch.log_limit_bytes, int) and launch.log_limit_bytes >= 1 << 16,
    }
    if checks["env"]:  # before the others: their messages show what they are about
        env_of(launch.env, "launch")
    for name, good in checks.items():
        if not good:
            raise _bad("launch: %s cannot be %r" % (name, getattr(launch, name)))
    return launch


def env_of(value: Any, what: str) -> Dict[str, str]:
    """Environment variables of a request. Raises Refused (bad-request)."""
    if not _is_environment(value):
        raise _bad("%s: env cannot be %r" % (what, value))
    for name in secrets.NAMES:
        if name in value:
            raise _bad("%s: %s must not stand in env, which is kept in a file; it goes into `secrets`" % (what, name))
    return dict(value)


def _is_environment(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _variable(name) and isinstance(text, str) and "\0" not in text for name, text in value.items()
    )


def _variable(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "=" not in name and "\0" not in name


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bad(message: str) -> Refused:
    return Refused(protocol.BAD_REQUEST, message, "use the same version of dflash-tui for console and node")


def find_python(name: str) -> str:
    """The absolute path of a Python by path or by name on PATH. Raises Refused (python-unusable)."""
    wanted = os.path.expanduser(name)
    found = shutil.which(wanted)
    if found is None:
        why = "is not on this node's PATH" if os.sep not in wanted else "is not on this node, or cannot be run"
        raise _unusable("the worker Python %r %s" % (name, why))
    return os.path.abspath(found)


def probe_python(loop: Loop, python: str, good: Callable[[], None], fail: Fail) -> Program:
    """Runs the Python to see that it is one and new enough, then calls `good` or `fail`. Raises Refused."""

    def ended(result: Ended) -> None:
        words = result.output.decode("utf-8", "replace").split()
        if result.code is None:
            fail(_unusable("the worker Python %s did not answer within %g s" % (python, _PROBE_S)))
        elif result.code != 0 or len(words) != 3 or words[0] != "dflash-tui":
            fail(
                _unusable(
                    "the worker Python %s does not run: %s" % (python, last_line(result.errors) or "no Python answered")
                )
            )
        elif (int(words[1]), int(words[2])) < WORKER_PYTHON:
            needed = "%d.%d" % WORKER_PYTHON
            fail(
                _unusable(
                    "the worker Python %s is %s.%s, and %s is the oldest that works"
                    % (python, words[1], words[2], needed)
                )
            )
        else:
            good()

    try:
        return Program(loop, [python, "-I", "-S", "-c", _VERSION], ended, _PROBE_S, env=environment())
    except OSError as error:
        raise _unusable("the worker Python %s does not run: %s" % (python, error.strerror)) from None


def _unusable(message: str) -> Refused:
    return Refused(protocol.PYTHON_UNUSABLE, message, "name another with --python, or install one on the node")


def last_line(text: bytes) -> str:
    return last_line_whole(text).strip()[:500]


def last_line_whole(text: bytes) -> str:
    """The last line that is not empty, however long it is."""
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def with_gpus(spec: Dict[str, Any], cards: List[gpus.Card]) -> Dict[str, Any]:
    """The spec with the UUIDs of the cards, where it has a place for them."""
    return dict(spec, gpus=[card["uuid"] for card in cards]) if cards and "gpus" in spec else spec


class Starter:
    """Makes a job's folder and starts its supervisor."""

    def __init__(self, loop: Loop, store: jobs.JobStore, bundle: str) -> None:
        self._loop = loop
        self._store = store
        self._bundle = bundle

    def start(
        self,
        job: str,
        launch: Launch,
        python: str,
        cards: List[gpus.Card],
        done: Callable[[], None],
        fail: Fail,
        sent: Optional[Dict[str, str]] = None,
    ) -> None:
        """Calls `done` once the supervisor has said that the job runs (or why it cannot). Raises Refused or OSError.

        sent: secrets for the runner; they go through pipes alone.
        """
        try:
            held = locks.take_gpus(self._store.root, [str(card["uuid"]) for card in cards], job, launch.share)
        except locks.GpuLocked as error:
            raise gpus.locked(next(card for card in cards if card["uuid"] == error.uuid), error.job) from None
        except OSError as error:
            where = paths.gpus_dir(self._store.root)
            raise _cannot_write("the locks of the job's GPUs in %s cannot be taken" % where, error) from None
        fds = list(held.values())
        try:
            lock = self._stage(job, launch, python, cards)
            if lock is None:
                done()
                return
            fds.insert(0, lock)
            spawn(self._loop, paths.job_dir(self._store.root, job), fds, done, fail, sent=sent)
        finally:
            # The supervisor has them by now; a lock ends with the last who has it open.
            for fd in fds:
                os.close(fd)

    def _stage(self, job: str, launch: Launch, python: str, cards: List[gpus.Card]) -> Optional[int]:
        """Makes the folder with all its files, locked, under its name in one step; None where the name is taken."""
        root = self._store.root
        stage = os.path.join(paths.jobs_dir(root), "%s%s-%d" % (jobs.STAGING, job, os.getpid()))
        final = paths.job_dir(root, job)
        lock = None
        try:
            os.mkdir(stage, 0o700)
            lock = locks.take(os.path.join(stage, "lock"))
            log = os.open(os.path.join(stage, "log"), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            found = os.fstat(log)
            os.close(log)
            record = jobs.blank(job)
            record.update(
                name=launch.name,
                verb=launch.verb,
                python=python,
                created=time.time(),
                boot_id=self._store.boot_id,
                host=self._store.host,
                gpus=[gpus.in_record(card) for card in cards],
                share=launch.share,
                log={"path": os.path.join(final, "log"), "dev": found.st_dev, "ino": found.st_ino},
            )
            # Relative paths of the spec mean the same to `plan` and to the job: both run where the agent runs.
            more = {"bundle": self._bundle, "cwd": os.getcwd()}
            paths.write_json(os.path.join(stage, "spec.json"), with_gpus(launch.spec, cards))
            paths.write_json(os.path.join(stage, "launch.json"), dict(launch._asdict(), **more))
            paths.write_json(os.path.join(stage, "state.json"), record)
            os.rename(stage, final)
        except Exception as error:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(stage, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            if os.path.isdir(final):
                return None
            raise _cannot_write("the job's folder %s cannot be made" % final, error) from None
        return lock


def _cannot_write(what: str, error: OSError) -> Refused:
    return Refused(protocol.IO_ERROR, "%s: %s" % (what, error.strerror), "free some space or check its rights")


def spawn(
    loop: Loop,
    folder: str,
    fds: List[int],
    done: Callable[[], None],
    fail: Fail,
    adopt: bool = False,
    sent: Optional[Dict[str, str]] = None,
) -> None:
    """Starts a supervisor that inherits the locks `fds`; `done` once it has spoken, died or taken too long. Raises OSError."""
    ready, theirs = os.pipe()
    answered: List[bool] = []

    def finish() -> None:
        if not answered:
            answered.append(True)
            timer.cancel()
            loop.unwatch(ready)
            os.close(ready)
            done()

    def ended(result: Ended) -> None:
        # Where the lock is held the supervisor has it, whatever became of the process that started it.
        if result.code != 0 and not answered and not locks.is_held(os.path.join(folder, "lock")):
            answered.append(True)
            timer.cancel()
            loop.unwatch(ready)
            os.close(ready)
            fail(Refused(protocol.INTERNAL, "the supervisor does not start: %s" % last_line(result.errors)))

    timer = loop.later(_READY_S, finish)
    loop.watch(ready, selectors.EVENT_READ, finish)
    numbers = [theirs, *fds]
    command = node_command(
        "supervise", folder, "--fds", ",".join(str(fd) for fd in numbers), *(["--adopt"] if adopt else [])
    )
    pipe = -1
    try:
        pipe = secrets.pipe_with(sent)
        if pipe >= 0:
            command += ["--secrets-fd", str(pipe)]
        Program(loop, command, ended, _READY_S, env=environment(), pass_fds=[*numbers, *([pipe] if pipe >= 0 else [])])
    except OSError:
        timer.cancel()
        loop.unwatch(ready)
        os.close(ready)
        raise
    finally:
        os.close(theirs)
        if pipe >= 0:
            os.close(pipe)
