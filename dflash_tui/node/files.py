"""The agent's operations on files: followed, read by bytes, read by lines, and what a job was started with."""

import os
from typing import Any, Callable, Dict, Optional, Tuple

from dflash_tui.node import command, paths, protocol, readers, sourcefile, tails
from dflash_tui.node.protocol import Refused

_CREDIT = 1 << 18

Answer = Callable[..., None]
Refuse = Callable[[Any, Refused], None]


class Files:
    """`answer` and `refuse` are those of the requests; each operation calls one of them once."""

    def __init__(self, agent: Any, answer: Answer, refuse: Refuse) -> None:
        self._agent = agent
        self._answer = answer
        self._refuse = refuse
        self._readers = readers.Readers(agent.loop)

    def ops(self) -> Dict[str, Callable[[Any, protocol.Header], None]]:
        return {
            "tail": self._tail,
            "credit": self._credit,
            "untail": self._untail,
            "read": self._read,
            "source": self._source,
            "command": self._command,
        }

    def _tail(self, number: Any, header: protocol.Header) -> None:
        path, must_exist = path_of(self._agent.store.root, header)
        belongs_to = None
        if header.get("ino") is not None:
            belongs_to = (_whole(header, "dev", 0), _whole(header, "ino", 0))
        offset, credit = _whole(header, "offset", 0), _whole(header, "credit", _CREDIT)
        following = self._readers.follow(
            path,
            lambda: tails.Tail(number, path, offset, credit, belongs_to, must_exist),
            lambda position: self._answer(number, position),
            lambda refused: self._refuse(number, refused),
        )
        self._agent.add_tail(number, following)

    def _credit(self, number: Any, header: protocol.Header) -> None:
        self._agent.give_credit(header.get("tail"), max(_whole(header, "bytes", 0), 0))

    def _untail(self, number: Any, header: protocol.Header) -> None:
        self._agent.drop_tail(header.get("tail"))
        if number is not None:
            self._answer(number, {})

    def _read(self, number: Any, header: protocol.Header) -> None:
        path, _ = path_of(self._agent.store.root, header)
        length = _whole(header, "length", protocol.MAX_PAYLOAD)
        if length < 0:
            raise Refused(protocol.BAD_REQUEST, "read: length cannot be %d" % length)
        offset = _whole(header, "offset", 0)
        self._readers.read(
            path,
            lambda: tails.read_at(path, offset, length),
            lambda found: self._answer(number, *found),
            lambda refused: self._refuse(number, refused),
        )

    def _source(self, number: Any, header: protocol.Header) -> None:
        root, line, before = self._agent.store.root, _whole(header, "line", 1), _whole(header, "before", 0)
        if line < 1 or not 0 <= before <= sourcefile.MOST_BEFORE:
            raise Refused(
                protocol.BAD_REQUEST,
                "source: line must be 1 or more and before 0 to %d, not %d and %d"
                % (sourcefile.MOST_BEFORE, line, before),
            )
        path, folder = header.get("path"), None
        if header.get("job") is not None:
            path = path_of(root, header)[0]
        elif header.get("of_job") is not None:
            folder = paths.job_dir(root, header["of_job"])
        self._readers.read(
            str(path),
            lambda: sourcefile.locate(sourcefile.resolve(path, folder), line, before),
            lambda found: self._answer(number, *found),
            lambda refused: self._refuse(number, refused),
            sourcefile.LIMIT_S,
        )

    def _command(self, number: Any, header: protocol.Header) -> None:
        folder = job_folder(self._agent.store.root, header.get("job"))
        self._readers.read(
            folder,
            lambda: command.started_with(folder),
            lambda fields: self._answer(number, fields),
            lambda refused: self._refuse(number, refused),
        )


def job_folder(root: str, job: Any) -> str:
    """The folder of a job of this node. Raises Refused."""
    folder = paths.job_dir(root, job)
    if not os.path.isdir(folder):
        raise Refused(protocol.NOT_FOUND, "this node has no job %s" % job, "list them with: dflash-tui jobs")
    return folder


def path_of(root: str, header: protocol.Header) -> Tuple[str, bool]:
    """The path that a request names, and whether it must be there already. Raises Refused."""
    if header.get("job") is not None:
        name: Optional[str] = protocol.JOB_FILES.get(str(header.get("file", "log")))
        if name is None:
            known = ", ".join(protocol.JOB_FILES)
            raise Refused(protocol.BAD_REQUEST, "a job has no file %r" % (header.get("file"),), "there are " + known)
        return os.path.join(job_folder(root, header["job"]), name), False
    path = header.get("path")
    if not isinstance(path, str) or not path or "\0" in path:
        raise Refused(protocol.BAD_REQUEST, "a request for a file must name a job or a path, not %r" % (path,))
    return os.path.abspath(os.path.expanduser(path)), True


def _whole(header: protocol.Header, name: str, default: int) -> int:
    value = header.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(protocol.BAD_REQUEST, "%s must be a whole number, not %r" % (name, value))
    return value
