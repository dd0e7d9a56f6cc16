"""The cluster as a state machine: whose time slice it is, who is refused and why, what is given back, what it costs."""

import msgspec
import pytest

from elastic.core.cluster import ClusterError, NodeKind, PhasePlan
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.cluster import STARTS_IN_VAIN
from elastic.core.cluster.types import DeviceAccount, JobState, Permit, PhaseKind
from tests.cluster.conftest import THREE_OF_EACH, Driver, S, grants
from tests.cluster.conftest import timed_job as job


def who(given: list[Permit]) -> list[tuple[str, str]]:
    return [(grant.job, grant.phase.value) for grant in given]


ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


def test_two_balanced_jobs_take_turns_on_one_set_of_nodes() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    assert [record.how for record in pool.cluster.jobs.values()] == ["new", "packed"]
    assert who(pool.ask("a", ROLLOUT, 0)) == [("a", "rollout")]
    assert pool.ask("b", ROLLOUT, 1) == []
    assert who(pool.end("a", 100)) == [("b", "rollout")]
    assert who(pool.ask("a", TRAIN, 100)) == [("a", "train")]
    pool.end("a", 200)
    assert pool.ask("a", ROLLOUT, 200) == []
    assert who(pool.end("b", 200)) == [("a", "rollout")]
    assert who(pool.ask("b", TRAIN, 200)) == [("b", "train")]
    assert pool.cluster.groups["group-1"].cycle_ns == 200 * S


def test_the_order_is_fixed_though_the_second_asks_first() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    assert pool.ask("b", ROLLOUT, 0) == []
    assert who(pool.ask("a", ROLLOUT, 5)) == [("a", "rollout")]


def test_who_is_late_is_passed_over_once_after_a_named_wait() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    assert pool.ask("b", ROLLOUT, 0) == []
    wait = next(wait for wait in pool.cluster.waits if wait.what == "time slice")
    assert (wait.key, wait.until_ns) == ("a", 20 * S)
    assert who(grants(pool.tick(20))) == [("b", "rollout")]
    # It lost one time slice and no more: as b is done, a comes before b's next.
    pool.ask("a", ROLLOUT, 30)
    assert who(pool.end("b", 120)) == [("a", "rollout")]


def test_who_overruns_gives_way_and_goes_on_in_the_next_turn() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    pool.ask("a", ROLLOUT, 0)
    pool.ask("b", ROLLOUT, 0)
    recalls = pool.tick(110)
    assert [type(command) for command in recalls] == [c.RecallPermit]
    assert who(pool.end("a", 112, finished=False)) == [("b", "rollout")]
    assert pool.ask("a", ROLLOUT, 112) == []
    # a has nothing to train on yet: it lets its time slice there pass, and b does not wait for it.
    assert who(pool.end("b", 200)) == [("a", "rollout")]
    assert who(pool.ask("b", TRAIN, 200)) == [("b", "train")]


def test_while_the_machine_was_suspended_nobody_was_late() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    (granted,) = pool.ask("a", ROLLOUT, 0)
    pool.ask("b", ROLLOUT, 0)
    assert pool.tick(109) == []
    assert pool.tell(e.PoolSuspended(for_ns=3600 * S), 109 + 3600) == []
    assert pool.tick(109 + 3600) == []
    assert [type(command) for command in pool.tick(110 + 3600)] == [c.RecallPermit]
    assert pool.cluster.state.permits[granted.number].deadline_ns == granted.deadline_ns + 3600 * S


def test_who_does_not_give_way_is_killed_at_the_deadline() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    pool.ask("a", ROLLOUT, 0)
    pool.ask("b", ROLLOUT, 0)
    pool.tick(110)
    killed = pool.tick(120)
    assert [command.job for command in killed if isinstance(command, c.KillResident)] == ["a"]
    assert who(grants(killed)) == [("b", "rollout")]
    node = pool.cluster.state.nodes["rollout-1"]
    assert node.accounts_ns == {DeviceAccount.SLICE: 110 * S, DeviceAccount.DOWN: 10 * S}


def test_a_turn_in_which_residents_start_may_take_a_restart_longer() -> None:
    pool = Driver()
    pool.run(job("a", restart_ns=40 * S), job("b"))
    first = pool.ask("a", ROLLOUT, 0)[0]
    assert first.deadline_ns == 150 * S
    pool.ask("b", ROLLOUT, 1)
    pool.end("a", 100)
    pool.ask("a", ROLLOUT, 101)
    warm = pool.end("b", 200)[0]
    assert (warm.job, warm.deadline_ns) == ("a", 310 * S)
    pool.tell(e.ResidentLost(job="a", node="rollout-1", cause="killed"), 210)
    pool.ask("b", ROLLOUT, 211)
    pool.end("a", 300)
    pool.ask("a", ROLLOUT, 301)
    again = pool.end("b", 400)[0]
    assert (again.job, again.deadline_ns) == ("a", 550 * S)


def test_nothing_counts_under_an_older_permit() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    old = pool.ask("a", ROLLOUT, 0)[0].number
    pool.ask("b", ROLLOUT, 0)
    pool.end("a", 100)
    slices = dict(pool.cluster.jobs["a"].slices)
    assert pool.tell(e.PermitYielded(job="a", permit=old, finished=True), 101) == []
    assert pool.tell(e.PermitYielded(job="a", permit=old + 1, finished=True), 101) == []
    assert pool.cluster.jobs["a"].slices == slices
    assert list(pool.cluster.permits) == [old + 1]


def test_a_tail_moves_and_the_next_begins_on_the_rest() -> None:
    pool = Driver()
    rollout_heavy = PhasePlan(rollout_ns=100 * S, train_ns=10 * S)
    pool.run(*(job(name, rollout_nodes=2, slo=2.0, plan=rollout_heavy) for name in ("a", "b")))
    assert pool.ask("a", ROLLOUT, 0)[0].nodes == ("rollout-1", "rollout-2")
    pool.ask("b", ROLLOUT, 0)
    permit = pool.cluster.jobs["a"].permit
    assert permit is not None
    assert pool.tell(e.RolloutProgressed(job="a", permit=permit, done=8, of=10), 50) == []
    moved = pool.tell(e.RolloutProgressed(job="a", permit=permit, done=9, of=10), 60)
    assert [command.permit.tail_nodes for command in moved if isinstance(command, c.MoveTail)] == [("rollout-1",)]
    begun = grants(pool.tell(e.TailMoved(job="a", permit=permit), 61))
    assert [(grant.job, grant.nodes) for grant in begun] == [("b", ("rollout-2",))]
    wider = pool.end("a", 90)
    assert [(grant.job, grant.number, grant.nodes) for grant in wider] == [
        ("b", begun[0].number, ("rollout-1", "rollout-2"))
    ]


def test_rejected_with_numbers() -> None:
    pool = Driver()
    slow_switch = PhasePlan(rollout_ns=100 * S, train_ns=100 * S, rollout_switch_ns=10 * S, train_switch_ns=20 * S)
    for request, words in (
        (job("slo", slo=1.1, plan=slow_switch), "it could keep 1.15"),
        (job("memory", rollout_bytes=9), "needed 9 bytes of host memory; largest: 5"),
        (job("nodes", train_nodes=4), "needed 4 train nodes; largest: 3"),
    ):
        told = pool.tell(e.JobSubmitted(request=request))
        assert [type(command) for command in told] == [c.RejectJob]
        assert words in told[0].reason  # type: ignore[union-attr]
        with pytest.raises(ClusterError, match=words):
            pool.cluster.dry_run(request)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: job("a", slo=0.9), "slo: found 0.9; allowed: at least 1"),
        (lambda: job("a", slo=float("nan")), "slo: found nan"),
        (lambda: PhasePlan(rollout_ns=0, train_ns=1), "rollout_ns: found 0"),
        (lambda: NodeKind(gpus=1, memory_bytes=-1, nano_usd_per_hour=1), "memory_bytes: found -1"),
        (lambda: NodeKind(gpus=1, memory_bytes=1, nano_usd_per_hour=-1), "nano_usd_per_hour: found -1"),
        (
            lambda: msgspec.structs.replace(THREE_OF_EACH, train=()),
            "train nodes: found none; allowed: at least one",
        ),
        (lambda: msgspec.structs.replace(THREE_OF_EACH.rollout[0], nodes=0), "nodes: found 0; allowed: at least 1"),
        (
            lambda: msgspec.structs.replace(THREE_OF_EACH, train=THREE_OF_EACH.rollout),
            "2 kinds of nodes are called 'rollout'; allowed: a name for each",
        ),
    ],
)
def test_bad_input_says_what_was_found_and_what_is_allowed(what: object, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        what()  # type: ignore[operator]


def test_a_dry_run_says_for_each_group_why_not() -> None:
    pool = Driver("weave")
    pool.run(job("a"), job("b"))
    choice, refusals = pool.cluster.dry_run(job("c", slo=1.5))
    assert choice is not None
    assert choice.how == "new"
    assert choice.marginal_nano_usd_per_hour == 7 * S
    assert [str(refusal) for refusal in refusals] == ["group-1: it is saturated: load, s: 200; allowed: 200"]
    _, refusals = Driver("ours").cluster.dry_run(job("c"))
    assert list(refusals) == []


def test_a_third_equal_job_joins_where_only_slos_bind_and_not_as_printed() -> None:
    for policy, groups in (("weave", 2), ("ours", 1)):
        pool = Driver(policy)
        pool.run(job("a"), job("b"), job("c", slo=1.5))
        assert len(pool.cluster.groups) == groups


def test_a_full_pool_queues_with_a_reason_and_places_in_order() -> None:
    pool = Driver("solo")
    pool.run(job("a"), job("b"), job("c"), job("d"), job("e"))
    queued = [record for record in pool.cluster.jobs.values() if record.state is JobState.QUEUED]
    assert [record.request.id for record in queued] == ["d", "e"]
    assert "0 and 0 are free" in queued[0].reason
    pool.tell(e.JobFinished(job="b"), 10)
    assert pool.cluster.jobs["d"].state is JobState.PLACED
    assert pool.cluster.jobs["e"].state is JobState.QUEUED


def test_what_a_job_held_is_given_back_and_bills_add_up_to_the_nano_dollar() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    pool.ask("a", ROLLOUT, 0)
    pool.end("a", 100)
    pool.tell(e.JobFailed(job="b", cause="killed"), 150)
    pool.tell(e.JobFinished(job="a"), 200)
    assert pool.cluster.groups == {}
    assert (pool.cluster.free("rollout"), pool.cluster.free("train")) == (3, 3)
    state = pool.cluster.state
    # Two for 150 s, then one for 50 s: each pays 3.5 $/h while there are two.
    billed = {name: record.billed for name, record in state.jobs.items()}
    assert sum(billed.values()) == 7 * S * 200 * S
    assert all(owed <= 7 * S * 200 * S for owed in billed.values())
    # a used its slice of 2 $/h for 100 s and all of the last 50 s.
    assert billed["a"] > billed["b"]
    assert pool.cluster.books.paid(200 * S) == 3 * 7 * S * 200 * S


def test_a_bill_is_slices_and_a_part_of_the_idle_time_exactly() -> None:
    pool = Driver()
    pool.run(job("a", rollout_nodes=2), job("b"))
    pool.ask("a", ROLLOUT, 0)
    pool.end("a", 100)
    pool.ask("a", TRAIN, 100)
    pool.end("a", 160)
    pool.tell(e.JobFinished(job="a"), 200)
    billed = {name: record.billed // (S * S) for name, record in pool.cluster.jobs.items()}
    # The group has two rollout nodes and one to train on: 9 $/h for 200 s. a used 4 × 100 + 5 × 60 = 700 and would have
    # paid 9 × 200 = 1800 alone, 1100 of it for idle time; b used nothing and would have paid 7 × 200 = 1400.
    assert billed == {"a": 700 + 1100 * 1100 // 2500, "b": 1100 * 1400 // 2500}
    assert pool.cluster.jobs["a"].billed + pool.cluster.jobs["b"].billed == 9 * S * 200 * S
    assert pool.cluster.state.nodes["rollout-3"].own_ns == 0
    assert pool.cluster.state.nodes["rollout-1"].accounts_ns == {
        DeviceAccount.SLICE: 100 * S,
        DeviceAccount.IDLE: 100 * S,
    }


def test_who_is_late_to_train_is_passed_over_there_too() -> None:
    pool = Driver()
    pool.run(job("a"), job("b", 20, 100, slo=3.0))
    pool.ask("a", ROLLOUT, 0)
    pool.end("a", 100)
    pool.ask("b", ROLLOUT, 100)
    pool.end("b", 120)
    # a has rolled out and does not come to train.
    assert pool.ask("b", TRAIN, 120) == []
    assert who(grants(pool.tick(140))) == [("b", "train")]
    assert pool.cluster.jobs["a"].slices == {ROLLOUT: 1, TRAIN: 1}
    # It trains in the next cycle, and lets its rollout there pass.
    assert pool.ask("a", TRAIN, 150) == []
    assert pool.cluster.jobs["a"].slices == {ROLLOUT: 2, TRAIN: 1}
    assert who(pool.end("b", 240)) == [("a", "train")]


def test_a_failed_job_is_resubmitted_as_a_new_arrival_and_goes_on_from_its_checkpoint() -> None:
    pool = Driver()
    pool.run(job("a", max_resubmissions=1))
    pool.tell(e.JobProgressed(job="a", steps_done=4), 50)
    told = pool.tell(e.JobFailed(job="a", cause="killed"), 60)
    assert [type(command) for command in told] == [c.EndJob, c.StartJob]
    assert told[1].restart  # type: ignore[union-attr]
    assert pool.cluster.jobs["a"].steps_done == 4
    # The same failure, told once more: it is not the second start's.
    assert pool.tell(e.JobFailed(job="a", cause="killed", placement=told[1].placement - 1), 65) == []  # type: ignore[union-attr]
    assert pool.cluster.jobs["a"].state is JobState.PLACED
    pool.tell(e.JobFailed(job="a", cause="killed", placement=told[1].placement), 70)  # type: ignore[union-attr]
    assert pool.cluster.jobs["a"].state is JobState.FAILED
    told = pool.tell(e.ResubmitRequested(job="a"), 80)
    assert [type(command) for command in told] == [c.StartJob]


def test_a_lost_node_ends_its_residents_and_their_jobs_are_placed_anew() -> None:
    pool = Driver()
    pool.run(job("a"))
    pool.ask("a", ROLLOUT, 0)
    told = pool.tell(e.NodeLost(node="train-1"), 50)
    assert [type(command) for command in told] == [c.EndJob, c.StartJob]
    assert pool.cluster.groups["group-2"].train == ("train-2",)
    assert pool.cluster.free("train") == 1


def test_residency_beyond_what_was_declared_ends_that_resident_with_the_figures() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    told = pool.tell(e.ResidencyMeasured(job="b", node="rollout-1", host_bytes=7), 10)
    assert [(type(command), command.job) for command in told] == [(c.KillResident, "b"), (c.StartResident, "b")]  # type: ignore[union-attr]
    assert told[0].reason == "it holds 7 bytes of host memory on rollout-1; declared: 1"  # type: ignore[union-attr]


def test_a_job_whose_residents_hold_more_than_declared_again_and_again_without_a_step_fails_with_the_figures() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    more = e.ResidencyMeasured(job="b", node="rollout-1", host_bytes=7)
    beyond = [pool.tell(more, at_s) for at_s in range(STARTS_IN_VAIN - 1)]
    pool.tell(e.JobProgressed(job="b", steps_done=1), 10)
    beyond += [pool.tell(more, at_s) for at_s in range(20, 19 + STARTS_IN_VAIN)]
    assert all(isinstance(told[-1], c.StartResident) for told in beyond), "a step lies between"
    told = pool.tell(more, 30)
    b = pool.cluster.jobs["b"]
    assert ([type(command) for command in told], b.state) == ([c.EndJob], JobState.FAILED)
    assert b.reason == (
        "5 residents in a row were ended, the last because it holds 7 bytes of host memory on rollout-1; declared: 1"
    )
    assert pool.cluster.jobs["a"].state is JobState.RUNNING
    pool.tell(e.ResubmitRequested(job="b"), 40)
    assert b.state is JobState.PLACED
    assert isinstance(pool.tell(more, 50)[-1], c.StartResident), "it begins anew"


def test_a_job_on_many_nodes_has_as_many_starts_on_each_where_all_hold_more_than_declared_at_once() -> None:
    pool = Driver()
    pool.run(job("wide", rollout_nodes=3))
    nodes = pool.cluster.jobs["wide"].seat.rollout  # type: ignore[union-attr]
    more = [e.ResidencyMeasured(job="wide", node=node, host_bytes=7) for node in nodes]
    for at_s in range(STARTS_IN_VAIN - 1):
        for event in more:
            assert isinstance(pool.tell(event, at_s)[-1], c.StartResident)
    pool.tell(more[0], 10)
    assert pool.cluster.jobs["wide"].state is JobState.FAILED


def test_jobs_come_together_when_others_leave_where_that_pays() -> None:
    pool = Driver()
    # a and b fill one group; c finds no room there.
    pool.run(job("a", slo=1.0), job("b", slo=1.0), job("c", slo=1.9, restart_ns=10 * S, steps=1000))
    assert len(pool.cluster.groups) == 2
    for name, phase in (("c", ROLLOUT),):
        pool.ask(name, phase, 0)
    pool.end("c", 100)
    pool.tell(e.JobFinished(job="b"), 100)
    told = pool.tick(100.000000001)
    for command in told:
        assert isinstance(command, c.StopJob)
        started = pool.tell(e.JobStopped(job=command.job, steps_done=1), 101)
        assert [(type(start), start.job) for start in started] == [(c.StartJob, command.job)]  # type: ignore[union-attr]
        assert started[0].restart  # type: ignore[union-attr]
        assert len(pool.cluster.groups) == 1
        assert pool.cluster.jobs[command.job].moves == 1
    assert [command.job for command in told] == ["c"]  # type: ignore[union-attr]


def test_a_job_that_drifts_so_far_that_an_slo_is_at_stake_is_placed_anew_with_what_was_measured() -> None:
    pool = Driver("weave")
    pool.run(job("a", 100, 50, slo=1.0), job("b", 20, 45, slo=3.0))
    assert len(pool.cluster.groups) == 1
    pool.ask("a", ROLLOUT, 0)
    pool.ask("b", ROLLOUT, 0)
    pool.end("a", 100)
    pool.ask("a", TRAIN, 100)
    pool.end("b", 121)
    pool.ask("b", TRAIN, 121)
    pool.end("a", 150)
    pool.ask("a", ROLLOUT, 150)
    pool.tick(199.5)
    pool.end("b", 205, finished=False)
    pool.end("a", 255)
    pool.ask("a", TRAIN, 255)
    pool.ask("b", TRAIN, 255)
    pool.end("a", 300)
    told = pool.tell(e.PermitYielded(job="b", permit=pool.cluster.jobs["b"].permit or 0, finished=True), 349)
    assert [command.job for command in told if isinstance(command, c.StopJob)] == ["b"]
    pool.tell(e.JobStopped(job="b", steps_done=1), 400)
    plan = pool.cluster.request("b").plan
    assert plan is not None
    assert plan.train_ns > 100 * S
    assert len(pool.cluster.groups) == 2


@pytest.mark.parametrize("asked", [False, True])
def test_who_lost_a_resident_is_passed_over_at_once_and_comes_first_when_it_asks_again(asked: bool) -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    pool.ask("a", ROLLOUT, 0)
    if asked:
        pool.ask("b", ROLLOUT, 1)
    pool.tell(e.ResidentLost(job="b", node="rollout-1", cause="killed"), 50)
    assert pool.cluster.jobs["b"].asked is None
    assert who(pool.end("a", 100)) == []
    assert who(pool.ask("a", TRAIN, 100)) == [("a", "train")]
    pool.end("a", 200)
    begun = [*pool.ask("a", ROLLOUT, 200), *grants(pool.tick(200))]
    assert who(begun) == [("a", "rollout")]
    assert pool.ask("b", ROLLOUT, 210) == []
    assert who(pool.end("a", 300)) == [("b", "rollout")]


def test_who_lost_a_resident_of_one_phase_keeps_the_turn_of_the_other_that_it_asked_for() -> None:
    pool = Driver()
    pool.run(job("a"), job("b"))
    pool.ask("a", ROLLOUT, 0)
    pool.ask("b", ROLLOUT, 1)
    pool.tell(e.ResidentLost(job="b", node="train-1", cause="killed"), 50)
    assert who(pool.end("a", 100)) == [("b", "rollout")]
