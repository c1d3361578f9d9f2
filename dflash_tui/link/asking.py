"""What a node can be asked, by name: each is one request to its agent and gives a future of what the answer means."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from dflash_tui.fleet.facts import Checkup, Diagnosis, Job
from dflash_tui.fleet.source import SourceText
from dflash_tui.fleet.started import StartedWith
from dflash_tui.link import diagnose, doctor, facts, source
from dflash_tui.link.follow import what_file
from dflash_tui.link.requests import NOTHING, FilePosition, Reply, beside, job_of, position_of, then
from dflash_tui.node import protocol
from dflash_tui.node.protocol import Launch

# Longer than the agent's own limits together, for its answer knows more: the first reading of the GPUs, the trial of the
# Python, and for a launch the supervisor's first word.
AGENT_PREPARES_S = 60.0
AGENT_LAUNCHES_S = 100.0


def new_job_id(verb: str) -> str:
    """An id that sorts by time: `20261130-025500-extract-3f9a` (UTC)."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{verb}-{secrets.token_hex(2)}"


class Asking(ABC):
    """The requests of a link, which adds how one is sent. How their futures end stands in `NodeLink`."""

    host: str

    @abstractmethod
    def request(self, op: str, *, timeout: float = 30.0, **fields: Any) -> Future[Reply]:
        """Asks the agent."""

    def list_jobs(self) -> Future[tuple[Job, ...]]:
        return then(self.request("list"), lambda reply: facts.jobs(reply.header.get("jobs")))

    def launch(self, job_id: str, launch: Launch, *, secrets: Mapping[str, str] = NOTHING) -> Future[Job]:
        """Starts a job. The same id again starts nothing anew: what was lost on the way may be sent again.

        secrets: {"HF_TOKEN": …, "VLLM_API_KEY": …} for the runner; the node keeps it in memory alone.
        """
        fields = {"job": job_id, "launch": launch._asdict(), **beside(secrets=secrets)}
        return then(self.request("launch", timeout=AGENT_LAUNCHES_S, **fields), job_of)

    def stop(self, job_id: str, force: bool = False) -> Future[Mapping[str, Any]]:
        """Asks a job to end; an orphaned one is answered after its strays are gone."""
        return then(
            self.request("stop", timeout=120.0, job=job_id, force=force),
            lambda reply: facts.clean_tree(dict(reply.header)),
        )

    def plan(
        self,
        verb: str,
        spec: Mapping[str, Any],
        *,
        python: str = "",
        gpus: tuple[str, ...] = (),
        share: bool = False,
        timeout: float = 120.0,
        env: Mapping[str, str] = NOTHING,
        secrets: Mapping[str, str] = NOTHING,
    ) -> Future[Mapping[str, Any]]:
        """What `backends plan` says on the node about `spec` (the JSON object of `verb`'s spec); `secrets` as for a launch."""
        asked = self.request(
            "plan",
            timeout=timeout + AGENT_PREPARES_S,
            python=python,
            spec={"verb": verb, "spec": dict(spec)},
            gpus=list(gpus),
            share=share,
            timeout_s=timeout,
            **beside(env=env, secrets=secrets),
        )
        return then(asked, lambda reply: facts.clean_tree(reply.header.get("plan") or {}))

    def doctor(
        self, *, python: str = "", paths: tuple[str, ...] = (), write: bool = True, limit_s: float = doctor.LIMIT_S
    ) -> Future[Checkup]:
        """What the node can do and what it lacks; `write`: disks may be tried. `limit_s` is that of the slowest check."""
        return doctor.ask(self.request, self.host, python=python, paths=paths, write=write, limit_s=limit_s)

    def diagnose(self, *, job: str | None = None, path: str | None = None) -> Future[Diagnosis]:
        """Why a job failed, or what any log on the node tells of a failure."""
        return diagnose.ask(self.request, job, path)

    def read(
        self,
        *,
        job: str | None = None,
        file: str = "log",
        path: str | None = None,
        offset: int = 0,
        length: int = 65536,
    ) -> Future[tuple[FilePosition, bytes]]:
        """Up to `length` bytes (64 KiB at most) from `offset`; negative: from the end."""
        fields = what_file(job, file, path)
        asked = self.request("read", **fields, offset=offset, length=min(length, protocol.MAX_PAYLOAD))
        return then(asked, lambda reply: (position_of(reply), reply.payload))

    def source(
        self,
        *,
        path: str | None = None,
        job: str | None = None,
        file: str = "log",
        of_job: str | None = None,
        line: int = 1,
        before: int = source.AROUND,
        after: int = source.AROUND,
    ) -> Future[SourceText]:
        """A text file around a line of it, whole lines first: up to `before` bytes before the line and `after` from it on.

        of_job: the job whose traceback names a relative path.
        """
        return source.ask_source(
            self.request,
            self.read,
            job=job,
            file=file,
            path=path,
            of_job=of_job,
            line=line,
            before=before,
            after=after,
        )

    def command(self, job: str) -> Future[StartedWith]:
        """What a job was started with: command line, environment without secrets' values, versions."""
        return source.ask_command(self.request, job)
