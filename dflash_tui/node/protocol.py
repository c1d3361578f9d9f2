"""The frames between a console and the agent of a node, and every message that they carry.

A frame is one line of JSON (the header, UTF-8, at most `MAX_HEADER` bytes) and then `n` raw bytes (the payload, at most
`MAX_PAYLOAD`; `n` stands in the header only where it is not 0). The same frames travel both ways.

Requests, console to agent: `{"op": NAME, "id": INT, …}`. Each is answered once: `{"re": ID, "ok": true, …}` or
`{"re": ID, "ok": false, "error": {"code": CODE, "message": LINE, "remedy": LINE}}`.

| op      | fields                                                        | answer |
|---------|---------------------------------------------------------------|--------|
| ping    |                                                               | `time` (the node's clock, seconds since 1970) |
| list    |                                                               | `jobs`: list of job records, the newest; `whole`: whether these are all |
| gpus    | `select`: list of indices or UUIDs as text, `share`           | `gpus`: `[{index, uuid, name}]`; an error where one is unknown, locked or busy |
| plan    | `python`, `spec`, `gpus`, `share`, `timeout_s`, optional `env`, `secrets` | `plan`: what `backends plan` printed |
| launch  | `job` (an id made by the console), `launch`: see `Launch`, optional `secrets` | `job`: the job's record; the same id twice launches once |
| stop    | `job`, `force`                                                | at once for a running job; for an orphaned one after its strays are gone |
| tail    | `job` and `file`, or `path`; `offset` (negative: from the end); optional `dev`, `ino` of the file that the offset belongs to; `credit` (bytes) | `dev`, `ino`, `offset`, `size`; then `tail` pushes |
| credit  | `tail` (the id of the tail request), `bytes`                  | no answer: as much more may be sent |
| untail  | `tail`                                                        | nothing more is sent |
| read    | `job` and `file`, or `path`; `offset`, `length`               | `dev`, `ino`, `offset`, `size`; the bytes are the payload, up to the next hole; `gap`: a hole of so many bytes before `offset` was skipped |
| source  | `job` and `file`, or `path` and optional `of_job`, the job that a relative path belongs to; `line` (from 1), `before`: so many bytes before it are wanted, at most 1 MiB | of a text file: `path`, `dev`, `ino`, `size`, `line`, `line_offset`, `first_line`: the line that begins at `offset`, as the payload does; `gap` |
| command | `job`                                                         | what it was started with: `command`, `servers`, `versions`: see `command.py` |
| doctor  | `python` (else the default one), `paths`: folders to look at besides the usual ones, `write`: whether disks may be tried by writing, `limit_s` of the slowest check, `host`: what the console calls this node | `checks`: `[{name, status, found, remedy}]`, `status` "ok", "warning", "problem" or "unknown", the others one line each; `gpus`: the cards as `metrics` tells them; `ntp`: whether the clock is kept by NTP, or null |
| diagnose | `job`, or `path` of a log                                    | why it failed: `failed`, `cause`, `remedy`, `source`, `lines`, `skipped_bytes`: see `diagnose/__init__.py` |

`file` is one of `JOB_FILES`. `secrets` is `{"HF_TOKEN": TEXT, "VLLM_API_KEY": TEXT}`, or one of them, which is kept in no file and shown in no message: see `secrets.py`.

Pushes, agent to console: `{"ev": NAME, …}`.

| ev      | fields |
|---------|--------|
| hello   | `protocol`, `host`, `boot_id`, `pid`, `python`, `bundle` (hash), `user`, `state_dir`, `time`, `default_python` |
| beat    | `time`; once a second, ahead of everything else |
| metrics | `metrics` (see `metrics.py`), `age` in seconds since they were read; `stale`: true where the reader hangs |
| jobs    | `jobs`: the records that changed; `gone`: ids that are no longer there |
| tail    | `tail`, `dev`, `ino`, `offset` of the first byte of the payload; `gap`: bytes skipped before it (a hole in the log); or `reset`: "truncated" or "rotated" (then `offset` says where the file goes on), or `error` |
"""

import json
from typing import Any, Dict, List, NamedTuple, Tuple

PROTOCOL = 1
MAX_PAYLOAD = 64 * 1024
MAX_HEADER = 4 * 1024 * 1024
BEAT_INTERVAL_S = 1.0

JOB_FILES = {
    "log": "log",
    "events": "events.jsonl",
    "spec": "spec.json",
    "launch": "launch.json",
    "state": "state.json",
    "command": "command.json",
}

# Error codes of answers: what scripts and the console tell apart.
BAD_REQUEST = "bad-request"
NOT_FOUND = "not-found"
GPU_UNKNOWN = "gpu-unknown"
GPU_LOCKED = "gpu-locked"
GPU_BUSY = "gpu-busy"
PYTHON_UNUSABLE = "python-unusable"
PLAN_REFUSED = "plan-refused"
NOT_RUNNING = "not-running"
IO_ERROR = "io-error"
TIMED_OUT = "timed-out"
INTERNAL = "internal"

Header = Dict[str, Any]


class Frame(NamedTuple):
    header: Header
    payload: bytes


class ProtocolError(Exception):
    """What arrived is not a frame; the connection is of no more use."""


class Refused(Exception):
    """A request that the agent refuses, as the console is told of it."""

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy


def encode(header: Header, payload: bytes = b"") -> bytes:
    """The bytes of one frame. Raises ValueError where the payload is over `MAX_PAYLOAD`."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError("a payload of %d bytes is over %d" % (len(payload), MAX_PAYLOAD))
    if payload:
        header = dict(header, n=len(payload))
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace") + b"\n" + payload


class FrameReader:
    """Bytes in, whole frames out; keeps what is not whole yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> List[Frame]:
        """Frames that `data` completes. Raises ProtocolError."""
        self._buffer += data
        frames: List[Frame] = []
        start = 0
        while True:
            frame, start = self._next(start)
            if frame is None:
                break
            frames.append(frame)
        del self._buffer[:start]
        return frames

    def _next(self, start: int) -> Tuple[Any, int]:
        end = self._buffer.find(b"\n", start)
        if end < 0:
            if len(self._buffer) - start > MAX_HEADER:
                raise ProtocolError("a header is longer than %d bytes" % MAX_HEADER)
            return None, start
        try:
            header = json.loads(self._buffer[start:end].decode("utf-8"))
        except ValueError:
            raise ProtocolError("not a frame: %r" % bytes(self._buffer[start : min(end, start + 80)])) from None
        if not isinstance(header, dict):
            raise ProtocolError("a header that is no object: %r" % (header,))
        size = header.get("n", 0)
        if not isinstance(size, int) or not 0 <= size <= MAX_PAYLOAD:
            raise ProtocolError("a payload size that cannot be: %r" % (size,))
        stop = end + 1 + size
        if len(self._buffer) < stop:
            return None, start
        return Frame(header, bytes(self._buffer[end + 1 : stop])), stop


class Launch(NamedTuple):
    """What a console asks the agent to start; `launch.json` in the job's folder.

    python: the worker Python, absolute or looked up on the node's PATH.
    verb: what `python -m backends` is asked to do: extract, prepare or verify.
    spec: the spec of that verb, opaque to the node side.
    gpus: indices or UUIDs as text; the record holds UUIDs.
    stop_grace_s: how long the stop target may take to end by itself after SIGTERM.
    stop_target: "runner" (the process we started) is the only one today.
    log_limit_bytes: past it the middle of the log is given back to the disk.
    """

    name: str
    verb: str
    python: str
    spec: Dict[str, Any]
    gpus: Tuple[str, ...] = ()
    share: bool = False
    env: Dict[str, str] = {}  # noqa: RUF012 (a NamedTuple; nobody writes to it)
    stop_grace_s: float = 60.0
    stop_target: str = "runner"
    log_limit_bytes: int = 1 << 30


# A job record: `state.json` as the supervisor writes it, and what the agent adds when it answers.
#
#   job, name, verb, python       text
#   state                         one of STATES
#   created, started, ended       seconds since 1970, or null
#   boot_id                       of the node when it was launched
#   supervisor, runner            {"pid", "ticks"}: ticks since boot when the process started
#   gpus                          [{"index", "uuid", "name", "baseline_bytes"}]
#   share                         launched on GPUs that others use too
#   exit                          {"code": int or null, "signal": int or null}, or null while it runs
#   reason                        one line: why it is in this state, "" where there is nothing to say
#   stop                          {"requested": time, "force": bool}, or null
#   killed_processes              how many had to be killed after the grace
#   log                           {"path", "dev", "ino"}
# added by the agent:
#   log_size, dir                 bytes; the job's folder
#   last_event                    the last line of events.jsonl, or null
#   progress                      the last event of kind "progress", or null
#   result                        the last event of kind "finished", or null
#   sides                         {side: the last event of kind "side" of it}, of a comparison; else {}
#   strays                        [{"pid", "ticks", "command", "gpu_bytes", "memory_bytes"}] of an orphaned job; gpu_bytes: null where
#                                 the driver does not tell; memory_bytes: resident in the node's own memory, by whole MiB
#   gpu_memory                    of an ended or orphaned job that had GPUs, one entry a GPU:
#                                 {"uuid", "index", "used_bytes", "baseline_bytes", "freed", "holders", "note"}
#     freed                       true: no process of the job lives and what is in use is back at the baseline (and
#                                 64 MiB); false: it is not; null: the card was not read since the end, or cannot be
#     holders                     [{"pid", "command", "bytes" or null, "job" or null}] where freed is false: what the driver
#                                 names and we can see, else what has a device of GPU computing open
#     note                        one line: why it is null, or "held by a process outside this container"; else ""
#                                 A card that a later job of ours was launched on has no entry; without any entry, an
#                                 hour after the end, and after a reboot the field is left out.
STATES = (
    "starting",
    "running",
    "paused",
    "stopping",
    "done",
    "interrupted",
    "failed",
    "killed",
    "lost",
    "orphaned",
)
ENDED = ("done", "interrupted", "failed", "killed", "lost", "orphaned")
