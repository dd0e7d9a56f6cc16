"""A node is let go: its jobs go on elsewhere from their step's end, and nobody else gets it."""

from typing import Any

import pytest

from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobState, PhaseKind, Seat
from tests.cluster.conftest import Driver, S, timed_job

ROLLOUT = PhaseKind.ROLLOUT


def told(commands: list[c.ClusterCommand]) -> list[tuple[type, str]]:
    return [(type(one), getattr(one, "node", None) or getattr(one, "job", "")) for one in commands]


def places(pool: Driver, seat: Seat) -> tuple[str, ...]:
    return (*seat.rollout, *pool.cluster.groups[seat.group].train)


def begin(pool: Driver, commands: list[c.ClusterCommand], at_s: float) -> list[c.StartJob]:
    starts = [one for one in commands if isinstance(one, c.StartJob)]
    for start in starts:
        pool.tell(e.JobStarted(job=start.job, placement=start.placement), at_s)
    return starts


def test_a_free_node_goes_at_once_and_what_it_has_cost_stays_in_the_books() -> None:
    pool = Driver()
    assert told(pool.tell(e.NodeDrained(node="rollout-2"), 10)) == [(c.ReleaseNode, "rollout-2")]
    assert pool.cluster.free("rollout") == 2
    assert pool.cluster.books.paid(10 * S) == 10 * S * (3 * 2 * S + 3 * 5 * S)
    assert pool.tell(e.NodeDrained(node="rollout-2"), 20) == []
    assert told(pool.tell(e.NodeDrained(node="train-1"), 20)) == [(c.ReleaseNode, "train-1")]
    pool.tell(e.NodeJoined(node="rollout-2", kind=ROLLOUT), 30)
    assert pool.cluster.free("rollout") == 3


@pytest.mark.parametrize("trains", [False, True], ids=["rollout", "train"])
def test_jobs_on_a_node_stop_at_their_step_s_end_and_go_on_elsewhere_as_they_were_accepted(trains: bool) -> None:
    pool = Driver()
    a, b = (timed_job(name, slo=2.5, restart_ns=S) for name in ("a", "b"))
    pool.run(a, b)
    (group,) = pool.cluster.groups.values()
    (node,) = group.train if trains else group.rollout
    pool.ask("a", ROLLOUT, 0)
    assert told(pool.tell(e.NodeDrained(node=node), 50)) == [(c.StopJob, "a"), (c.StopJob, "b")]
    assert pool.cluster.jobs["a"].permit is not None, "what is under way goes on to the step's end"
    pool.run(timed_job("c", slo=2.5), at_s=51)
    seat = pool.cluster.jobs["c"].seat
    assert seat is None or node not in places(pool, seat), "nobody gets a place there any more"
    commands: list[Any] = []
    for name, steps in (("b", 0), ("a", 1)):
        commands += pool.tell(e.JobStopped(job=name, steps_done=steps), 100)
    assert (c.ReleaseNode, node) in told(commands)
    assert node not in pool.cluster.state.nodes
    assert {start.job for start in begin(pool, commands, 100)} >= {"a", "b"}
    for request in (a, b):
        record = pool.cluster.jobs[request.id]
        assert record.state is JobState.RUNNING
        assert record.request == request, "what was promised stays"
        assert record.seat is not None
        assert node not in places(pool, record.seat)
    assert pool.cluster.jobs["a"].steps_done == 1


def test_a_job_without_another_node_waits_in_the_queue_for_the_next_one() -> None:
    pool = Driver()
    pool.run(timed_job("a", rollout_nodes=3))
    pool.tell(e.NodeDrained(node="rollout-3"), 10)
    commands = pool.tell(e.JobStopped(job="a", steps_done=1), 20)
    assert told(commands) == [(c.ReleaseNode, "rollout-3")]
    assert pool.cluster.jobs["a"].state is JobState.QUEUED
    assert begin(pool, pool.tell(e.NodeJoined(node="rollout-4", kind=ROLLOUT), 30), 31)
    assert pool.cluster.jobs["a"].state is JobState.RUNNING


def test_a_job_that_does_not_stop_is_ended_and_a_node_that_is_lost_meanwhile_is_gone_once() -> None:
    pool = Driver()
    pool.run(timed_job("a"), timed_job("b"))
    (group,) = pool.cluster.groups.values()
    pool.tell(e.NodeDrained(node=group.rollout[0]), 10)
    late_s = 10 + pool.cluster.limits.stop_ns / S + 2 * 1.5 * 200 + 1
    commands = pool.tick(late_s)
    assert {(c.EndJob, "a"), (c.EndJob, "b"), (c.ReleaseNode, "rollout-1")} <= {*told(commands)}
    begin(pool, commands, late_s)
    for name in ("a", "b"):
        record = pool.cluster.jobs[name]
        assert record.seat is not None
        (node,) = record.seat.rollout
    pool.tell(e.NodeDrained(node=node), late_s + 1)
    lost = pool.tell(e.NodeLost(node=node), late_s + 2)
    assert told(lost).count((c.ReleaseNode, node)) <= 1
    assert node not in pool.cluster.state.nodes
