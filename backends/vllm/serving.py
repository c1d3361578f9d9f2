"""One vLLM server and its client, as a process that the runner starts: samples in on stdin, results out on stdout.

The lines are those of `backends.worker`, but for the order sample {id, row, token_ids} and for what is told besides: server
{pid, port, command, cwd, environment}. What it does not survive ends its server, too: stdin closes where the runner is gone,
and SIGTERM asks for the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from backends.errors import JobError, WorkerError, one_line
from backends.spec import ExtractSpec
from backends.store import unwritable
from backends.vllm.client import NoAnswer, Refused, Served, ServerClient
from backends.vllm.command import HOST, STATES, command_for, takes_paths
from backends.vllm.devices import visible
from backends.vllm.feeding import Feeder, Lost, Sample
from backends.vllm.filing import Filer, sweep
from backends.vllm.log import ServerLog
from backends.vllm.other import address, limit, our_model
from backends.vllm.server import CANNOT_BE_KILLED, START_IN, Server, free_port, how_ended, port_taken
from backends.vllm.told import without_secrets
from backends.worker import CRASHED, ORPHANED, Answers

# A hybrid of 27B took 217 s on an H200; weights may come from a slow disk. DFLASH_TUI_VLLM_START_S sets another limit.
START_S = 3600.0
_LIMIT_VARIABLE = "DFLASH_TUI_VLLM_START_S"
# A server that runs already answers, or it is not there.
_THERE_S = 30.0
_POLL_S = 0.25
_LOG_EVERY_S = 0.5
_PORTS = 3
# How long a server of ours may take to end by itself: one that is idle takes 1.5 s.
_GRACE_S = 20.0
_GRACE_AT_ONCE_S = 3.0
# How long a file may take to show after its answer: on this machine's disk, and on one that others share.
_APPEAR_S, _APPEAR_SHARED_S = 1.0, 30.0

ENDED, STOPPED = "end", "stop"


def vllm_worker_main() -> int:
    """Runs one server and its client. Returns an exit status."""
    # The runner decides when to stop; ctrl+c in a terminal reaches every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def stop(_number: int, _frame: FrameType | None) -> None:
        inbox.put({"op": STOPPED})

    signal.signal(signal.SIGTERM, stop)
    # Libraries print: the pipe to the runner moves away, and stdout becomes the log.
    answers = Answers(os.dup(1), lambda: inbox.put({"op": STOPPED}))
    os.dup2(2, 1)
    threading.Thread(target=_read_orders, args=(inbox,), daemon=True, name="orders").start()
    order = inbox.get()
    if order["op"] != "start":
        return ORPHANED
    worker = ServerWorker(order, answers, inbox)
    try:
        return worker.run()
    except JobError as error:
        answers.send("refused", message=error.message, remedy=error.remedy, status=error.status)
    except Lost as lost:
        answers.send("crash", message=one_line(lost), starting=False)
    except Exception as error:
        traceback.print_exc()
        answers.send("crash", message=f"{type(error).__name__}: {one_line(error)}", starting=False)
    finally:
        worker.close()
    return CRASHED


def _read_orders(inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        try:
            inbox.put(json.loads(line))
        except ValueError:
            break  # half a line: the runner was killed while it wrote
    inbox.put({"op": STOPPED})


class _Stopped(Exception):
    """Asked to end while the server starts."""


class ServerWorker:
    """order: `spec`, `header` (of the manifest), `vllm` (python, version, flags; empty for a server that runs already), `gpus`,
    `folder` (its own, for files and to start in), `max_model_len`, `bytes_per_token`, `key` (of a server that
    runs already), `again` (whether it was lost before)."""

    def __init__(self, order: dict[str, Any], answers: Answers, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
        self._order = order
        self._answers = answers
        self._inbox = inbox
        self._spec = ExtractSpec.from_json(order["spec"])
        self._header: dict[str, Any] = order["header"]
        self._own = not self._spec.server_url
        self._folder = Path(order["folder"])
        self._log = ServerLog()
        self._server: Server | None = None
        self._client: ServerClient | None = None
        self._feeder: Feeder | None = None
        self._kindly = False

    def run(self) -> int:
        try:
            client, model = self._connect()
        except _Stopped:
            return 0
        self._feeder = self._feed(client, model)
        self._ready(client, model)
        told = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                order = self._inbox.get(timeout=_POLL_S)
                if order["op"] == "sample":
                    self._feeder.submit(Sample(order["id"], order["row"], order["token_ids"]))
                else:
                    self._kindly = order["op"] == ENDED and not self._feeder.busy
                    return 0
            if time.monotonic() - told > _LOG_EVERY_S:
                told = time.monotonic()
                self._log.read()
                self._watch()

    def close(self) -> None:
        """The client first, then the server: one that answers waits for its connections."""
        if self._feeder is not None:
            self._feeder.close()
            self._tell_left(self._feeder.left)
        if self._client is not None:
            self._client.close()
        if self._server is not None and not self._server.end(grace_s=_GRACE_S if self._kindly else _GRACE_AT_ONCE_S):
            print(CANNOT_BE_KILLED.format(self._server.pid), flush=True)
        if self._own:
            # The runner does that too, but it may be gone.
            sweep(self._folder)
            with contextlib.suppress(OSError):  # another server's folder is beside it
                self._folder.parent.rmdir()

    def _tell_left(self, left: list[Path]) -> None:
        if left:
            message = f"files of the vLLM server that were not taken and cannot be removed from here: {len(left)}, {left[0]} first"
            self._answers.send("warning", message=message)

    # --- the start --------------------------------------------------------------------------------------------------

    def _connect(self) -> tuple[ServerClient, Served]:
        """A healthy server and its model. Raises JobError, Lost, _Stopped."""
        if not self._own:
            return self._connect_to_other()
        limit_s = _start_limit_s()
        for attempt in range(_PORTS):
            port, key = free_port(), secrets.token_urlsafe(16)
            self._start(port, key)
            client = self._new_client(f"http://{HOST}:{port}", key)
            if self._healthy(client, port, limit_s, last=attempt + 1 == _PORTS):
                break
            self._give_up()
        self._tell_phase("healthy")
        return client, self._served(client)[0]

    def _new_client(self, url: str, key: str) -> ServerClient:
        # All that it is asked at a time it may answer one after the other; that none comes for `stall_s` is told by `_watch`.
        limit_s = float(self._spec.stall_s * self._spec.concurrency)
        self._client = ServerClient(url, key=key, limit_s=limit_s, connections=self._spec.concurrency)
        return self._client

    def _start(self, port: int, key: str) -> None:
        vllm, spec, gpus = self._order["vllm"], self._spec, self._order["gpus"]
        storage, start_in = self._folder / STATES, self._folder / START_IN
        try:
            for folder in (storage, start_in):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(Path(spec.output), error) from None
        command = command_for(
            spec,
            python=vllm["python"],
            version=vllm["version"],
            flags=vllm["flags"],
            storage=storage,
            layer_ids=self._header["layer_ids"],
            port=port,
            max_model_len=self._order["max_model_len"],
        )
        added = {"VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1")}
        if gpus:
            added |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible(gpus, vllm["version"])}
        elif spec.device == "cpu":
            added["CUDA_VISIBLE_DEVICES"] = ""
        self._log.read()
        try:
            self._server = Server(command, {**os.environ, **added, "VLLM_API_KEY": key}, start_in)
        except OSError as error:
            raise WorkerError(f"the vLLM server cannot be started: {one_line(error)}", "see the log") from None
        self._log.of(self._server.pid)
        # The key is for this client alone: whoever runs the command again needs none.
        told = {"command": without_secrets(command), "cwd": str(start_in), "environment": added}
        self._answers.send("server", pid=self._server.pid, port=port, **told)
        self._tell_phase(self._log.phase)

    def _healthy(self, client: ServerClient, port: int, limit_s: float, *, last: bool) -> bool:
        """Waits for our server's health; False where another one took its port. Raises JobError, Lost, _Stopped."""
        server = self._server
        assert server is not None
        deadline = time.monotonic() + limit_s
        while True:
            self._stop_if_asked(_POLL_S)
            status = server.status()
            self._log.read()
            self._tell_phase(self._log.phase)
            if status is not None:
                if port_taken(port) and not last:
                    print(f"the port {port} was taken meanwhile; another one is tried", flush=True)
                    return False
                self._failed(status, port)
            if client.healthy() and self._is_ours(client):
                return True
            if self._log.hangs():
                said = self._log.said()
                line = "the vLLM server hangs at its start, after a worker of it failed" + (f": {said}" if said else "")
                self._raise(line, "see the log")
            if time.monotonic() > deadline:
                self._raise(
                    f"the vLLM server did not become healthy within {limit_s:g} s (it was at: {self._log.phase})",
                    "see the log; DFLASH_TUI_VLLM_START_S in the job's environment sets another limit",
                )

    def _is_ours(self, client: ServerClient) -> bool:
        """Whether who answers at the port is the server that we started, and no other that took the port before it."""
        try:
            return not client.accepts(secrets.token_urlsafe(8)) and bool(client.served())
        except (NoAnswer, Refused):
            return False

    def _failed(self, status: int, port: int) -> None:
        """Raises what a server that ended while it started means."""
        said = self._log.said()
        if port_taken(port):
            said = said or f"its port {port} was taken by another program, and so were those tried before"
        line = f"the vLLM server {how_ended(status)} before it was healthy" + (f": {said}" if said else "")
        if self._log.arguments:
            raise JobError(line, "mend what stands after --, or see the log")
        self._raise(line, "see the log")

    def _raise(self, message: str, remedy: str) -> None:
        # One that ran before is tried again: what it died of may still be going away.
        raise Lost(message) if self._order["again"] else WorkerError(message, remedy)

    def _give_up(self) -> None:
        assert self._client is not None and self._server is not None
        self._client.close()
        if not self._server.end(grace_s=_GRACE_AT_ONCE_S):
            raise WorkerError(CANNOT_BE_KILLED.format(self._server.pid), "end them, then run it again")
        self._server = None  # its number may be another's from now on

    def _stop_if_asked(self, wait_s: float) -> None:
        try:
            self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return
        raise _Stopped  # no sample is sent before `ready`

    def _connect_to_other(self) -> tuple[ServerClient, Served]:
        url = address(self._spec.server_url)
        try:
            client = self._new_client(url, self._order["key"])
        except Refused as error:
            raise JobError(f"the vLLM server at {url} cannot be asked: {one_line(error)}", "mend server_url") from None
        deadline = time.monotonic() + _THERE_S
        while not client.healthy():
            self._stop_if_asked(_POLL_S)
            if time.monotonic() > deadline:
                self._raise(f"no healthy vLLM server answers at {url}", "start it, or mend the address")
        return client, our_model(url, self._served(client), self._spec.model)

    def _served(self, client: ServerClient) -> list[Served]:
        try:
            return client.served()
        except (NoAnswer, Refused) as error:
            raise WorkerError(
                f"the vLLM server at {client.url} does not tell its models: {one_line(error)}", "see its log"
            ) from None

    def _tell_phase(self, phase: str) -> None:
        self._answers.send("phase", phase=phase)

    # --- the work ---------------------------------------------------------------------------------------------------

    def _feed(self, client: ServerClient, model: Served) -> Feeder:
        output, spec = Path(self._spec.output), self._spec
        storage = self._folder / STATES if self._own else None
        filer = Filer(
            output,
            self._header,
            storage=storage,
            appear_s=_APPEAR_S if self._own else _APPEAR_SHARED_S,
            lock_s=spec.stall_s,
        )
        return Feeder(
            client,
            filer,
            model=model.id,
            shape=(len(self._header["layer_ids"]), self._header["hidden_size"]),
            dtype=spec.stored_dtype,
            bytes_per_token=self._order["bytes_per_token"],
            output=output,
            direct=storage if self._own and takes_paths(self._order["vllm"]["version"]) else None,
            concurrency=spec.concurrency,
            tell=self._answers.send,
            explain=self._explain,
            again=self._order["again"],
        )

    def _ready(self, client: ServerClient, model: Served) -> None:
        self._log.read()
        kv = (self._log.kv_tokens if self._own else None) or client.kv_tokens()
        most, why = limit(model.max_model_len, kv)
        gpus = ", ".join(self._order["gpus"])
        self._answers.send(
            "ready",
            device=(gpus or "cpu") if self._own else self._spec.server_url,
            packing=self._order["packing"],
            why_not="",
            fallback="",
            pid=self._server.pid if self._server else 0,
            most_tokens=most,
            limited_by=why,
        )

    def _explain(self) -> tuple[str, bool]:
        self._log.read()
        return self._log.failed_write()

    def _watch(self) -> None:
        """Raises Lost where the server is gone or stalls, and what its threads found."""
        assert self._feeder is not None
        self._log.survived(self._feeder.last_good if self._feeder.delivered else 0.0)
        status = self._server.status() if self._server is not None else None
        if status is not None:
            self._log.read()
            said = self._log.said()
            line = f"the vLLM server {how_ended(status)}" + (f": {said}" if said else "")
            if said and self._order["again"] and not self._feeder.delivered:
                # The second in a row that died over its first samples, and said why.
                raise WorkerError(line, "see the log")
            raise Lost(line)
        self._feeder.check()
        if self._feeder.silent_s() > self._spec.stall_s:
            raise Lost(
                f"the vLLM server finished no sample for {self._spec.stall_s} s with {self._feeder.busy} in flight"
            )


def _start_limit_s() -> float:
    """Raises JobError."""
    text = os.environ.get(_LIMIT_VARIABLE, "").strip()
    try:
        limit_s = float(text) if text else START_S
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < math.inf:
        raise JobError(f"{_LIMIT_VARIABLE} is {text!r}, and no number of seconds above 0", "mend it, or leave it out")
    return limit_s
