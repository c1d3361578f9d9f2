"""One detached process a job: starts the runner, reaps everything below it, stops it, and writes down what became of it.

It knows no console. It holds the lock of the job for as long as it lives, and the locks of the job's GPUs; it owns
`state.json` and `log`. `--adopt` takes over a job whose supervisor was killed, to end what is left of it.
"""

import errno
import os
import select
import signal
import subprocess
import time
import traceback
from typing import Any, Dict, List, Optional, Sequence, Tuple

from dflash_tui.node import command, events, linux, locks, outcome, paths, processes, secrets, stopping, verbs
from dflash_tui.node.joblog import JobLog
from dflash_tui.node.processes import Identity, Stat

_TICK_S = 1.0
_QUICK_TICK_S = 0.1
_SAVE_FOR_S = 600.0
FORCE = signal.SIGQUIT  # as SIGTERM, with no grace for the runner


def supervise(folder: str, fds: Tuple[int, ...] = (), adopt: bool = False, secrets_fd: int = -1) -> int:
    """Detaches and runs the job in `folder` to its end; returns at once in the caller's process.

    fds: (ready, lock, GPU locks…), inherited and already locked; a byte goes to `ready` when the state file says more
    than "starting". Without them the lock is taken here. secrets_fd: a pipe with what the runner is to be given.
    """
    if os.fork() > 0:
        return 0
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    ready = fds[0] if fds else -1
    for fd in fds:
        os.set_inheritable(fd, False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir("/")
    held: List[Optional[int]] = list(fds[1:]) or [locks.take(os.path.join(folder, "lock"))]
    try:
        if held[0] is not None:
            _run(folder, ready, adopt, held[1:], secrets.take(secrets_fd))
    finally:
        os._exit(0)


def _run(folder: str, ready: int, adopt: bool, gpu_locks: List[Optional[int]], sent: Dict[str, str]) -> None:
    supervisor = Supervisor(folder, ready, adopt, [fd for fd in gpu_locks if fd is not None], sent)
    try:
        supervisor.run()
    except Exception:
        # The state stays as it is: with the lock free the job counts as orphaned, and its processes are listed.
        supervisor.log.write("the supervisor failed:\n" + traceback.format_exc())


class Supervisor:
    """The life of one job."""

    def __init__(
        self,
        folder: str,
        ready: int = -1,
        adopt: bool = False,
        gpu_locks: Sequence[int] = (),
        sent: Optional[Dict[str, str]] = None,
    ) -> None:
        self.folder = folder
        self._secrets = sent or {}
        self.launch: Dict[str, Any] = paths.read_json(self._path("launch.json")) or {}
        self.record: Dict[str, Any] = paths.read_json(self._path("state.json")) or {}
        self.log = JobLog(self._path("log"), int(self.launch.get("log_limit_bytes", 1 << 30)))
        self._cwd: Optional[str] = self.launch.get("cwd") or None
        self._ready = ready
        self._gpu_locks = list(gpu_locks)
        self._adopt = adopt
        self._me = processes.me()
        self._runner: Optional[Identity] = None
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._status: Optional[int] = None
        self._ladder: Optional[stopping.Ladder] = None
        self._unsaved = False
        self._disk_full = False
        self._told_of_stop: Optional[Dict[str, Any]] = None
        self._terminated = False
        self._forced = False

    def run(self) -> None:
        wake = self._listen()
        linux.become_subreaper()
        self.record["supervisor"] = self._me.to_json()
        if self._adopt:
            self._runner = processes.identity_of(self.record.get("runner"))
        elif not self._start():
            return
        grace = float(self.launch.get("stop_grace_s", 60.0))
        self._ladder = stopping.Ladder(self._members, self._runner, grace)
        self._save()
        self._tell_ready()
        while not self._turn(self._ladder):
            busy = self._ladder.phase != stopping.IDLE
            select.select([wake], [], [], _QUICK_TICK_S if busy else _TICK_S)
            _drain(wake)
        self._finish(self._ladder)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _listen(self) -> int:
        # Handlers rather than ignored or blocked signals: those would be inherited by the job.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, FORCE):
            signal.signal(number, self._on_term)
        return read

    def _on_term(self, number: int, _: Any) -> None:
        self._terminated = True
        self._forced = self._forced or number == FORCE

    def _tell_ready(self) -> None:
        if self._ready >= 0:
            try:
                os.write(self._ready, b"1")
            except OSError:
                pass  # the agent is gone; the job does not need it
            os.close(self._ready)
            self._ready = -1

    def _start(self) -> bool:
        spec, log = self._path("spec.json"), self._path("events.jsonl")
        bundle, python = str(self.launch.get("bundle")), str(self.record.get("python"))
        argv = verbs.job_command(bundle, python, str(self.record.get("verb")), spec, log)
        pipe = -1
        try:
            environment = worker_environment(self.folder, self.record, self.launch)
            self._write_command(argv, environment)
            pipe = secrets.pipe_with(self._secrets)
            if pipe >= 0:
                environment[secrets.VARIABLE] = str(pipe)
            # Kept, for a Popen that is collected reaps its process and loses the status.
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self.log.fd,
                stderr=self.log.fd,
                env=environment,
                cwd=self._cwd,
                start_new_session=True,
                pass_fds=[pipe] if pipe >= 0 else [],
            )
        except (OSError, ValueError) as error:
            self.record.update(state="failed", ended=time.time(), reason="cannot start %s: %s" % (argv[0], error))
            self._save_surely()
            self._tell_ready()
            return False
        finally:
            self._secrets = {}
            if pipe >= 0:
                os.close(pipe)
        found = processes.stat_of(self._child.pid)
        self._runner = Identity(self._child.pid, found.ticks if found else 0)
        self.record.update(state="running", started=time.time(), runner=self._runner.to_json())
        return True

    def _write_command(self, argv: List[str], environment: Dict[str, str]) -> None:
        added = [*(self.launch.get("env") or {}), *job_variables(self.folder, self.record)]
        try:
            command.write(self.folder, argv, environment, self._cwd or "/", self._secrets, added)
        except OSError as error:
            # It only tells of the job, which may have been started to free the disk that is full.
            self.log.write("%s is not written: %s\n" % (command.NAME, error.strerror or error))

    def _members(self) -> List[Stat]:
        roots = [self._me] if self._runner is None else [self._me, self._runner]
        return processes.of_job(self.folder, self.record.get("log"), roots)

    def _turn(self, ladder: stopping.Ladder) -> bool:
        """One look at everything; True once the job is over and none of its processes lives."""
        self._reap()
        self.log.keep_within_limit()
        self._look_for_stop(ladder)
        if ladder.phase == stopping.IDLE and self._runner_gone():
            ladder.end_all()
        # Over only when its status is known too: a dying process can look dead before it can be waited for.
        over = ladder.step() and self._runner_gone()
        stuck = ladder.stuck()
        if stuck and self.record.get("reason") != stuck:
            self.record["reason"] = stuck
            self._save()
        elif self._unsaved:
            self._save()
        return over

    def _runner_gone(self) -> bool:
        if self._adopt:
            return not processes.alive(self._runner)
        return self._status is not None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._runner is not None and pid == self._runner.pid and self._status is None:
                self._status = status

    def _look_for_stop(self, ladder: stopping.Ladder) -> None:
        # Looked for at every turn, so that a signal that came too early loses no request.
        stop = paths.read_json(self._path("stop.json"))
        if stop is None and self._terminated:
            # By signal alone: from somebody on the node, or from a console where the disk is full.
            stop = self._told_of_stop or {"requested": time.time(), "force": False}
        if stop is not None and self._forced:
            stop = dict(stop, force=True)
        if stop is None or stop == self._told_of_stop:
            return
        self._told_of_stop = stop
        if not self._runner_gone():
            self.record.update(state="stopping", stop=stop)
            self._save()
        ladder.ask(bool(stop.get("force")))

    def _finish(self, ladder: stopping.Ladder) -> None:
        self._reap()
        self.record["ended"] = time.time()
        self.record["killed_processes"] = len(ladder.killed)
        last = events.last_event(self._path("events.jsonl"))
        if self._status is None:
            self._finish_adopted(ladder, last)
        else:
            code = os.WEXITSTATUS(self._status) if os.WIFEXITED(self._status) else None
            number = os.WTERMSIG(self._status) if os.WIFSIGNALED(self._status) else None
            self.record["exit"] = {"code": code, "signal": number}
            by_us = ladder.grace_over or self._runner in ladder.killed
            grace = float(self.launch.get("stop_grace_s", 60.0))
            state, reason = outcome.verdict(code, number, last, self.record.get("stop"), by_us, grace)
            self.record.update(state=state, reason=reason)
        self._save_surely()

    def _finish_adopted(self, ladder: stopping.Ladder, last: Optional[Dict[str, Any]]) -> None:
        kind = last.get("event") if last else None
        state = "interrupted" if kind == "interrupted" and not ladder.killed else "killed"
        self.record.update(state=state, reason="its supervisor was gone; what was left of it was ended on request")

    def _save(self) -> None:
        try:
            paths.write_json(self._path("state.json"), self.record)
            self._unsaved = False
        except OSError as error:
            # A full disk must not end the supervision: it is tried again at the next turn.
            self._unsaved = True
            self._disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)

    def _save_surely(self) -> None:
        # None of the job's processes lives: whoever reads that it ended may have its GPUs at once.
        while self._gpu_locks:
            os.close(self._gpu_locks.pop())
        deadline = time.monotonic() + _SAVE_FOR_S
        self._save()
        # A full disk is waited for without end: only this process knows what became of the job.
        while self._unsaved and (self._disk_full or time.monotonic() < deadline):
            time.sleep(_TICK_S)
            self._save()


def worker_environment(folder: str, record: Dict[str, Any], launch: Dict[str, Any]) -> Dict[str, str]:
    """The environment of a worker: ours, then what the launch adds, then the GPUs by UUID (none: no GPU is visible)."""
    environment = dict(os.environ)
    environment.update(launch.get("env") or {})
    environment.update(job_variables(folder, record))
    return environment


def job_variables(folder: str, record: Dict[str, Any]) -> Dict[str, str]:
    """The variables that every job gets."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu["uuid"] for gpu in record.get("gpus") or ()),
        "DFLASH_TUI_JOB": str(record.get("job", "")),
        "DFLASH_TUI_JOB_DIR": folder,
        "PYTHONUNBUFFERED": "1",
        "TERM": "dumb",
        "COLUMNS": "4000",
    }


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            continue
    except BlockingIOError:
        return
