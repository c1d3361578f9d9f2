"""How a command ends: the exit codes that scripts go by, and the error that carries one."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from dflash_tui.fleet.facts import Job, JobState
from dflash_tui.link import LinkError, RequestRefused
from dflash_tui.node import protocol


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 3
    UNREACHABLE = 4
    NOT_FOUND = 5
    CTRL_C = 130
    BROKEN_PIPE = 141


EXIT_CODES_HELP = """exit codes:
  0    it worked
  1    the job, the verification or the request failed, or doctor or diagnose found a problem
  2    bad usage or bad input, or the node refused it; also where the job alone could find that
  3    the job was interrupted (stopped on request); what it had finished counts
  4    a host could not be reached; the others are still shown
  5    there is no such job, or no such file on the node
  130  ctrl+C; a job that was being waited for goes on
  141  whoever read the output went away
"""

_REFUSALS = {
    protocol.NOT_FOUND: Exit.NOT_FOUND,
    protocol.INTERNAL: Exit.FAILED,
    protocol.IO_ERROR: Exit.FAILED,
    protocol.TIMED_OUT: Exit.FAILED,
}


class CommandError(Exception):
    """Why a command gives up: one line, what mends it, and the exit code."""

    def __init__(self, code: Exit, message: str, remedy: str = "", host: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.host = host

    def __str__(self) -> str:
        line = f"{self.message}: {self.remedy}" if self.remedy else self.message
        return f"{self.host}: {line}" if self.host and not line.startswith(f"{self.host}:") else line

    def to_json(self) -> dict[str, Any]:
        known = {"host": self.host} if self.host else {}
        return {**known, "error": self.message, "remedy": self.remedy, "exit_code": int(self.code)}


def of_link_error(error: LinkError, host: str = "") -> CommandError:
    """A refusal is told apart from a host that cannot be reached."""
    if isinstance(error, RequestRefused):
        code = _REFUSALS.get(error.code, Exit.BAD_INPUT)
    else:
        code = Exit.BAD_INPUT if error.code in ("bad-target", "bad-ssh-config") else Exit.UNREACHABLE
    return CommandError(code, error.message, error.remedy, host)


def of_job(job: Job) -> Exit:
    """The exit code for a job that has ended; the worker's own code tells bad input from a fault."""
    if job.state is JobState.DONE:
        return Exit.OK
    if job.state is JobState.INTERRUPTED:
        return Exit.INTERRUPTED
    if job.state is JobState.FAILED and job.exit_code == Exit.BAD_INPUT:
        return Exit.BAD_INPUT
    return Exit.FAILED
