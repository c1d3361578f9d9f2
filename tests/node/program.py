"""A job for tests in the place of `backends/__main__.py`: does what its spec says, with real processes.

spec: {"do": [step, …]}; a step is [name, argument…]. `plan -` answers with the spec that it got.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

EVENTS = None


def event(name, **fields):
    with Path(EVENTS).open("a") as file:
        file.write(json.dumps(dict(t=time.time(), event=name, **fields)) + "\n")


def wait_for_ever():
    while True:
        time.sleep(3600)


def ignore_term():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def child(what, session=False, output=None):
    """Another process of this program that runs one step."""
    command = [sys.executable, __file__, "step", json.dumps(what)]
    if output is None:
        subprocess.Popen(command, start_new_session=session)
        return
    with Path(output).open("ab") as file:
        subprocess.Popen(command, start_new_session=session, stdout=file, stderr=file)


def daemon():
    """Forks twice, so that no parent of ours knows it, and ignores SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ignore_term()
            print(f"daemon {os.getpid()}", flush=True)
            wait_for_ever()
        os._exit(0)
    os.wait()


def retitle():
    """Wipes its environment and command line, as setproctitle does, and takes another name."""
    fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
    # arg_start, arg_end, env_start, env_end: fields 48 to 51 of proc(5).
    arg_start, _, _, env_end = (int(field) for field in fields[45:49])
    ctypes.memset(arg_start, 0, env_end - arg_start)
    ctypes.memmove(arg_start, b"VLLM::EngineCore", 16)
    ctypes.CDLL(None).prctl(15, b"VLLM::Engine", 0, 0, 0)
    ignore_term()
    print(f"retitled {os.getpid()}", flush=True)
    wait_for_ever()


def obey(status=3):
    """Ends kindly at SIGTERM: the event first, then status 3."""

    def on_term(*_):
        event("interrupted", message="stopped on request", done=1, total=2)
        os._exit(status)

    signal.signal(signal.SIGTERM, on_term)
    event("phase", phase="waiting")
    wait_for_ever()


def end_in_another_thread(go):
    """At SIGTERM the first thread ends and another one goes on, as while a large process is torn down."""

    def last():
        wait_for_file(go)
        os._exit(3)

    def on_term(*_):
        event("interrupted", message="stopped on request", done=1, total=2)
        threading.Thread(target=last).start()
        # exit(2) of this thread alone
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)

    signal.signal(signal.SIGTERM, on_term)
    event("phase", phase="waiting")
    wait_for_ever()


def write(megabytes, pause=0.0):
    for number in range(megabytes * 16):
        print(f"{number:08d} " + "x" * 65526, flush=True)
        time.sleep(pause)


def show_environment(path):
    draft = Path(path + ".tmp")
    draft.write_text(json.dumps(dict(os.environ)))
    draft.rename(path)


def take_secrets(path):
    """Writes the hash of the token that came through the pipe, never the token."""
    fd = os.environ.get("DFLASH_TUI_SECRETS_FD")
    token = "" if fd is None else json.loads(os.fdopen(int(fd), "rb").read())["HF_TOKEN"]
    draft = Path(path + ".tmp")
    draft.write_text(hashlib.sha256(token.encode()).hexdigest())
    draft.rename(path)


def wait_for_file(path):
    while not Path(path).exists():
        time.sleep(0.02)


def exec_as(title):
    """A shell that has another title and no environment at all."""
    os.execvp("bash", ["bash", "-c", f"exec env -i bash -c 'exec -a {title} sleep 3600'"])


def ignore_term_and_wait():
    ignore_term()
    wait_for_ever()


def spawner():
    """Has a new child whenever the last one is gone, and ignores SIGTERM itself."""
    ignore_term()
    while True:
        subprocess.run(["sleep", "3600"], check=False)


def share_memory(told):
    """Holds shared memory that a resource tracker knows of, as a server's queues are, and ignores SIGTERM."""
    from multiprocessing import shared_memory

    ignore_term()
    held = shared_memory.SharedMemory(create=True, size=1 << 20)
    draft = Path(told + ".tmp")
    draft.write_text(held.name)
    draft.rename(told)
    wait_for_ever()


STEPS = {
    "share_memory": share_memory,
    "ignore_term_and_wait": ignore_term_and_wait,
    "spawner": spawner,
    "event": lambda name, fields: event(name, **fields),
    "print": lambda text: print(text, flush=True),
    "exit": lambda status: sys.exit(status),
    "die": lambda number: os.kill(os.getpid(), number),
    "child": child,
    "daemon": daemon,
    "retitle": retitle,
    "ignore_term": ignore_term,
    "wait": wait_for_ever,
    "obey": obey,
    "end_in_another_thread": end_in_another_thread,
    "write": write,
    "environment": show_environment,
    "secrets": take_secrets,
    "wait_for": wait_for_file,
    "exec_as": exec_as,
}


def main():
    global EVENTS
    if sys.argv[1] == "plan":
        request = json.load(sys.stdin)
        print("noise before the answer")
        for name, *arguments in request["spec"].get("do", []):
            STEPS[name](*arguments)
        print(json.dumps({"ok": True, "verb": request["verb"], "spec": request["spec"]}))
        return
    if sys.argv[1] == "step":
        name, *arguments = json.loads(sys.argv[2])
        STEPS[name](*arguments)
        return
    EVENTS = sys.argv[4]
    spec = json.loads(Path(sys.argv[2]).read_text())
    for name, *arguments in spec["do"]:
        STEPS[name](*arguments)


main()
