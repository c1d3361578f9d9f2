"""`python -m vllm.entrypoints.cli.main serve MODEL …`: vLLM's command line and HTTP answers, and faults at a word.

FAKE_VLLM holds a JSON object: `folder` (what it remembers from one start to the next), `recorded` (an extraction whose states
are answered with, by token ids; absent: made-up ones) and the faults, each `{"name": …}` with
`starts` (in which starts, counted from 1; absent: in all), `rows` or `times` (of which requests: those whose first token is
given, or the first so many; absent: all).
"""

import argparse
import fcntl
import functools
import http.server
import json
import os
import signal
import struct
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

SETTINGS = json.loads(os.environ.get("FAKE_VLLM", "{}"))
FOLDER = Path(SETTINGS["folder"])
DTYPES = {"float32": ("F32", np.float32), "float16": ("F16", np.float16)}


def parsed(argv):
    parser = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False)
    parser.add_argument("model")
    for name in ("--host", "--dtype", "--speculative-config", "--kv-transfer-config"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--max-model-len", "--tensor-parallel-size"):
        parser.add_argument(name, type=int, required=True)
    flags = ("no-enable-prefix-caching", "no-enable-chunked-prefill", "enforce-eager", "disable-uvicorn-access-log")
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


def states(ids, layers, width):
    """[T, L, H] that tell which token, layer and channel they are of; a test makes them again."""
    places = np.arange(len(ids))[:, None, None] * 0.5
    return (
        np.asarray(ids)[:, None, None] * 0.01
        + np.asarray(layers)[None, :, None]
        + np.arange(width)[None, None, :] * 0.001
        + places
    )


class Fakery:
    def __init__(self, options):
        self.options = options
        self.lock = threading.Lock()
        self.turn = threading.Lock()
        self.layers = json.loads(options.speculative_config)["draft_model_config"]["hf_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
        transfer = json.loads(options.kv_transfer_config)["kv_connector_extra_config"]
        self.storage = transfer["shared_storage_path"]
        self.takes_paths = transfer.get("allow_custom_save_path", False)
        self.width = SETTINGS.get("width") or json.loads(Path(options.model, "config.json").read_text())["hidden_size"]
        self.used = {}
        self.at_once = self.most_at_once = self.requests = 0
        with (FOLDER / "starts").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            self.start = len(file.read().splitlines()) + 1
            file.write(json.dumps({"pid": os.getpid(), "cwd": [path.name for path in Path().iterdir()], "argv": sys.argv[1:], "port": options.port,
                                   "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\n")  # fmt: skip

    @functools.cached_property
    def files(self):
        files = {path: load_file(path)["token_ids"] for path in Path(SETTINGS["recorded"]).glob("hs_*.safetensors")}
        return {tuple(ids.tolist()): path for path, ids in files.items()}

    def recorded(self, ids):
        return load_file(self.files[tuple(ids)])["hidden_states"]

    def fault(self, name, ids=None):
        """The fault of that name, where it is due now."""
        for number, fault in enumerate(SETTINGS.get("faults", [])):
            if fault["name"] != name or self.start not in fault.get("starts", [self.start]):
                continue
            if ids is not None and ids[0] not in fault.get("tokens", [ids[0]]):
                continue
            with self.lock:
                self.used[number] = self.used.get(number, 0) + 1
                if self.used[number] <= fault.get("times", 1 << 30):
                    return fault
        return None

    def write(self, path, ids):
        """A file as the connector writes it: a lock beside it, held while it is written."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        lock = None
        if SETTINGS.get("locks", True):
            lock = os.open(path + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self.write_locked, args=(path, list(ids), lock), daemon=True).start()
        if lock is None:
            while not Path(path).exists():
                time.sleep(0.005)

    def write_locked(self, path, ids, lock):
        held = self.fault("lock", ids)
        if held:
            time.sleep(held["seconds"])
        failed = self.fault("write fails", ids)
        if failed:
            print(f"(EngineCore pid={os.getpid()}) ERROR 11-30 12:00:00 [connector.py:1] Hidden-states write failed for"
                  f" req_id=cmpl-1: {failed['words']}", flush=True)  # fmt: skip
        else:
            kind, number = DTYPES[SETTINGS.get("dtype", self.options.dtype)]
            layers = self.layers[1:] if self.fault("layer missing") else self.layers
            values = self.recorded(ids) if "recorded" in SETTINGS else states(ids, layers, self.width)
            if self.fault("shifted"):
                values = np.roll(values, 1, axis=1)
            if self.fault("zeros", ids):
                values = values * 0
            if self.fault("other tokens", ids):
                ids = [token + 1 for token in ids]
            parts = {"hidden_states": (kind, values.astype(number)), "token_ids": ("I64", np.asarray(ids, np.int64))}
            header, data, end = {}, b"", 0
            for name, (type_, array) in parts.items():
                header[name] = {"dtype": type_, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
                end += array.nbytes
                data += array.tobytes()
            head = json.dumps(header).encode()
            head += b" " * (-len(head) % 8)
            whole = struct.pack("<Q", len(head)) + head + data
            if self.fault("truncated", ids):
                whole = whole[: len(whole) // 2]
            temporary = Path(f"{path}.part")
            temporary.write_bytes(whole)
            temporary.replace(path)
        if lock is not None:
            os.close(lock)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fakery = None

    def log_message(self, *_):
        pass

    def answer(self, status, data, kind="application/json"):
        body = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        fake = self.fakery
        if self.path == "/health":
            return self.answer(503 if fake.fault("not healthy") else 200, "")
        if self.path == "/metrics":
            size = SETTINGS.get("kv_tokens", 100000)
            labels = f'block_size="16",kv_cache_size_tokens="{size}"' if size else 'block_size="16"'
            return self.answer(200, f"# TYPE x gauge\nvllm:cache_config_info{{{labels}}} 1.0\n", "text/plain")
        if self.path == "/version":
            return self.answer(200, {"version": SETTINGS.get("version", "0.32.0")})
        if self.unknown():
            return self.answer(401, {"error": "Unauthorized"})
        if self.path == "/v1/models":
            name = SETTINGS.get("serves", fake.options.model)
            length = SETTINGS.get("max_model_len", fake.options.max_model_len)
            return self.answer(200, {"data": [{"id": name, "root": name, "max_model_len": length}]})
        return self.answer(404, {"detail": "Not Found"})

    def unknown(self):
        key = os.environ.get("VLLM_API_KEY")
        return key and self.headers.get("Authorization") != f"Bearer {key}"

    def do_POST(self):
        fake = self.fakery
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or self.unknown():
            return self.answer(404, {"detail": "Not Found"})
        with fake.lock:
            fake.at_once += 1
            fake.requests += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
            (FOLDER / f"most-{fake.start}").write_text(str(fake.most_at_once))
            (FOLDER / f"requests-{fake.start}").write_text(str(fake.requests))
        try:
            return self.complete(fake, order, order["prompt"])
        finally:
            with fake.lock:
                fake.at_once -= 1

    def complete(self, fake, order, ids):
        time.sleep(SETTINGS.get("seconds", 0.0))
        ending = fake.fault("ends", ids)
        if ending:
            if ending.get("words"):
                print(ending["words"], flush=True)
            os._exit(ending["status"])
        if fake.fault("stalls", ids):
            time.sleep(3600)
        queued = fake.fault("one at a time", ids)
        if queued:
            with fake.turn:
                time.sleep(queued["seconds"])
        slow = fake.fault("slow", ids)
        if slow:
            time.sleep(slow["seconds"])
        if fake.fault("reset", ids):
            self.connection.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: closed by a reset
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return None
        refused = fake.fault("status", ids)
        if refused:
            return self.answer(refused["status"], {"error": {"message": refused.get("words", "busy")}})
        wanted = (order.get("kv_transfer_params") or {}).get("hidden_states_path") if fake.takes_paths else None
        path = wanted or f"{fake.storage}/cmpl-{zlib.crc32(os.urandom(8)):08x}.safetensors"
        elsewhere = fake.fault("elsewhere")
        if elsewhere:
            path = elsewhere["path"]
        if not fake.fault("no file", ids):
            fake.write(path, ids)
        return self.answer(200, {
            "choices": [{"index": 0, "text": "x", "prompt_token_ids": ids if order.get("return_token_ids") else None}],
            "kv_transfer_params": {"hidden_states_path": path},
        })  # fmt: skip


def main():
    if sys.argv[1] != "serve":
        sys.exit("only serve")
    options = parsed(sys.argv[2:])
    fake = Handler.fakery = Fakery(options)
    prefix = f"(APIServer pid={os.getpid()}) "
    print(f"{prefix}INFO 11-30 12:00:00 [api_utils.py:286] non-default args: {{}}", flush=True)
    # As the engine does, it lives on when the API server is killed.
    if fake.fault("leaves a process") and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (FOLDER / "helper").write_text(str(os.getpid()))
        time.sleep(3600)
    taken = fake.fault("port is taken")
    if taken:
        other = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
        if os.fork() == 0:  # the other program, which answers as a healthy server does
            os.setsid()
            (FOLDER / "other").write_text(str(os.getpid()))
            os.environ.pop("VLLM_API_KEY", None)
            other.serve_forever()
        other.socket.close()
        time.sleep(taken.get("seconds", 0))
    failing = fake.fault("fails to start")
    if failing:
        print(failing["words"].replace("PID", str(os.getpid())), flush=True)
        time.sleep(failing.get("seconds", 0))
        sys.exit(failing.get("status", 1))
    print(
        f"(EngineCore pid={os.getpid()}) INFO 11-30 12:00:00 [gpu_model_runner.py:1] Starting to load model x...",
        flush=True,
    )
    print(f"(EngineCore pid={os.getpid()}) INFO 11-30 12:00:00 [kv_cache_utils.py:1] GPU KV cache size:"
          f" {SETTINGS.get('kv_tokens', 100000):,} tokens", flush=True)  # fmt: skip
    http.server.ThreadingHTTPServer.daemon_threads = True
    http.server.ThreadingHTTPServer.request_queue_size = 128
    server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
    if fake.fault("ignores SIGTERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    (FOLDER / "serving").write_text(str(os.getpid()))
    server.serve_forever()


if __name__ == "__main__":
    main()
