"""The nodes that a command talks to: links opened side by side, and what went wrong with each."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from backends.hubname import SCHEME, dataset_name, model_name
from dflash_tui.commands.outcome import CommandError, Exit, of_link_error
from dflash_tui.commands.output import note
from dflash_tui.config import LOCAL, Settings
from dflash_tui.fleet.facts import AgentGreeted, Fact, Job, LinkChanged, LinkState, Metrics, MetricsArrived
from dflash_tui.hftoken import secrets_for
from dflash_tui.link import LinkError, LinkOptions, NodeLink, parse_target
from dflash_tui.node.secrets import SERVER_KEY

CONNECT_TIMEOUT_S = 60.0  # of the whole of it, bundle and all
ANSWER_TIMEOUT_S = 30.0

Answer = TypeVar("Answer")


class Node:
    """One host of a command. `failure` says why it cannot be used."""

    def __init__(self, host: str, settings: Settings) -> None:
        self.host = host
        self.env = settings.env
        self._settings = settings
        self._told_of_token = False
        self._told_of_key = False
        self.facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self.link = make_link(host, settings, self.facts)
        self.greeting: AgentGreeted | None = None
        self.failure: CommandError | None = None

    def wait_live(self, deadline: float) -> None:
        try:
            self.greeting = self.link.wait_live(max(0.1, deadline - time.monotonic()))
        except LinkError as error:
            self.failure = of_link_error(error, self.host)

    def answer(self, future: Future[Answer], timeout: float = ANSWER_TIMEOUT_S) -> Answer:
        """The answer to a request. Raises CommandError."""
        try:
            return future.result(timeout)
        except LinkError as error:
            raise of_link_error(error, self.host) from None
        except FutureTimeout:
            message = f"no answer within {timeout:.0f} s"
            raise CommandError(
                Exit.UNREACHABLE, message, "see whether the node is overloaded, then try again", self.host
            ) from None

    def secrets_for(self, verb: str, spec: Mapping[str, Any]) -> dict[str, str]:
        """What goes with a plan or a launch; said once where it goes to another machine unasked. Raises ConfigError."""
        found = secrets_for(verb, spec, self._settings)
        if "HF_TOKEN" in found and not self._settings.hf_token and self.host != LOCAL and not self._told_of_token:
            self._told_of_token = True
            note(
                f"your Hugging Face token goes to {self.host} for this job (HF_HUB_DISABLE_IMPLICIT_TOKEN=1 keeps it here)"
            )
        if SERVER_KEY in found and self.host != LOCAL and not self._told_of_key:
            self._told_of_key = True
            note(f"{SERVER_KEY} of this environment goes to {self.host} for this job (unset it to keep it here)")
        return found

    def forget_facts(self) -> None:
        """Drops what has arrived so far."""
        while not self.facts.empty():
            self.facts.get()

    def metrics(self, timeout: float) -> Metrics | None:
        """The first metrics that are whole (rates need two readings); after `timeout` seconds what there is, or None."""
        deadline = time.monotonic() + timeout
        last: Metrics | None = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                fact = self.facts.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(fact, MetricsArrived):
                last = fact.metrics
                if not last.stale and last.host.cpu_percent is not None:
                    break
            elif isinstance(fact, LinkChanged) and fact.state not in (LinkState.LIVE, LinkState.STALE) and last:
                break
        return last


def make_link(host: str, settings: Settings, facts: queue.SimpleQueue[Fact]) -> NodeLink:
    """A link that is not started yet. Raises CommandError where the host cannot be one."""
    try:
        target = parse_target(host)
    except LinkError as error:
        raise CommandError(Exit.BAD_INPUT, error.message, error.remedy) from None
    options = LinkOptions(
        ssh_config=settings.ssh_config,
        default_python=settings.python_for(host),
        accept_new_host_key=settings.accept_new_host_key,
    )
    return NodeLink(target, facts.put, options)


@contextmanager
def connected(settings: Settings) -> Iterator[list[Node]]:
    """Every host of the settings, live or with its failure. Closes the links again."""
    nodes: list[Node] = []
    try:
        for host in settings.hosts:
            nodes.append(Node(host, settings))  # noqa: PERF401 (what was made must be closed)
        for node in nodes:
            node.link.start()
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for node in nodes:
            node.wait_live(deadline)
        yield nodes
    finally:
        for node in nodes:
            node.link.close()


@contextmanager
def one_node(settings: Settings) -> Iterator[Node]:
    """The only host of a command that starts something. Raises CommandError."""
    the_host(settings)
    with connected(settings) as nodes:
        if nodes[0].failure is not None:
            raise nodes[0].failure
        yield nodes[0]


def the_host(settings: Settings) -> str:
    """The host of a command that works on one. Raises CommandError where it is not clear which."""
    if len(settings.hosts) != 1:
        names = ", ".join(settings.hosts)
        raise CommandError(
            Exit.BAD_INPUT, f"this needs one host, not {len(settings.hosts)} ({names})", "name it with --host"
        )
    return settings.hosts[0]


def find_job(nodes: Sequence[Node], text: str) -> tuple[Node, Job]:
    """The job of an id or of the beginning of one, on whichever node has it. Raises CommandError."""
    found: list[tuple[Node, Job]] = []
    failures = [node.failure for node in nodes if node.failure is not None]
    for node in nodes:
        if node.failure is not None:
            continue
        for job in node.answer(node.link.list_jobs()):
            if job.id == text:
                return node, job
            if text and job.id.startswith(text):
                found.append((node, job))
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(f"{job.id} on {node.host}" for node, job in found[:5])
        raise CommandError(
            Exit.BAD_INPUT, f"{text!r} begins the ids of {len(found)} jobs ({ids})", "write more of the id"
        )
    if failures:
        raise failures[0]
    hosts = ", ".join(node.host for node in nodes)
    raise CommandError(Exit.NOT_FOUND, f"no job {text!r} on {hosts}", "`dflash-tui jobs` lists them")


def model_on(host: str, text: str) -> str:
    """A model as the node must see it: a name on the hub as it is, a path as `path_on`. Raises CommandError, SpecError."""
    name = model_name(text)
    if name is None or (host == LOCAL and not text.startswith(SCHEME) and Path(text).exists()):
        return path_on(host, text)
    return text


def input_on(host: str, text: str) -> str:
    """An input of `prepare` as the node must see it: a dataset on the hub as it is. Raises CommandError, SpecError."""
    return text if dataset_name(text) is not None else path_on(host, text)


def path_on(host: str, text: str) -> str:
    """A path as the node must see it: a node reached over SSH has no current folder. Raises CommandError."""
    if not text:
        raise CommandError(Exit.BAD_INPUT, "a path is empty", "write where it is")
    if text.startswith(SCHEME):
        raise CommandError(Exit.BAD_INPUT, f"{text!r} is a name on the hub, and this must be a folder", "write a path")
    if host == LOCAL:
        return str(Path(os.path.expanduser(text)).absolute())
    if not PurePosixPath(text).is_absolute():
        raise CommandError(Exit.BAD_INPUT, f"{text!r} is no whole path", f"write where it is on {host}, from / on")
    return text
