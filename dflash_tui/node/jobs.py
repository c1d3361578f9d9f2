"""The jobs of a node as records: what their folders say, and what became of those whose supervisor is gone.

Nothing here is remembered for the sake of truth: every agent finds the same records in the same files.
"""

import os
import shutil
import socket
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from dflash_tui.node import gpumemory, locks, paths, processes, protocol
from dflash_tui.node.events import EventCursor

Record = Dict[str, Any]
_STAGING_OLD_S = 600.0
_STRAYS_NAMED = 200


class _Entry:
    """What is known of one job's folder, and the signatures of the files that it was read from."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.signature: Any = None
        self.state: Record = {}
        self.cursor = EventCursor(os.path.join(folder, protocol.JOB_FILES["events"]))
        self.record: Record = {}
        # What `refresh` last told of: an answer to a question in between must not hide a change from the pushes.
        self.told: Optional[Record] = None


class JobStore:
    """Records of all jobs below `root`, the node's state folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.boot_id = processes.boot_id()
        self.host = socket.gethostname()
        self.memory = gpumemory.GpuMemory(root)
        self._entries: Dict[str, _Entry] = {}
        self._stats: Optional[Dict[int, processes.Stat]] = None
        os.makedirs(paths.jobs_dir(root), 0o700, exist_ok=True)
        self._sweep()

    def refresh(
        self, everything: bool, gpu_memory: Optional[Dict[int, Optional[int]]] = None
    ) -> Tuple[List[str], List[str]]:
        """Ids whose record changed and ids that are gone; without `everything` only new and living jobs are looked at."""
        self._stats = None
        ids = paths.job_ids(self.root)
        for job in ids:
            # All of them before any: a card that a later job has is no more the earlier one's to tell of.
            if job not in self._entries:
                self._read_state(self._entry(job), job)
        changed = []
        for job in ids:
            entry = self._entries.get(job)
            if entry is not None and entry.told and not everything and _settled(entry.told):
                continue
            try:
                record = self.look(job, gpu_memory)
            except protocol.Refused:
                if entry is None or entry.told is None:
                    self._entries.pop(job, None)
                continue  # removed since the folder was read
            entry = self._entries[job]
            if record != entry.told:
                entry.told = record
                changed.append(job)
        gone = sorted(set(self._entries) - set(ids))
        for job in gone:
            del self._entries[job]
        return changed, gone

    def get(self, job: str) -> Record:
        """The record as last looked at. Raises KeyError."""
        return self._entries[job].record

    def records(self) -> Iterator[Record]:
        """All records as last looked at, the oldest first."""
        for job in sorted(self._entries):
            if self._entries[job].record:
                yield self._entries[job].record

    def look(self, job: str, gpu_memory: Optional[Dict[int, Optional[int]]] = None) -> Record:
        """The record of a job by its files, now. Raises protocol.Refused where there is no such job."""
        folder = paths.job_dir(self.root, job)
        if not os.path.isdir(folder):
            raise protocol.Refused(
                protocol.NOT_FOUND, "this node has no job %s" % job, "list them with: dflash-tui jobs"
            )
        entry = self._entry(job)
        self._read_state(entry, job)
        entry.cursor.update()
        record = dict(entry.state)
        if record["state"] not in protocol.ENDED and not locks.is_held(os.path.join(folder, "lock")):
            # It may have ended between the two looks: only a state read after the lock was free counts.
            self._read_state(entry, job)
            record = dict(entry.state)
            if record["state"] not in protocol.ENDED:
                entry.cursor.update()
                self._abandoned(entry, record, gpu_memory or {})
        record.update(
            dir=folder,
            log_size=_size(os.path.join(folder, protocol.JOB_FILES["log"])),
            last_event=entry.cursor.last,
            progress=entry.cursor.progress,
            result=entry.cursor.finished,
            sides=entry.cursor.sides,
        )
        record.setdefault("strays", [])
        memory = self._gpu_memory(entry, record)
        if memory:
            record["gpu_memory"] = memory
        entry.record = record
        return record

    def _gpu_memory(self, entry: _Entry, record: Record) -> List[gpumemory.Entry]:
        """What `gpumemory` says of the cards that the job was the last to have; nothing of one that ended long ago."""
        if record["state"] not in protocol.ENDED or not record.get("gpus") or record.get("boot_id") != self.boot_id:
            return []
        written = entry.signature[1] / 1e9 if entry.signature else 0.0
        if record["state"] != "orphaned" and time.time() - (record.get("ended") or written) > gpumemory.KEPT_S:
            return []
        states = [other.state for other in self._entries.values() if other.state.get("gpus")]
        later = [
            state
            for state in states
            if state["job"] != record["job"] and (state["created"] or 0) > (record["created"] or 0)
        ]
        taken = {gpu.get("uuid") for state in later for gpu in state["gpus"]}
        mine = [gpu for gpu in record["gpus"] if gpu.get("uuid") not in taken]
        return self.memory.entries(dict(record, gpus=mine), written, self._uses) if mine else []

    def _uses(self, job: str, uuid: str) -> bool:
        """Whether a job has the card; of a job that is not here nobody can say that it has not."""
        entry = self._entries.get(job)
        return entry is None or any(gpu.get("uuid") == uuid for gpu in entry.state.get("gpus") or ())

    def _entry(self, job: str) -> _Entry:
        return self._entries.setdefault(job, _Entry(paths.job_dir(self.root, job)))

    def orphan_on(self, uuid: str) -> Optional[str]:
        """The id of an orphaned job whose processes may still use the GPU, or None."""
        for record in self.records():
            if record["state"] == "orphaned" and any(gpu.get("uuid") == uuid for gpu in record.get("gpus") or ()):
                return str(record["job"])
        return None

    def _read_state(self, entry: _Entry, job: str) -> None:
        path = os.path.join(entry.folder, protocol.JOB_FILES["state"])
        try:
            found = os.stat(path)
        except OSError:
            found = None
        signature = (found.st_ino, found.st_mtime_ns, found.st_size) if found else None
        if signature is not None and signature == entry.signature:
            return
        state = paths.read_json(path)
        if state is None or state.get("state") not in protocol.STATES:
            state = {"state": "lost", "reason": "its folder holds no state.json that can be read: %s" % entry.folder}
        entry.state = {**blank(job), **state, "job": job}
        entry.signature = signature

    def _abandoned(self, entry: _Entry, record: Record, gpu_memory: Dict[int, Optional[int]]) -> None:
        """A job that was going on and has no supervisor: orphaned while processes of it live, else lost."""
        elsewhere = record.get("boot_id") != self.boot_id
        strays = [] if elsewhere else self._strays(entry.folder, record)
        if strays:
            record["state"] = "orphaned"
            record["reason"] = "its supervisor is gone; %d of its processes live on" % len(strays)
            record["strays"] = [
                {
                    "pid": stray.pid,
                    "ticks": stray.ticks,
                    "command": processes.command(stray.pid),
                    "gpu_bytes": gpu_memory.get(stray.pid),
                    "memory_bytes": processes.resident_bytes(stray.pid),
                }
                for stray in strays[:_STRAYS_NAMED]
            ]
            return
        record["state"] = "lost"
        record["ended"] = _last_sign(entry.folder)
        if elsewhere and record.get("host") not in (None, self.host):
            # A home folder that several nodes share: the other node's record is not ours to write.
            record["reason"] = "it ran on node %s" % record.get("host")
            return
        if elsewhere:
            record["reason"] = "the node was rebooted"
        elif record.get("supervisor") is None:
            record["reason"] = "its supervisor never started"
        else:
            record["reason"] = "its supervisor is gone and so are its processes: nobody saw how it ended"
        if entry.cursor.finished is not None:
            record["reason"] += " (its last word was 'finished')"
        self._write_lost(entry, record)

    def _write_lost(self, entry: _Entry, record: Record) -> None:
        try:
            fd = locks.take(os.path.join(entry.folder, "lock"))
        except OSError:
            return
        if fd is None:
            return
        try:
            path = os.path.join(entry.folder, protocol.JOB_FILES["state"])
            now = paths.read_json(path)
            if now is not None and now.get("state") not in protocol.ENDED:
                lost = {name: record[name] for name in ("state", "ended", "reason")}
                paths.write_json(path, dict(now, **lost))
        except OSError:
            return  # a full disk: it is found lost again at the next look
        finally:
            os.close(fd)

    def _strays(self, folder: str, record: Record) -> List[processes.Stat]:
        if self._stats is None:
            self._stats = processes.snapshot()
        runner = processes.identity_of(record.get("runner"))
        roots = [runner] if runner else []
        # None among those of this look's beginning: only a look of now says that there is none.
        return processes.of_job(folder, record.get("log"), roots, self._stats) or processes.of_job(
            folder, record.get("log"), roots
        )

    def _sweep(self) -> None:
        """Removes folders of launches that ended half-way long ago."""
        for name in os.listdir(paths.jobs_dir(self.root)):
            path = os.path.join(paths.jobs_dir(self.root), name)
            try:
                if name.startswith(STAGING) and time.time() - os.lstat(path).st_mtime > _STAGING_OLD_S:
                    shutil.rmtree(path, ignore_errors=True)
            except FileNotFoundError:
                continue  # another agent's launch has just got its name


STAGING = ".new-"


def blank(job: str) -> Record:
    """A record with every field that a console may ask for."""
    return {
        "job": job,
        "name": job,
        "verb": "",
        "python": "",
        "state": "starting",
        "created": 0.0,
        "started": None,
        "ended": None,
        "boot_id": "",
        "host": None,
        "supervisor": None,
        "runner": None,
        "gpus": [],
        "share": False,
        "exit": None,
        "reason": "",
        "stop": None,
        "killed_processes": 0,
        "log": None,
    }


def _settled(record: Record) -> bool:
    """Whether a record as last told changes no more but by what others do."""
    return record["state"] in protocol.ENDED[:-1] and not gpumemory.undecided(record)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _last_sign(folder: str) -> Optional[float]:
    """When a file of the job last changed: the nearest thing to the time of its end."""
    times = []
    for name in ("log", "events", "state"):
        try:
            times.append(os.stat(os.path.join(folder, protocol.JOB_FILES[name])).st_mtime)
        except OSError:
            continue
    return max(times) if times else None
