"""What a cold start of the rollouts' engine costs, as planned and as measured, and whom it keeps waiting."""

import pytest

from elastic.core.cluster import PhasePlan
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobState, PhaseKind
from tests.cluster.conftest import Driver, S, grants, timed_job

ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


def cold(cold_s: int, *, parks: bool) -> PhasePlan:
    return PhasePlan(rollout_ns=100 * S, train_ns=100 * S, rollout_cold_ns=cold_s * S, rollout_parks=parks)


def test_an_engine_that_cannot_park_starts_in_each_cycle_and_an_slo_must_bear_that() -> None:
    pool = Driver()
    pool.run(timed_job("a", slo=1.2, plan=cold(40, parks=False)), timed_job("b", slo=1.1, plan=cold(40, parks=False)))
    assert pool.cluster.groups["group-1"].cycle_ns == 240 * S
    assert pool.cluster.jobs["b"].state is JobState.REJECTED
    assert "it could keep 1.2" in pool.cluster.jobs["b"].reason
    (permit,) = pool.ask("a", ROLLOUT, 0)
    assert permit.deadline_ns == 154 * S
    # Parked, it starts once, whatever its SLO: alone it would have to start as well.
    pool.run(timed_job("c", slo=1.0, plan=cold(40, parks=True)))
    assert pool.cluster.jobs["c"].state is JobState.RUNNING
    (permit,) = pool.ask("c", ROLLOUT, 0)
    assert permit.deadline_ns == 150 * S


@pytest.mark.parametrize(
    ("member_slo", "train_s", "slo", "bearable_s"),
    [(1.1, 50, 2.0, 100), (2.0, 40, 1.2, 80)],
    ids=["of whom waits for it", "its own"],
)
def test_a_cold_start_is_borne_over_the_steps_to_come(
    member_slo: float, train_s: int, slo: float, bearable_s: int
) -> None:
    """In a cycle of 100 s and ten steps, of which one accepts 110 s, or 108 s."""
    pool = Driver()
    pool.run(timed_job("a", 50, 50, member_slo))
    for cold_s in (bearable_s, bearable_s + 1):
        plan = PhasePlan(rollout_ns=50 * S, train_ns=train_s * S, rollout_cold_ns=cold_s * S)
        choice, refusals = pool.cluster.dry_run(timed_job("b", slo=slo, plan=plan))
        assert choice is not None
        if cold_s > bearable_s:
            assert choice.group is None
            assert "with the job's cold start spread over a member's steps" in refusals[0].reason
        else:
            assert choice.group == "group-1"


def test_a_move_costs_a_cold_start_besides_the_restart() -> None:
    pool = Driver()
    pool.run(timed_job("a", slo=1.5, restart_ns=60 * S, plan=cold(40, parks=True)))
    assert pool.cluster.limit_after_restart_ns("a") == 290 * S


@pytest.mark.parametrize(
    ("beside", "lengths"),
    [((), [110, 230, 470, 950, 1910]), (("b",), [110, 230, 470, 230, 120])],
    ids=["alone", "beside"],
)
def test_a_start_has_as_long_besides_as_those_that_failed_while_others_bear_it(
    beside: tuple[str, ...], lengths: list[int]
) -> None:
    pool, at_s, found = Driver(), 0, list[int]()
    pool.run(timed_job("a"), *map(timed_job, beside))
    record = pool.cluster.jobs["a"]
    while record.state is JobState.RUNNING:
        granted = pool.ask("a", ROLLOUT, at_s)
        if not granted:  # Nobody hears of the other job, and it is passed over.
            granted = grants(pool.tick(at_s := at_s + 20))
        found.append((granted[0].deadline_ns - granted[0].since_ns) // S)
        at_s += found[-1]
        pool.tick(at_s)
        pool.tick(at_s := at_s + 10)
    assert found == lengths
    assert record.reason.startswith("its residents did not start in 5 time slices, the last of")


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "yielded before it began"])
def test_a_start_that_has_come_about_at_last_is_no_longer_waited_for(killed: bool) -> None:
    pool = Driver()
    pool.run(timed_job("a"))
    pool.ask("a", ROLLOUT, 0)
    pool.tick(110)
    if killed:
        pool.tick(120)
    else:
        pool.end("a", 120, finished=False)
    (permit,) = pool.ask("a", ROLLOUT, 130)
    assert permit.deadline_ns == 360 * S
    pool.end("a", 330, cold_s=100)
    pool.ask("a", TRAIN, 330)
    pool.end("a", 400)
    pool.tell(e.ResidentLost(job="a", node="rollout-1", cause="killed"), 410)
    (permit,) = pool.ask("a", ROLLOUT, 420)
    assert permit.deadline_ns == 530 * S


def test_cold_starts_are_learned_and_whether_the_engine_parks() -> None:
    pool = Driver()
    pool.run(timed_job("a", slo=1.4))
    record = pool.cluster.jobs["a"]
    pool.ask("a", ROLLOUT, 0)
    pool.end("a", 140, cold_s=40)
    assert (record.cold_ns, record.parks, record.measured_ns) == (40 * S, True, {ROLLOUT: 100 * S})
    pool.ask("a", TRAIN, 140)
    pool.end("a", 240)
    pool.tell(e.ResidentLost(job="a", node="rollout-1", cause="killed"), 240)
    pool.ask("a", ROLLOUT, 250)
    pool.end("a", 390, cold_s=40)
    assert record.parks
    pool.ask("a", TRAIN, 390)
    pool.end("a", 490)
    pool.ask("a", ROLLOUT, 490)
    pool.end("a", 670, cold_s=80)
    assert (record.cold_ns, record.parks) == (50 * S, False)
    # What it was promised does not hold beside another job any more: it is placed anew with what was measured.
    pool.run(timed_job("b", slo=1.1), at_s=670)
    assert pool.cluster.jobs["b"].seat == record.seat
    pool.ask("a", TRAIN, 670)
    pool.end("a", 770)
    assert record.stopping
    pool.tell(e.JobStopped(job="a", steps_done=3), 771)
    assert record.request.plan == cold(50, parks=False)
