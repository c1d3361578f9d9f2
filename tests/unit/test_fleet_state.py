"""The reducer: what the console knows after each fact."""

from dflash_tui.fleet.facts import (
    AgentGreeted,
    BeatArrived,
    Gpu,
    HostMetrics,
    Job,
    JobsArrived,
    JobState,
    LinkChanged,
    LinkState,
    LogArrived,
    Metrics,
    MetricsArrived,
    Progress,
)
from dflash_tui.fleet.series import LENGTH
from dflash_tui.fleet.state import Fleet, gpu_key, reduce


def fleet_of(*facts: object, hosts: tuple[str, ...] = ("a", "b")) -> Fleet:
    fleet = Fleet.of(hosts, 100.0)
    for fact in facts:
        fleet = reduce(fleet, fact)
    return fleet


def metrics(time: float, *gpus: Gpu, stale: bool = False, age_s: float = 0.0) -> MetricsArrived:
    return MetricsArrived("a", Metrics(time, HostMetrics(), gpus, "nvml", age_s=age_s, stale=stale))


def job(name: str = "j1", state: JobState = JobState.RUNNING, rate: float | None = None, **more: object) -> Job:
    progress = None if rate is None else Progress(done=int(rate), samples_per_s=rate)
    return Job(id=name, name=name, verb="extract", state=state, created=50.0, progress=progress, **more)


def test_nodes_stay_in_the_order_in_which_the_user_named_them() -> None:
    fleet = fleet_of(BeatArrived("b", 101.0), hosts=("z", "b", "a"))
    assert [node.host for node in fleet.nodes] == ["z", "b", "a"]


def test_a_lost_link_keeps_what_was_last_known_and_changes_only_last_seen() -> None:
    live = fleet_of(
        LinkChanged("a", LinkState.LIVE, 101.0),
        AgentGreeted("a", "node-a", "boot", 7, "3.11", "/usr/bin/python3", "root", "/s", 0.0),
        metrics(1.0, Gpu(0, "GPU-1", utilisation_percent=50.0)),
        JobsArrived("a", (job(),), whole=True),
        BeatArrived("a", 105.0),
    )
    lost = reduce(reduce(live, LinkChanged("a", LinkState.STALE, 108.0)), LinkChanged("a", LinkState.LOST, 115.0))
    before, after = live.nodes[0], lost.nodes[0]
    assert not after.live and after.last_seen == 105.0
    assert (after.metrics, after.jobs, after.agent, after.gpu_series) == (
        before.metrics,
        before.jobs,
        before.agent,
        before.gpu_series,
    )
    assert after.jobs["j1"].state is JobState.RUNNING


def test_what_happens_to_one_node_leaves_the_other_the_same_object() -> None:
    before = fleet_of()
    after = reduce(before, BeatArrived("a", 101.0))
    assert after.nodes[1] is before.nodes[1] and after.nodes[0] is not before.nodes[0]


def test_a_fact_that_tells_nothing_new_gives_the_same_fleet() -> None:
    told = JobsArrived("a", (job(rate=3.0),), whole=True)
    fleet = fleet_of(told)
    assert reduce(fleet, told) is fleet
    assert reduce(fleet, LogArrived("a", 1, 0, b"x")) is fleet
    assert reduce(fleet, BeatArrived("a stranger", 101.0)) is fleet


def test_utilisation_that_is_not_available_is_kept_apart_from_zero() -> None:
    fleet = fleet_of(
        metrics(1.0, Gpu(0, "GPU-1", utilisation_percent=0.0)), metrics(2.0, Gpu(0, "GPU-1", utilisation_percent=None))
    )
    assert fleet.nodes[0].gpu_series == {"GPU-1": (0.0, None)}


def test_a_series_holds_the_last_values_and_no_more() -> None:
    fleet = fleet_of(*(metrics(float(k), Gpu(0, "GPU-1", utilisation_percent=k % 100)) for k in range(500)))
    assert fleet.nodes[0].gpu_series["GPU-1"] == tuple(float(k % 100) for k in range(500 - LENGTH, 500))


def test_a_silence_is_a_gap_in_the_series() -> None:
    gpu = Gpu(0, "GPU-1", utilisation_percent=9.0)
    assert fleet_of(metrics(1.0, gpu), metrics(60.0, gpu)).nodes[0].gpu_series["GPU-1"] == (9.0, None, 9.0)


def test_metrics_repeated_by_a_hanging_reader_add_no_value_but_their_age_is_known() -> None:
    gpu = Gpu(0, "GPU-1", utilisation_percent=9.0)
    node = fleet_of(metrics(1.0, gpu), metrics(1.0, gpu, stale=True, age_s=8.0)).nodes[0]
    assert node.gpu_series["GPU-1"] == (9.0,)
    assert node.metrics is not None and node.metrics.stale and node.metrics.age_s == 8.0


def test_a_lost_card_hides_no_other() -> None:
    lost, good = Gpu(0, error="GPU is lost"), Gpu(1, "GPU-2", utilisation_percent=70.0)
    node = fleet_of(metrics(1.0, lost, good)).nodes[0]
    assert node.metrics is not None and node.metrics.gpus == (lost, good)
    assert node.gpu_series == {gpu_key(lost): (None,), "GPU-2": (70.0,)}


def test_jobs_that_changed_replace_their_own_records_and_gone_ones_go() -> None:
    fleet = fleet_of(
        JobsArrived("a", (job("j1"), job("j2")), whole=True),
        JobsArrived("a", (job("j2", JobState.DONE),), gone=("j1",)),
    )
    assert {name: record.state for name, record in fleet.nodes[0].jobs.items()} == {"j2": JobState.DONE}


def test_a_whole_list_of_jobs_forgets_those_that_it_does_not_name() -> None:
    fleet = fleet_of(JobsArrived("a", (job("j1", rate=2.0),), whole=True), JobsArrived("a", (job("j2"),), whole=True))
    assert set(fleet.nodes[0].jobs) == {"j2"} and fleet.nodes[0].job_series == {}


def test_samples_per_second_are_kept_while_a_job_runs() -> None:
    fleet = fleet_of(
        *(JobsArrived("a", (job(rate=rate),)) for rate in (1.0, 2.0, 2.0, 3.0)),
        JobsArrived("a", (job(state=JobState.DONE, rate=9.0),)),
    )
    assert fleet.nodes[0].job_series == {"j1": (1.0, 2.0, 3.0)}


def test_running_jobs_come_first_and_then_the_newest_by_one_clock() -> None:
    def record(name: str, created: float, state: JobState) -> Job:
        return Job(name, name, "extract", state, created)

    def greeted(host: str, offset: float) -> AgentGreeted:
        return AgentGreeted(host, host, "boot", 1, "3", "python3", "u", "/s", offset)

    # Node b's clock is 1,000 s ahead: its job of 1,010 was made before node a's job of 20.
    fleet = fleet_of(
        greeted("a", 0.0),
        greeted("b", 1000.0),
        JobsArrived("a", (record("a-done", 20.0, JobState.DONE), record("a-runs", 5.0, JobState.RUNNING))),
        JobsArrived("b", (record("b-done", 1010.0, JobState.DONE),)),
    )
    assert [found.id for _, found in fleet.jobs()] == ["a-runs", "a-done", "b-done"]


def test_totals_count_nodes_cards_and_jobs_by_state() -> None:
    totals = fleet_of(
        LinkChanged("a", LinkState.LIVE, 101.0),
        metrics(1.0, Gpu(0), Gpu(1)),
        JobsArrived("a", (job("j1"), job("j2", JobState.STOPPING), job("j3", JobState.FAILED))),
        JobsArrived("b", (job("j4", JobState.FAILED),)),
    ).totals()
    assert (totals.nodes, totals.live, totals.gpus, totals.active_jobs) == (2, 1, 2, 2)
    assert totals.jobs == {JobState.RUNNING: 1, JobState.STOPPING: 1, JobState.FAILED: 2}
