"""Phases that need both pools: both at once or none, in turn with everybody else, and never a circle of waits."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.history import ClusterEntry, ClusterOpening, cluster_digest, decoded, encode, replay
from elastic.core.cluster.types import JobState, PhaseKind
from policies.clusters import CLUSTER_POLICIES
from tests.cluster.conftest import THREE_OF_EACH, Driver, S, grants, timed_job
from tests.seeds import examples

ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
PHASES = ("rollout", "train", "both")


def asked(name: str, phase: str) -> e.PhaseAsked:
    return e.PhaseAsked(job=name, phase=ROLLOUT if phase == "rollout" else TRAIN, both=phase == "both")


def two_in_a_group() -> Driver:
    pool = Driver()
    pool.run(timed_job("script", slo=3.0), timed_job("run", slo=3.0))
    assert len(pool.cluster.groups) == 1
    return pool


def test_it_gets_every_node_of_its_job_at_once_and_others_begin_once_it_is_over():
    pool = two_in_a_group()
    (grant,) = grants(pool.tell(asked("script", "rollout"), 0))
    assert (grant.phase, grant.both) == (ROLLOUT, False)
    assert pool.ask("run", ROLLOUT, 1) == []
    assert [given.job for given in pool.end("script", 100)] == ["run"]
    assert grants(pool.tell(asked("script", "both"), 101)) == [], "the rollout node is the other's"
    assert pool.cluster.jobs["script"].permit is None
    assert all(node.user != "script" for node in pool.cluster.state.nodes.values()), "it holds neither meanwhile"
    (grant,) = pool.end("run", 200)
    seat = pool.cluster.jobs["script"].seat
    assert seat is not None
    assert grant.both
    assert set(grant.nodes) == {*seat.rollout, *pool.cluster.groups[seat.group].train}
    assert pool.ask("run", TRAIN, 201) == []
    assert [given.job for given in pool.end("script", 250)] == ["run"]


def test_a_rollout_of_the_next_cycle_does_not_come_before_it():
    """Otherwise two neighbours could have the node in turn for ever."""
    pool = Driver()
    pool.run(*(timed_job(name, slo=4.0) for name in ("first", "second", "script")))
    assert len(pool.cluster.groups) == 1
    pool.ask("first", ROLLOUT, 0)
    pool.ask("second", ROLLOUT, 1)
    assert [given.job for given in pool.end("first", 10)] == ["second"]
    assert [given.job for given in pool.ask("first", TRAIN, 11)] == ["first"]
    assert grants(pool.tell(asked("script", "both"), 12)) == []
    pool.end("first", 20)
    assert pool.ask("first", ROLLOUT, 21) == [], "the script's time slice closes the cycle's rollouts"
    pool.end("second", 30)
    (grant,) = pool.ask("second", TRAIN, 31)
    assert grant.job == "second"
    given = pool.end("second", 40)
    assert [(one.job, one.both) for one in given] == [("script", True)]
    assert [one.job for one in pool.end("script", 50)] == ["first"]


def test_it_may_take_as_long_as_a_step_alone_and_then_gives_way_or_dies():
    pool = two_in_a_group()
    assert grants(pool.tell(asked("script", "both"), 0)) == [], "the other may still roll out in this cycle"
    pool.tick(30)
    (permit,) = pool.cluster.permits.values()
    assert permit.both
    assert permit.deadline_ns - permit.since_ns == 220 * S
    ends_s = permit.deadline_ns / S
    assert any(isinstance(command, c.RecallPermit) for command in pool.tick(ends_s))
    out = pool.tick(ends_s + 10)
    killed = {command.node for command in out if isinstance(command, c.KillResident)}
    assert killed == set(permit.nodes)
    assert set(pool.cluster.jobs["script"].cold) == {ROLLOUT, TRAIN}
    assert not pool.cluster.permits


def test_another_wish_takes_its_place_and_it_leaves_no_trace_in_what_is_measured():
    pool = two_in_a_group()
    pool.ask("run", ROLLOUT, 0)
    pool.tell(asked("script", "both"), 1)
    assert pool.cluster.jobs["script"].asked_both
    pool.tell(asked("script", "rollout"), 2)
    assert not pool.cluster.jobs["script"].asked_both
    given = pool.end("run", 50)
    assert [(one.job, one.phase, one.both) for one in given] == [("script", ROLLOUT, False)]
    pool.end("script", 100)
    pool.tell(asked("script", "both"), 101)
    for at_s in (130, 160, 200):
        pool.tick(at_s)  # Who is late lets a time slice pass each time.
    pool.end("script", 201)
    assert set(pool.cluster.jobs["script"].measured_ns) == {ROLLOUT}


def test_a_journal_from_before_there_were_such_phases_is_read():
    """What `PhaseAsked` did not say then, it does not mean."""
    opening = encode(ClusterOpening(0, THREE_OF_EACH, Driver().cluster.limits))
    new = encode(ClusterEntry(1, e.PhaseAsked(job="a", phase=TRAIN)))
    assert b"both" in new
    old = new.replace(b"\xa4both\xc2", b"")
    old = old.replace(bytes([0x85]), bytes([0x84]), 1)
    (entry,) = list(decoded([opening, old])[1])
    assert entry.event == e.PhaseAsked(job="a", phase=TRAIN)


@settings(max_examples=examples(24, 60), deadline=None)
@given(seed=st.integers(0, 10**9), moves=st.booleans())
def test_nobody_waits_in_a_circle_and_nobody_is_overtaken_for_ever(seed: int, moves: bool):
    """Jobs of any scripts, on any nodes, asking and ending in any order; `moves`: time passes meanwhile."""
    rng = Random(seed)
    pool = Driver(spec=THREE_OF_EACH)
    records = [encode(ClusterOpening(0, THREE_OF_EACH, pool.cluster.limits))]
    now_s = 0.0

    def tell(event: e.ClusterEvent) -> list[c.ClusterCommand]:
        records.append(encode(ClusterEntry(int(now_s * S), event)))
        return pool.tell(event, now_s)

    scripts: dict[str, list[str]] = {}
    for number in range(rng.randrange(2, 6)):
        name = f"job-{number}"
        request = timed_job(name, slo=12.0, rollout_nodes=rng.randrange(1, 4))
        for command in tell(e.JobSubmitted(request=request)):
            if isinstance(command, c.StartJob):
                tell(e.JobStarted(job=name, placement=command.placement))
                scripts[name] = [rng.choice(PHASES) for _ in range(rng.randrange(1, 8))]
    since: dict[str, dict[str, int]] = {}
    for _ in range(400):
        jobs = pool.cluster.jobs
        left = [name for name in scripts if jobs[name].state is JobState.RUNNING]
        if not left:
            break
        ready = [name for name in left if jobs[name].permit is not None or jobs[name].asked is None]
        assert ready, "everybody waits, and nobody is waited for"
        name, out = rng.choice(ready), list[c.ClusterCommand]()
        if moves:
            now_s += rng.choice((0, 1, 30))
        if jobs[name].permit is not None:
            permit = pool.cluster.permits[jobs[name].permit or 0]
            finished = not permit.recalled and rng.random() < 0.8
            if finished:
                scripts[name].pop(0)
            out = tell(e.PermitYielded(job=name, permit=permit.number, finished=finished))
        elif scripts[name]:
            since.setdefault(name, {})
            out = tell(asked(name, scripts[name][0]))
        else:
            out = tell(e.JobFinished(job=name))
        for grant in grants(out):
            wish = scripts[grant.job][0]
            assert grant.both == (wish == "both")
            if grant.both:
                seat = jobs[grant.job].seat
                assert seat is not None
                assert set(grant.nodes) == {*seat.rollout, *pool.cluster.groups[seat.group].train}
            since.pop(grant.job, None)
            for waiting in since.values():
                waiting[grant.job] = waiting.get(grant.job, 0) + 1
        if not moves:
            assert max((max(them.values(), default=0) for them in since.values()), default=0) <= 4, since
    assert cluster_digest(replay(records, CLUSTER_POLICIES["ours"])) == cluster_digest(pool.cluster)


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_an_event_that_came_twice_changes_nothing(phase: str):
    pool = two_in_a_group()
    pool.ask("run", ROLLOUT, 0)
    wish = e.PhaseAsked(job="script", phase=PhaseKind(phase), both=True)
    pool.tell(wish, 1)
    before = cluster_digest(pool.cluster)
    pool.tell(wish, 1)
    assert cluster_digest(pool.cluster) == before
