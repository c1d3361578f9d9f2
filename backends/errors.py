"""How a verb ends when it does not finish. Loads no torch."""

from __future__ import annotations

from typing import ClassVar


class JobError(Exception):
    """Bad input or a machine that cannot do the job: one line that says what, one that says the remedy.

    `backends.__main__` turns it into a `failed` event, one line on stderr and exit status `status`.
    """

    status: ClassVar[int] = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = " ".join(message.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{self.message}: {self.remedy}" if self.remedy else self.message)


class WorkerError(JobError):
    """Workers that died too often: nothing that the user typed is wrong."""

    status = 1


class Interrupted(Exception):
    """Stopped on request, everything that was done is committed: an `interrupted` event and exit status 3.

    done, total: samples whose files are listed, and samples asked for.
    """

    def __init__(self, message: str, done: int, total: int) -> None:
        self.message = message
        self.done = done
        self.total = total
        super().__init__(message)


def one_line(error: BaseException, limit: int = 500) -> str:
    """The error's text in one line of at most `limit` characters, its class's name where it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
