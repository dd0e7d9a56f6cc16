"""What the cluster is told late, twice, or about what it does not know; and that it waits no longer than it says."""

import msgspec
import pytest

from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.history import cluster_digest
from elastic.core.cluster.types import BeyondQuota, JobState, PhaseKind, PhasePlan, WaitLimits
from elastic.pool.status import queue_places
from tests.cluster.conftest import Driver, S, grants, timed_job

ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
H = 3600
NOT_NOW = (
    e.JobProfiled(job="a", plan=PhasePlan(rollout_ns=1, train_ns=1)),
    e.JobStarted(job="a", placement=1),
    e.JobFailed(job="a", cause="killed", placement=1),
    e.ResubmitRequested(job="a"),
    e.JobStopped(job="a", steps_done=3),
    e.PhaseAsked(job="a", phase=ROLLOUT, placement=1),
    e.PermitYielded(job="a", permit=9, finished=True),
    e.PermitYielded(job="b", permit=1, finished=True),
    e.RolloutProgressed(job="a", permit=9, done=9, of=10),
    e.RolloutProgressed(job="b", permit=1, done=9, of=10),
    e.TailMoved(job="a", permit=9),
    e.TailMoved(job="b", permit=1),
    e.TailMoved(job="a", permit=1),
    e.ResidentLost(job="a", node="rollout-3", cause="killed"),
    e.ResidentLost(job="a", node="nowhere", cause="killed"),
    e.ResidencyMeasured(job="a", node="rollout-3", host_bytes=99),
    e.ResidencyMeasured(job="a", node="rollout-1", host_bytes=1),
    e.NodeLost(node="nowhere"),
    e.NodeJoined(node="rollout-1", kind=ROLLOUT),
    e.JobSubmitted(request=timed_job("a", slo=3.0)),
    e.QuotaChanged(job="a", quota=BeyondQuota("agents", "it has enough")),
    e.QuotaChanged(job="a", quota=None),
)


OF_NO_JOB = (
    *(msgspec.structs.replace(event, job="x") for event in NOT_NOW if hasattr(event, "job")),
    e.JobProgressed(job="x", steps_done=1),
    e.JobFinished(job="x"),
    e.CancelRequested(job="x"),
    e.ResidentLost(job="x", node="rollout-1", cause="killed"),
)


@pytest.mark.parametrize("event", [*NOT_NOW, *OF_NO_JOB], ids=lambda event: type(event).__name__)
def test_what_is_not_so_changes_nothing(event: e.ClusterEvent) -> None:
    pool = Driver()
    pool.run(timed_job("a"), timed_job("b"))
    pool.ask("a", ROLLOUT, 0)
    pool.tick(1)
    before = cluster_digest(pool.cluster)
    assert pool.tell(event, 1) == []
    assert cluster_digest(pool.cluster) == before


def test_a_job_beyond_its_quota_is_considered_once_it_is_within_it() -> None:
    pool, quota = Driver(), BeyondQuota("agents", "it has 1 of 1")
    assert pool.tell(e.JobSubmitted(request=msgspec.structs.replace(timed_job("a"), plan=None), quota=quota)) == []
    assert pool.tell(e.JobSubmitted(request=timed_job("b"), quota=quota)) == []
    pool.run(timed_job("c"))
    waiting = pool.cluster.jobs["a"]
    assert (waiting.state, waiting.reason) == (JobState.QUEUED, quota.reason)
    pool.tell(e.QuotaChanged(job="a", quota=BeyondQuota("agents", "it has 2 of 2")), 1)
    pool.tell(e.NodeJoined(node="rollout-9", kind=ROLLOUT), 1)
    assert (waiting.state, waiting.reason) == (JobState.QUEUED, "it has 2 of 2")
    assert [type(command) for command in pool.tell(e.QuotaChanged(job="a", quota=None), 2)] == [c.ProfileJob]
    assert pool.tell(e.QuotaChanged(job="a", quota=quota), 2) == []
    assert [type(command) for command in pool.tell(e.QuotaChanged(job="b", quota=None), 3)] == [c.StartJob]
    pool.tell(e.JobFailed(job="b", cause="killed"), 4)
    assert pool.tell(e.ResubmitRequested(job="b", quota=quota), 5) == []
    assert pool.cluster.jobs["b"].state is JobState.QUEUED
    pool.tell(e.TimePassed(), WaitLimits().queue_ns / S + 5)
    assert pool.cluster.jobs["b"].state is JobState.FAILED


def test_a_flood_that_waits_for_its_quota_keeps_nobody_out_who_waits_for_room() -> None:
    pool, quota = Driver(), BeyondQuota("agents", "it has 1 of 1")
    first, *beyond, innocent = (
        timed_job(name, rollout_nodes=3, rollout_bytes=5) for name in ("a", "b", "c", "innocent")
    )
    pool.run(first)
    for request in beyond:
        pool.tell(e.JobSubmitted(request=request, quota=quota))
    pool.tell(e.JobSubmitted(request=innocent))
    pool.tell(e.QuotaChanged(job="b", quota=None))
    assert queue_places(pool.cluster) == {"innocent": 1, "b": 2, "c": 1}
    pool.tell(e.JobFinished(job="a"))
    assert pool.cluster.jobs["innocent"].state is JobState.PLACED
    assert pool.cluster.jobs["b"].state is JobState.QUEUED


def test_a_job_is_timed_first_and_then_placed_with_what_was_found() -> None:
    pool = Driver()
    request = msgspec.structs.replace(timed_job("a"), plan=None)
    assert [type(command) for command in pool.tell(e.JobSubmitted(request=request))] == [c.ProfileJob]
    plan = PhasePlan(rollout_ns=7 * S, train_ns=9 * S)
    told = pool.tell(e.JobProfiled(job="a", plan=plan), 100)
    assert [type(command) for command in told] == [c.StartJob]
    assert pool.cluster.request("a").plan == plan
    assert pool.cluster.groups["group-1"].cycle_ns == 16 * S


def test_a_step_that_is_not_timed_in_time_is_a_failure() -> None:
    pool = Driver()
    pool.tell(e.JobSubmitted(request=msgspec.structs.replace(timed_job("a", max_resubmissions=3), plan=None)))
    pool.tick(1799)
    assert pool.cluster.jobs["a"].state is JobState.PROFILING
    pool.tick(1800)
    # Without a plan it is not placed anew by itself.
    assert pool.cluster.jobs["a"].state is JobState.FAILED
    assert pool.cluster.jobs["a"].resubmissions == 0
    assert [type(command) for command in pool.tell(e.ResubmitRequested(job="a"), 1900)] == [c.ProfileJob]
    assert pool.cluster.jobs["a"].resubmissions == 1


def test_a_job_that_does_not_start_is_resubmitted_so_often_and_then_fails() -> None:
    pool = Driver()
    pool.tell(e.JobSubmitted(request=timed_job("a", max_resubmissions=1, restart_ns=100 * S)))
    first = pool.cluster.jobs["a"].placement
    assert pool.tick(1899) == []
    told = pool.tick(1900)
    assert [type(command) for command in told] == [c.EndJob, c.StartJob]
    assert pool.cluster.jobs["a"].placement > first
    assert pool.tell(e.JobStarted(job="a", placement=first), 1901) == []
    assert pool.cluster.jobs["a"].state is JobState.PLACED
    pool.tick(3 * H)
    assert pool.cluster.jobs["a"].state is JobState.FAILED
    assert pool.cluster.jobs["a"].reason == "it did not start in time"
    assert pool.cluster.free("train") == 3


def test_who_finds_no_room_for_a_week_is_rejected_with_the_reason() -> None:
    pool = Driver("solo")
    pool.run(*(timed_job(name) for name in "abcd"))
    assert pool.tick(7 * 24 * H - 1) == []
    told = pool.tick(7 * 24 * H)
    assert [(type(command), command.job) for command in told] == [(c.RejectJob, "d")]  # type: ignore[union-attr]
    assert told[0].reason == "no room for it in 168 h"  # type: ignore[union-attr]
    pool = Driver()
    pool.tell(e.JobSubmitted(request=timed_job("a"), quota=BeyondQuota("ours", "it has 2 of 2 jobs")))
    (rejected,) = pool.tick(7 * 24 * H)
    words = "no room for it in 168 h; its quota did not allow it: it has 2 of 2 jobs"
    assert rejected == c.RejectJob(job="a", reason=words)
    # It was placed meanwhile: nothing is left of the wait.
    pool = Driver("solo")
    pool.run(*(timed_job(name) for name in "abcd"))
    pool.tell(e.JobFinished(job="a"), 5)
    assert not any(wait.what == "queue" for wait in pool.cluster.waits)


def test_a_job_may_have_all_nodes_and_a_node_that_joins_is_for_who_waits() -> None:
    pool = Driver("solo")
    pool.run(timed_job("a", rollout_nodes=3, train_nodes=3), timed_job("b"))
    assert pool.cluster.jobs["a"].state is JobState.RUNNING
    pool.tell(e.NodeJoined(node="more-1", kind=ROLLOUT), 10)
    assert pool.cluster.jobs["b"].state is JobState.QUEUED
    told = pool.tell(e.NodeJoined(node="more-2", kind=TRAIN), 20)
    assert [(type(command), command.job) for command in told] == [(c.StartJob, "b")]  # type: ignore[union-attr]


def test_what_fits_exactly_is_accepted() -> None:
    pool = Driver()
    exact = PhasePlan(rollout_ns=100 * S, train_ns=100 * S, rollout_switch_ns=10 * S, train_switch_ns=10 * S)
    pool.run(timed_job("a", slo=1.1, plan=exact, rollout_bytes=5, train_bytes=5))
    assert pool.cluster.jobs["a"].state is JobState.RUNNING


def moving() -> Driver:
    """c is to move from group-2 into group-1, which b has left."""
    pool = Driver()
    pool.run(timed_job("a", slo=1.0), timed_job("b", slo=1.0), timed_job("c", slo=1.9, restart_ns=10 * S, steps=1000))
    pool.tell(e.JobFinished(job="b"), 100)
    told = pool.tick(100.000000001)
    assert [(type(command), command.job) for command in told] == [(c.StopJob, "c")]  # type: ignore[union-attr]
    return pool


def test_who_is_to_stop_ends_its_step_first() -> None:
    pool = Driver()
    pool.run(timed_job("a", slo=1.0), timed_job("b", slo=1.0), timed_job("c", slo=1.9, restart_ns=10 * S, steps=1000))
    pool.ask("c", ROLLOUT, 50)
    pool.tell(e.JobFinished(job="b"), 100)
    assert [type(command) for command in pool.tick(100.000000001)] == [c.StopJob]
    pool.end("c", 150)
    assert [grant.job for grant in pool.ask("c", TRAIN, 150)] == ["c"]
    pool.end("c", 250)
    pool.tell(e.JobStopped(job="c", steps_done=1), 251)
    assert pool.cluster.jobs["c"].moves == 1
    assert pool.cluster.jobs["c"].steps_done == 1


def test_who_does_not_stop_in_time_is_ended_and_goes_on_elsewhere() -> None:
    pool = moving()
    # It may take two of the longest steps that it bears, and the limit of a stop: 380 s twice and 300 s.
    assert pool.tick(1160) == []
    told = pool.tick(1160.000000001)
    assert [type(command) for command in told] == [c.EndJob, c.StartJob]
    assert pool.cluster.jobs["c"].seat == pool.cluster.jobs["a"].seat
    assert len(pool.cluster.groups) == 1
    assert pool.tell(e.JobStopped(job="c", steps_done=7), 1161) == []
    assert pool.cluster.jobs["c"].steps_done == 0


def test_a_place_that_was_kept_is_given_back_if_its_job_ends() -> None:
    pool = moving()
    assert list(pool.cluster.groups["group-1"].members) == ["a", "c"]
    pool.tell(e.CancelRequested(job="c"), 101)
    assert list(pool.cluster.groups) == ["group-1"]
    assert list(pool.cluster.groups["group-1"].members) == ["a"]
    assert not any(wait.key == "c" for wait in pool.cluster.waits)


def test_an_arrival_is_a_reason_to_look_for_moves_too() -> None:
    pool = Driver()
    pool.run(timed_job("a"))
    assert [wait.what for wait in pool.cluster.waits] == ["regroup"]
    pool.tick(1)
    assert pool.cluster.waits == []


def test_progress_never_goes_back_nor_beyond_the_end() -> None:
    pool = Driver()
    pool.run(timed_job("a"))
    for said, counts in ((4, 4), (2, 4), (99, 10)):
        pool.tell(e.JobProgressed(job="a", steps_done=said), 1)
        assert pool.cluster.jobs["a"].steps_done == counts
    assert pool.cluster.remaining_ns("a") == 200 * S  # A job that goes on has a step to do.
    pool.tell(e.JobFinished(job="a"), 2)
    assert pool.cluster.jobs["a"].ended


def test_what_a_restart_takes_is_spread_over_the_steps_that_are_left() -> None:
    pool = Driver()
    pool.run(timed_job("a", slo=1.5, steps=10, restart_ns=100 * S))
    # 10 steps of 300 s at most; 4 are done after 800 s, and 100 s are for the restart.
    pool.tell(e.JobProgressed(job="a", steps_done=4), 800)
    assert pool.cluster.limit_after_restart_ns("a") == 300 * S
    pool.tell(e.JobProgressed(job="a", steps_done=4), 2300)
    assert pool.cluster.limit_after_restart_ns("a") == 100 * S
    pool.tell(e.JobProgressed(job="a", steps_done=4), 9000)
    assert pool.cluster.limit_after_restart_ns("a") == 0


def test_an_older_start_may_not_ask() -> None:
    pool = Driver()
    pool.run(timed_job("a", max_resubmissions=1))
    told = pool.tell(e.JobFailed(job="a", cause="killed"), 10)
    number = next(command.placement for command in told if isinstance(command, c.StartJob))
    pool.tell(e.JobStarted(job="a", placement=number), 11)
    assert pool.tell(e.PhaseAsked(job="a", phase=ROLLOUT, placement=number - 1), 12) == []
    assert len(grants(pool.tell(e.PhaseAsked(job="a", phase=ROLLOUT, placement=number), 13))) == 1
    # Asked again while it has its time slice: no second permit.
    assert pool.tell(e.PhaseAsked(job="a", phase=ROLLOUT, placement=number), 14) == []


def test_a_failed_job_can_be_told_off_only_by_submitting_it_again() -> None:
    pool = Driver()
    pool.run(timed_job("a"))
    pool.tell(e.JobFailed(job="a", cause="killed"), 10)
    for event in (e.CancelRequested(job="a"), e.JobFinished(job="a"), e.JobFailed(job="a", cause="again")):
        assert pool.tell(event, 11) == []
        assert pool.cluster.jobs["a"].reason == "killed"
    pool.tell(e.ResubmitRequested(job="a"), 12)
    assert pool.cluster.jobs["a"].state is JobState.PLACED


def test_who_is_only_queued_cannot_fail_or_finish_but_can_be_cancelled() -> None:
    pool = Driver("solo")
    pool.run(*(timed_job(name) for name in "abcd"))
    for event in (e.JobFailed(job="d", cause="killed"), e.JobFinished(job="d")):
        assert pool.tell(event, 1) == []
        assert pool.cluster.jobs["d"].state is JobState.QUEUED
    pool.tell(e.CancelRequested(job="d"), 2)
    assert pool.cluster.jobs["d"].state is JobState.CANCELLED


def test_measured_phases_are_a_running_mean_without_switching() -> None:
    pool = Driver()
    pool.run(timed_job("a"))
    at = 0
    for took, mean in ((100, 96), (60, 86)):
        pool.ask("a", ROLLOUT, at)
        number = pool.cluster.jobs["a"].permit or 0
        pool.tell(e.PermitYielded(job="a", permit=number, finished=True, switch_ns=4 * S), at + took)
        assert pool.cluster.jobs["a"].measured_ns[ROLLOUT] == mean * S
        at += took
    node = pool.cluster.state.nodes["rollout-1"].accounts_ns
    assert {account.value: ns // S for account, ns in node.items()} == {"slice": 152, "switching": 8}


def test_a_phase_in_two_slices_is_measured_as_one() -> None:
    pool = Driver()
    pool.run(timed_job("a"))
    pool.ask("a", ROLLOUT, 0)
    pool.end("a", 50, finished=False)
    assert pool.cluster.jobs["a"].measured_ns == {}
    pool.ask("a", ROLLOUT, 60)
    pool.end("a", 90)
    assert pool.cluster.jobs["a"].measured_ns == {ROLLOUT: 80 * S}
