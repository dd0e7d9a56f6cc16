"""The pool's shell in worlds of faults on virtual time."""

from collections import Counter

import pytest

from elastic.core.cluster import events as e
from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.testing.faults.kinds import FaultKind
from elastic.testing.faults.pool.pool_worlds import STRIKES, PoolFaults, PoolWorld, draw_pool

CALM = PoolFaults(until_ns=0)


def lived(seeds: range, faults: PoolFaults | None = None) -> tuple[int, Counter[FaultKind]]:
    events, seen = 0, Counter[FaultKind]()
    for seed in seeds:
        world = PoolWorld(draw_pool(seed, faults))
        world.run()
        events += world.events
        seen += world.faults_seen
    return events, seen


def test_without_faults_all_jobs_finish():
    """Six worlds without faults: what ends there must not hang for another reason."""
    for seed in range(6):
        world = PoolWorld(draw_pool(seed, CALM))
        world.run()
        assert not world.faults_seen
        assert {record.state.value for record in world.records().values()} <= {"finished", "rejected"}


def test_the_invariants_hold_whoever_dies_falls_silent_or_repeats_itself():
    """Fifteen worlds, so that every kind of fault has struck."""
    events, seen = lived(range(15))
    assert events > 1000
    assert all(seen[kind] for kind in (*STRIKES, FaultKind.HANG))


def test_one_seed_gives_one_history():
    one, other = PoolWorld(draw_pool(4)), PoolWorld(draw_pool(4))
    one.run()
    other.run()
    assert one.journal == other.journal


def test_a_pool_s_process_that_dies_at_every_other_thing_it_does_gets_there_in_the_end():
    _, seen = lived(range(1000, 1004), PoolFaults(dies=0.1, until_ns=1200 * 10**9))
    assert seen[FaultKind.KILL_POOL] > 30


def test_jobs_finish_though_every_node_was_gone_at_once():
    world = PoolWorld(draw_pool(3, CALM))

    def kill_all() -> None:
        for node_agent in [*world.node_agents.values()]:
            world.kill_node_agent(node_agent)

    world.excused = 10**9
    world.loop.at(1500 * 10**9, kill_all)
    world.run()
    assert {record.state.value for record in world.records().values()} <= {"finished", "rejected"}
    assert world.loop.now_ns > 1500 * 10**9


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_worlds():
    lived(range(2000, 8000))


def test_a_job_whose_checkpoint_is_on_its_way_does_not_ask_to_train() -> None:
    asked: list[int] = []

    def watch(event: e.ClusterEvent) -> None:
        if isinstance(event, e.PhaseAsked) and event.phase is PhaseKind.TRAIN:
            asked.append(world.loop.now_ns)

    world = PoolWorld(draw_pool(3, CALM), watch)

    def returns(*, goes_on: bool) -> None:
        for job, record in world.records().items():
            assert record.request.limit_ns > until_ns - since_ns
            world.to_shell(lambda shell, job=job: shell.returns(job, goes_on=goes_on))

    since_ns, until_ns = 1650 * 10**9, 1900 * 10**9
    world.loop.at(since_ns, lambda: returns(goes_on=True))
    world.loop.at(until_ns, lambda: returns(goes_on=False))
    world.run()
    within = [at_ns for at_ns in asked if since_ns < at_ns < until_ns]
    assert (within, until_ns in asked) == ([], True)


def test_a_node_whose_machine_is_taken_back_is_drained() -> None:
    world = PoolWorld(draw_pool(6, CALM))
    drained: list[bool] = []

    def take() -> None:
        name = next(name for name, node in world.node_agents.items() if node.alive)
        for _ in range(2):
            world.to_shell(lambda shell: shell.node_agent_heard(name, w.NodeNotice(100.0, "it is taken back")))
        assert world.shell is not None
        node = world.shell.cluster.state.nodes.get(name)
        drained.append(node is None or node.draining)

    world.loop.at(1700 * 10**9, take)
    world.run()
    assert drained == [True]
