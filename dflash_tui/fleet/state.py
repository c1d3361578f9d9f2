"""What the console knows of all nodes: one frozen value, and the one function that makes the next of it from a fact.

A node whose link is lost keeps everything that was last known of it; only `last_seen` tells how old that is.
A node that nothing happened to stays the same object, so that a screen can tell by identity what to draw anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dflash_tui.fleet.facts import (
    AgentGreeted,
    BeatArrived,
    Fact,
    Gpu,
    Job,
    JobsArrived,
    JobState,
    LinkChanged,
    LinkState,
    LogArrived,
    Metrics,
    MetricsArrived,
)
from dflash_tui.fleet.series import Series, append
from dflash_tui.fleet.sides import Points, points_of

# Metrics come once a second: a longer silence is drawn as a gap.
GAP_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as it was last known.

    last_seen: the console's clock at the last sign of life, None before the first.
    gpu_series: utilisation in percent by `gpu_key`; job_series: samples/s by job id.
    side_points: of each comparison that was seen running, what its sides had done when, by job id and side.
    """

    host: str
    link: LinkChanged
    last_seen: float | None = None
    agent: AgentGreeted | None = None
    metrics: Metrics | None = None
    jobs: Mapping[str, Job] = field(default_factory=dict)
    gpu_series: Mapping[str, Series] = field(default_factory=dict)
    job_series: Mapping[str, Series] = field(default_factory=dict)
    side_points: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        return self.link.state is LinkState.LIVE

    @property
    def clock_offset_s(self) -> float:
        """The node's clock less the console's."""
        return 0.0 if self.agent is None else self.agent.clock_offset_s

    def console_time(self, node_time: float) -> float:
        """A time by the node's clock, by the console's."""
        return node_time - self.clock_offset_s


@dataclass(frozen=True, slots=True)
class Totals:
    """How many there are of what, over all nodes."""

    nodes: int = 0
    live: int = 0
    gpus: int = 0
    jobs: Mapping[JobState, int] = field(default_factory=dict)

    @property
    def active_jobs(self) -> int:
        return sum(number for state, number in self.jobs.items() if not state.ended)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes, in the order in which the user named them."""

    nodes: tuple[NodeView, ...] = ()

    @classmethod
    def of(cls, hosts: Iterable[str], local_time: float) -> Fleet:
        """A fleet of which nothing is known yet."""
        return cls(tuple(NodeView(host, LinkChanged(host, LinkState.CONNECTING, local_time)) for host in hosts))

    def node(self, host: str) -> NodeView | None:
        return next((node for node in self.nodes if node.host == host), None)

    def job(self, host: str, job: str) -> Job | None:
        node = self.node(host)
        return None if node is None else node.jobs.get(job)

    def jobs(self) -> Iterator[tuple[NodeView, Job]]:
        """Every job with its node: those that still run first, then the newest first."""
        pairs = [(node, job) for node in self.nodes for job in node.jobs.values()]
        return iter(sorted(pairs, key=lambda pair: (pair[1].state.ended, -pair[0].console_time(pair[1].created))))

    def totals(self) -> Totals:
        jobs: dict[JobState, int] = {}
        for node in self.nodes:
            for job in node.jobs.values():
                jobs[job.state] = jobs.get(job.state, 0) + 1
        gpus = sum(len(node.metrics.gpus) for node in self.nodes if node.metrics is not None)
        return Totals(len(self.nodes), sum(node.live for node in self.nodes), gpus, jobs)


def gpu_key(gpu: Gpu) -> str:
    """What a GPU is known by: its UUID, or its index where it has none (a lost card)."""
    return gpu.uuid or str(gpu.index)


def reduce(fleet: Fleet, fact: Fact) -> Fleet:
    """The fleet after `fact`; the same object where the fact tells nothing about it."""
    if isinstance(fact, LogArrived):
        return fleet
    for place, node in enumerate(fleet.nodes):
        if node.host == fact.host:
            after = _reduce_node(node, fact)
            return fleet if after is node else Fleet((*fleet.nodes[:place], after, *fleet.nodes[place + 1 :]))
    return fleet


def _reduce_node(node: NodeView, fact: Fact) -> NodeView:
    match fact:
        case LinkChanged():
            seen = fact.local_time if fact.state is LinkState.LIVE else node.last_seen
            return node if fact == node.link else replace(node, link=fact, last_seen=seen)
        case AgentGreeted():
            return node if fact == node.agent else replace(node, agent=fact)
        case BeatArrived():
            return replace(node, last_seen=fact.local_time)
        case MetricsArrived():
            return _with_metrics(node, fact.metrics)
        case JobsArrived():
            return _with_jobs(node, fact)
        case _:
            return node


def _with_metrics(node: NodeView, metrics: Metrics) -> NodeView:
    before = node.metrics
    if before is not None and metrics.time == before.time:
        # The reader hangs and the agent repeats what it last had: its age is news, its values are not.
        return node if metrics == before else replace(node, metrics=metrics)
    gap = before is not None and metrics.time - before.time > GAP_S
    series: dict[str, Series] = {}
    for gpu in metrics.gpus:
        past = node.gpu_series.get(gpu_key(gpu), ())
        series[gpu_key(gpu)] = append(append(past, None) if gap and past else past, gpu.utilisation_percent)
    return replace(node, metrics=metrics, gpu_series=series)


def _with_jobs(node: NodeView, fact: JobsArrived) -> NodeView:
    jobs = {} if fact.whole else {name: job for name, job in node.jobs.items() if name not in fact.gone}
    jobs.update((job.id, job) for job in fact.jobs)
    series = {name: values for name, values in node.job_series.items() if name in jobs}
    points = {name: values for name, values in node.side_points.items() if name in jobs}
    for job in fact.jobs:
        if job.sides and not job.state.ended:
            points[job.id] = points_of(job, points.get(job.id, {}))
        before = node.jobs.get(job.id)
        if (
            job.state is JobState.RUNNING
            and job.progress is not None
            and (before is None or before.progress != job.progress)
        ):
            series[job.id] = append(series.get(job.id, ()), job.progress.samples_per_s)
    if jobs == node.jobs and series == node.job_series:
        return node  # of the same jobs the points are the same
    return replace(node, jobs=jobs, job_series=series, side_points=points)
