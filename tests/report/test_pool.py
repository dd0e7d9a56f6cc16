"""A pool's report from its journal: what it says is what happened, in quiet worlds and in those full of faults."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import msgspec
import pytest

from elastic.core.cluster import Cluster
from elastic.core.cluster.events import ClusterEvent
from elastic.core.cluster.types import JobState, PhaseKind
from elastic.report.jobs import PoolMark, as_page, as_text, job_text
from elastic.report.pool import PoolTimeline, history_of, pool_report
from elastic.simulation.jobs.phases import PhasedJob, phased
from elastic.simulation.jobs.simulate import arrivals_of, load_workload, spec_of
from elastic.simulation.jobs.world import JobsWorld, S
from elastic.testing.faults.pool.pool_worlds import PoolWorld, draw_pool
from policies.clusters import CLUSTER_POLICIES
from tests.seeds import seeds

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs.toml"


class Quiet(NamedTuple):
    """A world where nothing goes wrong, its jobs, and the groups as they were when the last job had joined."""

    world: JobsWorld
    jobs: Mapping[str, PhasedJob]
    cycles: dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def quiet() -> Quiet:
    """The example's jobs, with their arrivals."""
    placed: list[int] = []
    cycles: dict[str, tuple[int, str]] = {}

    def handled(cluster: Cluster, _: ClusterEvent) -> None:
        nonlocal placed
        placements = [record.placement for record in cluster.jobs.values()]
        if placements != placed:
            placed = placements
            groups = cluster.groups.values()
            cycles.clear()
            cycles.update({group.name: (group.cycle_ns, ", ".join(group.members)) for group in groups})

    workload = load_workload(EXAMPLE)
    world = JobsWorld(spec_of(workload, ""), CLUSTER_POLICIES["ours"], handled=handled)
    jobs = phased(world, arrivals_of(workload, ""), workload.seed)
    return Quiet(world.run(), jobs, cycles)


def history(quiet: Quiet) -> PoolTimeline:
    return history_of(quiet.world.journal, quiet.world.cluster.policies)


def test_turns_steps_and_cycles_are_those_that_were(quiet: Quiet) -> None:
    found = history(quiet)
    told = {(one.node, one.job, round(one.begun_s * S), round(one.ended_s * S)) for one in found.slices}
    assert told == {
        (node, seen.job, seen.began_ns, seen.ended_ns) for seen in quiet.world.phases for node in seen.nodes
    }
    assert {(one.phase, one.finished) for one in found.slices} == {("rollout", True), ("train", True)}
    for name, job in quiet.jobs.items():
        seen = found.jobs[name]
        assert (seen.begun_ns, seen.stepped_ns) == (job.steps[0].begun_ns, job.steps[-1].ended_ns)
        assert seen.alone_ns == job.alone_ns
        assert len(seen.phases_ns[PhaseKind.TRAIN]) == found.cluster.request(name).steps
        assert seen.switches == 2 * found.cluster.request(name).steps
    assert {one.group: (round(one.cycle_s * S), one.members) for one in found.cycles} == quiet.cycles
    report = pool_report(found, "ours")
    for cycle in report.cycles:
        assert cycle.measured_s is not None
        assert cycle.measured_s <= cycle.cycle_s
    assert sum(job.usd for job in report.jobs) == pytest.approx(report.usd)
    planned = sum(job.usd_planned for job in report.jobs)
    assert report.usd < planned < 1.5 * report.usd, "cycles are planned at the longest responses"


def test_what_a_job_cost_as_it_came(quiet: Quiet) -> None:
    jobs = {job.name: job for job in pool_report(history(quiet), "ours").jobs}
    assert jobs["math-7b"].marginal_usd_per_hour == pytest.approx(8 * (1.85 + 5.28))
    assert jobs["code-8b"].how == "packed"
    assert jobs["code-8b"].marginal_usd_per_hour == 0.0
    assert jobs["code-8b"].alone_usd_per_hour == pytest.approx(8 * (1.85 + 5.28))


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_reports_of_worlds_full_of_faults_add_up_at_any_time(seed: int) -> None:
    world = PoolWorld(draw_pool(seed))
    world.run()
    for share in (0.3, 0.7, 1.0):
        records = world.journal[: max(1, int(len(world.journal) * share))]
        found = history_of(records, world.policies)
        now_ns = found.cluster.now_ns + 7 * S
        report = pool_report(found, "ours", now_ns=now_ns, name="lab")
        assert sum(job.usd for job in report.jobs) + report.usd_unbilled == pytest.approx(report.usd)
        assert report.usd <= report.usd_paid * (1 + 1e-9) + 1e-12
        assert sum(node.usd for node in report.nodes) == pytest.approx(report.usd)
        assert sum(kind.usd for kind in report.kinds) == pytest.approx(report.usd)
        on_node = defaultdict(list)
        for one in [*found.slices, *found.open_slices(now_ns)]:
            on_node[one.node].append((one.begun_s, one.ended_s))
        for turns in on_node.values():
            turns.sort()
            assert all(ended <= begun for (_, ended), (begun, _) in pairwise(turns))
        for node in report.nodes:
            whole = node.slice_share + node.switching_share + node.idle_share + node.down_share
            assert whole == pytest.approx(1.0)
        slices = [*found.slices, *found.open_slices(now_ns)]
        for job in ("", *(job.name for job in report.jobs[:1])):
            page = as_page(report, slices, job)
            ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
        assert "bubbles" in as_text(report)
        for job in report.jobs:
            assert job.name in job_text(report, job)
        msgspec.json.encode(report)


def test_what_went_wrong_stands_where_it_did() -> None:
    def lived(seed: int) -> PoolWorld:
        world = PoolWorld(draw_pool(seed))
        world.run()
        return world

    def kills(world: PoolWorld) -> list[PoolMark]:
        return [mark for mark in history_of(world.journal, world.policies).marks if "killed" in mark.what]

    world = next(world for world in map(lived, range(20)) if kills(world))
    found = history_of(world.journal, world.policies)
    failed = [job for job, record in found.cluster.jobs.items() if record.state is JobState.FAILED]
    assert set(failed) <= {mark.job for mark in found.marks}


def test_a_pool_to_which_nobody_has_come(quiet: Quiet) -> None:
    found = history_of(quiet.world.journal[:1], quiet.world.cluster.policies)
    report = pool_report(found, "ours", now_ns=60 * S, name="lab")
    assert (report.usd, report.slo_met_share, report.jobs) == (0.0, 1.0, [])
    assert report.usd_paid > 0
    assert "0 jobs" in as_text(report)
    ElementTree.fromstring(as_page(report, found.slices).removeprefix("<!DOCTYPE html>\n"))
