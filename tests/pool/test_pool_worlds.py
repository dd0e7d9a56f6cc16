"""The pool's shell in worlds of faults on virtual time."""

import pytest

from elastic.testing.faults.pool.pool_worlds import PoolFaults, PoolWorld
from policies.clusters import CLUSTER_POLICIES


def lived(seeds: range, faults: PoolFaults | None = None) -> tuple[int, dict[str, int]]:
    events, seen = 0, dict[str, int]()
    for seed in seeds:
        world = PoolWorld(CLUSTER_POLICIES, seed, faults)
        world.run()
        events += world.events
        for kind, count in world.faults_seen.items():
            seen[kind] = seen.get(kind, 0) + count
    return events, seen


def test_without_faults_all_jobs_finish():
    for seed in range(15):
        world = PoolWorld(CLUSTER_POLICIES, seed, PoolFaults(until_ns=0))
        world.run()
        assert not world.faults_seen
        assert world.shell is not None
        assert {record.state.value for record in world.shell.cluster.jobs.values()} <= {"finished", "rejected"}


def test_the_invariants_hold_whoever_dies_falls_silent_or_repeats_itself():
    events, seen = lived(range(25))
    assert events > 2000
    assert all(
        seen.get(kind, 0) > 1 for kind in ("resident", "keeper", "keeper link", "job", "job link", "pool", "hang")
    )


def test_a_pool_s_process_that_dies_at_every_other_thing_it_does_gets_there_in_the_end():
    _, seen = lived(range(1000, 1006), PoolFaults(dies=0.1, until_ns=1200 * 10**9))
    assert seen["pool"] > 30


def test_jobs_finish_though_every_node_was_gone_at_once():
    world = PoolWorld(CLUSTER_POLICIES, 3, PoolFaults(until_ns=0))

    def kill_all() -> None:
        for keeper in [*world.keepers.values()]:
            world._kill_keeper(keeper)

    world.excused = 10**9
    world.loop.at(1500 * 10**9, kill_all)
    world.run()
    assert world.shell is not None
    assert {record.state.value for record in world.shell.cluster.jobs.values()} <= {"finished", "rejected"}
    assert world.shell.cluster.now_ns > 1500 * 10**9


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_worlds():
    lived(range(2000, 8000))
