"""A hub of the tests' own on 127.0.0.1: as much of the hub's API as huggingface_hub asks for, and what goes wrong with it.

Repositories are folders of files; a commit is the hash of what they hold. `Hub.faults` says what to do wrong, and
`Hub.seen` what was asked: (method, path, whether an authorization came with it).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LFS = (".safetensors", ".parquet", ".bin")
_API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<rest>.+))?")
_FILE = re.compile(r"/(?P<datasets>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repository:
    """files: path -> bytes. gated: files need a token of `may_read`. private: all of it does. history: commits before."""

    kind: str
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    history: list[Repository] = field(default_factory=list)

    def at(self, revision: str) -> Repository | None:
        """The repository as it was at a commit; None where it has none of that name."""
        if revision in ("main", self.commit):
            return self
        return next((one for one in self.history if one.commit == revision), None)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for path in sorted(self.files):
            digest.update(path.encode() + b"\0" + self.files[path])
        return digest.hexdigest()

    def etag(self, path: str) -> str:
        return (hashlib.sha256 if path.endswith(_LFS) else hashlib.sha1)(self.files[path]).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"size": len(self.files[path]), "oid": hashlib.sha1(self.files[path]).hexdigest()}
        if path.endswith(_LFS):
            entry["lfs"] = {
                "oid": self.etag(path),
                "sha256": self.etag(path),
                "size": entry["size"],
                "pointerSize": 134,
            }
        return entry


@dataclass
class Faults:
    """status, headers: the answer to everything. cut: so many transfers of weights end after half of their bytes.

    hold: transfers of weights wait in their middle until it is set. wrong_size: weights end early, as if they were whole.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    hold: threading.Event | None = None
    wrong_size: bool = False

    @classmethod
    def held(cls) -> Faults:
        return cls(hold=threading.Event())


class Hub:
    """A server in a thread. tokens: those that the hub knows; `may_read`: those that gated and private ones are open to."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.may_read: set[str] = set()
        self.faults = Faults()
        self.seen: list[tuple[str, str, bool]] = []
        self.sent_bytes = 0
        self.holding = threading.Event()
        self._closed = threading.Event()
        hub = self

        class Handler(_Handler):
            def __init__(self, *arguments: Any) -> None:
                self.hub = hub
                super().__init__(*arguments)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, source: Path | dict[str, bytes], kind: str = "models", **options: Any) -> Repository:
        """Publishes a folder's files, or these."""
        files = source if isinstance(source, dict) else _files(source)
        self.repositories[f"{kind}/{name}"] = repository = Repository(kind, files, **options)
        return repository

    def downloads(self) -> list[str]:
        """The paths of the files that were transferred."""
        return [found["path"] for method, path, _ in self.seen if method == "GET" and (found := _FILE.fullmatch(path))]

    def close(self) -> None:
        self._closed.set()
        if self.faults.hold is not None:
            self.faults.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.seen.append((self.command, path, bool(token)))
        faults = self.hub.faults
        if faults.status:
            self._json(faults.status, {"error": "as the test wants it"}, faults.headers)
        elif token and token not in self.hub.tokens:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif api := _API.fullmatch(path):
            self._api(api, token)
        elif file := _FILE.fullmatch(path):
            self._file(file, token)
        else:
            self._refuse(404, "", "no such page")

    def _find(self, kind: str, name: str, token: str) -> Repository | None:
        found = self.hub.repositories.get(f"{kind}/{name}")
        if found is None or (found.private and token not in self.hub.may_read):
            # Without a token the hub does not tell which of the two it is.
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        return found

    def _api(self, api: re.Match[str], token: str) -> None:
        repository = self._find(api["kind"], api["name"], token)
        if repository is None:
            return
        revision = (api["rest"] or "main").strip("/")
        repository = repository.at(revision)
        if repository is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if api["what"] == "tree":
            tree = [{"type": "file", "path": path, **repository.entry(path)} for path in sorted(repository.files)]
            self._json(200, tree)
            return
        siblings = []
        for path in sorted(repository.files):
            entry = repository.entry(path)
            sibling = {"rfilename": path, "size": entry["size"], "blobId": entry["oid"]}
            siblings.append(sibling | ({"lfs": entry["lfs"]} if "lfs" in entry else {}))
        info = {"id": api["name"], "sha": repository.commit, "siblings": siblings, "tags": [], "private": False}
        self._json(200, info | {"gated": "manual" if repository.gated else False, "downloads": 0, "likes": 0})

    def _file(self, file: re.Match[str], token: str) -> None:
        repository = self._find("datasets" if file["datasets"] else "models", file["name"], token)
        if repository is None:
            return
        if repository.gated and token not in self.hub.may_read:
            self._refuse(403 if token else 401, "GatedRepo", "Access to this repository is restricted")
            return
        repository = repository.at(file["revision"])
        if repository is None:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return
        path = file["path"]
        if path not in repository.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        data = repository.files[path]
        begin = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        large = path.endswith(_LFS)
        faults = self.hub.faults
        self.send_response(206 if begin else 200)
        headers = {"ETag": f'"{repository.etag(path)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        size = len(data) - begin
        if large and faults.wrong_size and self.command == "GET":
            data, size = data[:-100], size - 100
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self._send(data[begin:], large)
        except OSError:  # the client went away
            self.close_connection = True

    def _send(self, data: bytes, large: bool) -> None:
        faults = self.hub.faults
        half = len(data) // 2
        self.wfile.write(data[:half])
        self.wfile.flush()
        self.hub.sent_bytes += half
        if large and faults.hold is not None:
            self.hub.holding.set()
            faults.hold.wait()
        if large and faults.cut > 0:
            faults.cut -= 1
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(data[half:])
        self.hub.sent_bytes += len(data) - half

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._json(status, {"error": message}, headers)

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
