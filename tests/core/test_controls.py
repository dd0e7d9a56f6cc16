"""Commands from outside: done once, caps that drain what exceeds them, budgets that are never exceeded."""

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.allowance import budget_forecast, stopping_ns
from elastic.core.digest import digest
from elastic.core.scheduler import Phase
from elastic.core.types import NS_PER_S, EndCause, LeaseState, Offer, WorkerRole, WorkerState
from elastic.testing.faults.core.settings import SMALL_LIMITS

HOUR_S = 3600
STOPPING_S = (SMALL_LIMITS.drain_timeout_ns + SMALL_LIMITS.release_timeout_ns) / NS_PER_S + 1
USD_PER_S = 1.0
"""Of every device here."""


def offer(core, provider: str, available: int, *, billed_s: int | None = None, role=WorkerRole.ELASTIC, **more) -> list:
    billing_ns = msgspec.UNSET if billed_s is None else billed_s * NS_PER_S
    offered = Offer(
        provider=provider,
        role=role,
        available=available,
        usd_per_gpu_hour=USD_PER_S * HOUR_S,
        billing_ns=billing_ns,
        **more,
    )
    return [command.lease for command in core.tell(e.OfferChanged(offer=offered)) if type(command) is c.AcquireLease]


def serve(core, lease: str) -> str:
    core.grant(lease)
    core.join(f"{lease}/w")
    core.beat(f"{lease}/w")
    return f"{lease}/w"


def train(core, billed_s: int | None = None) -> None:
    """The trainer's device is there, at the price of every other."""
    assert offer(core, "trainer", 1, billed_s=billed_s, role=WorkerRole.TRAINER) == ["trainer-1"]
    core.grant("trainer-1", workers=("trainer",))
    core.join("trainer")
    core.beat("trainer")


def live(core) -> tuple[str, ...]:
    return tuple(core.scheduler.fleet.workers)


def wait(core, seconds: float) -> list[c.Command]:
    return core.wait(seconds, beating=live(core))


def members(core) -> list[str]:
    """The trajectories of the step."""
    return [trajectory for group in core.scheduler.step.groups.values() for trajectory in group.members]


# Caps


def test_no_request_goes_beyond_a_cap(core) -> None:
    core.trainer()
    core.tell(e.CapSet(command="a", provider="spot", gpus=5))
    assert len(offer(core, "spot", 9, gpus_per_worker=2)) == 2
    assert offer(core, "serving", 3) == ["serving-1", "serving-2", "serving-3"]
    out = core.tell(e.CapSet(command="b", provider="spot", gpus=None))
    assert sum(type(command) is c.AcquireLease for command in out) == 7


def test_what_exceeds_a_cap_drains_the_least_useful_first(core) -> None:
    core.trainer()
    asked = offer(core, "spot", 4)
    busy, idle, booting, requested = asked
    serve(core, idle)
    worker = serve(core, busy)
    core.grant(booting)
    core.end_seeding()
    for trajectory in members(core):
        core.request(trajectory)
    table = core.scheduler.leases.leases
    load = {lease: core.scheduler.fleet.workers[f"{lease}/w"].outstanding for lease in (busy, idle)}
    least = min(load, key=lambda lease: load[lease])
    out = core.tell(e.CapSet(command="a", provider="spot", gpus=3))
    assert [k.lease for k in out if type(k) is c.ReleaseLease] == [requested]
    core.tell(e.CapSet(command="b", provider="spot", gpus=2))
    assert table[booting].leaving
    core.tell(e.CapSet(command="c", provider="spot", gpus=1))
    assert [lease for lease in (busy, idle) if table[lease].leaving] == [least]
    assert worker in core.scheduler.fleet.workers


def test_turns_of_what_drains_go_on_elsewhere_with_all_that_was_accepted(core) -> None:
    core.trainer()
    core.end_seeding()
    worker = core.worker()
    trajectory = members(core)[0]
    start = next(k for k in core.request(trajectory) if type(k) is c.StartTurn and k.worker == worker)
    core.tokens(start, 5)
    core.tell(e.CapSet(command="a", provider="spot", gpus=0))
    out = wait(core, 3 * SMALL_LIMITS.drain_timeout_ns / NS_PER_S)
    assert any(type(k) is c.DrainWorker and k.worker == worker for k in out)
    assert any(type(k) is c.ReleaseLease for k in out)
    turn = core.scheduler.turns.live[start.turn]
    assert (turn.accepted, turn.worker == worker) == (5, False)
    core.lease_ended("spot-1", EndCause.RELEASED)
    assert offer(core, "spot", 3) == []


def test_a_replacement_waits_for_room_under_the_cap(core) -> None:
    core.trainer()
    core.tell(e.CapSet(command="a", provider="spot", gpus=1))
    assert offer(core, "spot", 1, replacements=1, boot_s=4.0) == ["spot-1"]
    core.grant("spot-1", expires_s=20)
    core.join("spot-1/w")
    core.beat("spot-1/w")
    assert not any(type(k) is c.AcquireLease for k in wait(core, 14))
    core.tell(e.CapSet(command="b", provider="spot", gpus=2))
    assert any(type(k) is c.AcquireLease for k in wait(core, 2))


# Commands


def test_a_command_is_done_once(core) -> None:
    core.trainer()
    core.tell(e.CapSet(command="a", provider="spot", gpus=1))
    core.tell(e.CapSet(command="b", provider="spot", gpus=None))
    core.tell(e.CapSet(command="a", provider="spot", gpus=1))
    assert core.scheduler.controls.caps == {}
    core.tell(e.StopCommanded(command="c", reason="enough", undone=True))
    core.tell(e.StopCommanded(command="c", reason="enough"))
    assert core.scheduler.phase is Phase.RUNNING
    core.tell(e.StopCommanded(command="d", reason="enough"))
    assert (core.scheduler.phase, core.scheduler.stopped, core.scheduler.failed) == (Phase.STOPPING, "enough", "")


def test_a_run_that_was_told_nothing_has_the_digest_of_one_that_cannot_be(core) -> None:
    core.trainer()
    before = digest(core.scheduler)
    core.scheduler.controls.commands["a"] = "cap spot=1"
    assert digest(core.scheduler) != before


# Budgets


@pytest.fixture
def budgeted(make_core):
    def make(usd: float, billed_s: int | None = None):
        core = make_core()
        core.tell(e.BudgetSet(command="b", usd=usd))
        train(core, billed_s)
        return core

    return make


def exhausted(core, most_s: float) -> float:
    """When the core asks to be stopped for its budget."""
    began_s = core.now_s
    while core.now_s < began_s + most_s:
        for command in wait(core, 0.5):
            if type(command) is c.ExhaustBudget:
                return core.now_s
    raise AssertionError("it goes on")


def test_a_run_stops_when_its_budget_only_just_suffices_to_stop(budgeted) -> None:
    core = budgeted(100)
    assert exhausted(core, 200) == pytest.approx(100 - STOPPING_S, abs=1)
    core.tell(e.BudgetExhausted(cause="spent"))
    assert (core.scheduler.phase, core.scheduler.stopped) == (Phase.STOPPING, "BudgetExhausted: spent")


def test_a_begun_increment_is_committed_whole(budgeted) -> None:
    core = budgeted(150, billed_s=60)
    assert exhausted(core, 200) == pytest.approx(120 - STOPPING_S - 1, abs=1)


def test_what_is_asked_for_leaves_enough_to_use_it(budgeted) -> None:
    core = budgeted(100 + STOPPING_S)
    assert len(offer(core, "spot", 99, boot_s=19 - STOPPING_S)) == 4
    core = budgeted(100 + STOPPING_S)
    assert len(offer(core, "spot", 99, billed_s=60)) == 0
    core = budgeted(200 + STOPPING_S)
    assert len(offer(core, "spot", 99, billed_s=60)) == 1


def test_requests_that_nobody_answers_are_committed_to(budgeted) -> None:
    core = budgeted(100)
    (lease,) = offer(core, "spot", 1)
    assert exhausted(core, 200) == pytest.approx(100 - 2 * STOPPING_S, abs=1)
    assert core.scheduler.leases.leases[lease].state is LeaseState.REQUESTED


def test_a_budget_may_be_raised_lowered_and_taken_away(budgeted) -> None:
    core = budgeted(50)
    wait(core, 20)
    core.tell(e.BudgetSet(command="c", usd=100))
    assert exhausted(core, 100) == pytest.approx(100 - STOPPING_S, abs=1)
    core = budgeted(50)
    wait(core, 20)
    core.tell(e.BudgetSet(command="c", usd=None))
    wait(core, 100)
    core.tell(e.BudgetSet(command="d", usd=10))
    assert exhausted(core, 1) <= 121


def test_functions_and_former_incarnations_count(budgeted) -> None:
    core = budgeted(100)
    nano = 10**9
    core.tell(e.CostCarried(nano_usd=20 * nano))
    core.tell(e.FunctionsBilled(nano_usd=10 * nano, call_nano_usd=5 * nano))
    core.tell(e.FunctionsBilled(nano_usd=9 * nano, call_nano_usd=5 * nano))
    owed = 20 + 10 + 5 * SMALL_LIMITS.scorings_max
    assert exhausted(core, 200) == pytest.approx(100 - owed - STOPPING_S, abs=1)


def committed_usd(core) -> float:
    forecast = budget_forecast(core.scheduler.pieces[0], round(core.now_s * NS_PER_S))
    assert forecast is not None
    return forecast.committed_usd


def test_what_is_billed_at_the_least_counts_from_the_beginning(budgeted) -> None:
    core = budgeted(1000)
    before = committed_usd(core)
    (lease,) = offer(core, "far", 1, least_billed_ns=60 * NS_PER_S)
    assert committed_usd(core) - before == pytest.approx(60, abs=1)
    core.grant(lease)
    assert committed_usd(core) - before == pytest.approx(60, abs=1)
    core.tell(e.LeaseEnded(lease=lease, cause=EndCause.RELEASED))
    assert committed_usd(core) - before == pytest.approx(60, abs=1)
    (lease,) = offer(core, "far", 1, least_billed_ns=60 * NS_PER_S)
    core.grant(lease)
    core.tell(e.LeaseEnded(lease=lease, cause=EndCause.RELEASED, billed_ns=0))
    assert committed_usd(core) - before == pytest.approx(60, abs=1)


def test_a_price_that_changes_counts_from_then_on(budgeted) -> None:
    core = budgeted(1000)
    start, before = core.now_s, committed_usd(core)
    (lease,) = offer(core, "far", 1, usd_per_gpu_hour_most=3 * USD_PER_S * HOUR_S)
    assert committed_usd(core) - before == pytest.approx(3 * STOPPING_S, abs=1)
    core.grant(lease)
    assert committed_usd(core) - before == pytest.approx(STOPPING_S, abs=1)
    core.now_s += 100
    core.tell(e.LeaseRepriced(lease=lease, usd=110.0, usd_per_gpu_hour=2 * USD_PER_S * HOUR_S))
    core.now_s += 50
    trained = core.now_s - start
    assert committed_usd(core) - before - trained == pytest.approx(110 + 2 * (50 + STOPPING_S), abs=1)
    core.tell(e.LeaseEnded(lease=lease, cause=EndCause.RELEASED, billed_ns=200 * NS_PER_S))
    assert committed_usd(core) - before - trained == pytest.approx(200, abs=1)
    assert core.scheduler.spent_usd("far") == pytest.approx(200)


def test_what_no_lease_had_is_paid_for_too(budgeted) -> None:
    core = budgeted(1000)
    before = committed_usd(core)
    core.tell(e.StraysBilled(provider="far", usd=25.0))
    core.tell(e.StraysBilled(provider="far", usd=5.0))
    core.tell(e.CostCarried(nano_usd=10 * 10**9, of_providers={"far": 7 * 10**9}))
    assert committed_usd(core) - before == pytest.approx(40)
    assert core.scheduler.spent_usd("far") == pytest.approx(37)
    assert core.scheduler.ledger.bill_nano_usd(0)["far"] == 30 * 10**9


def test_a_run_that_cannot_afford_its_trainer_ends(make_core) -> None:
    core = make_core()
    core.tell(e.BudgetSet(command="b", usd=STOPPING_S / 2))
    assert offer(core, "trainer", 1, role=WorkerRole.TRAINER) == []
    assert exhausted(core, 1) <= 1


def test_a_lease_that_was_granted_while_nobody_listened_may_have_cost_since_it_was_asked_for(budgeted) -> None:
    core = budgeted(200)
    (lease,) = offer(core, "spot", 1)
    core.now_s += 60
    core.tell(e.Resumed())
    core.grant(lease)
    forecast = budget_forecast(core.scheduler.pieces[0], round(core.now_s * NS_PER_S))
    assert forecast is not None
    assert forecast.committed_usd == pytest.approx(2 * (60 + STOPPING_S), abs=0.1)


def test_whoever_resumes_may_bring_a_budget(budgeted) -> None:
    core = budgeted(50)
    core.now_s += 60
    out = core.tell(e.Resumed(budget_usd=500.0)) + wait(core, 1)
    assert not any(type(command) is c.ExhaustBudget for command in out)
    assert exhausted(core, 500) == pytest.approx(500 - STOPPING_S, abs=1)


def test_a_forecast_says_when_the_budget_ends(budgeted) -> None:
    core = budgeted(100)
    run = core.scheduler.pieces[0]
    first = budget_forecast(run, run.now_ns)
    assert first is not None
    assert (first.ends_in_s, first.warned) == (pytest.approx(100 - STOPPING_S), False)
    wait(core, 80)
    last = budget_forecast(run, run.now_ns)
    assert last is not None
    assert (last.ends_in_s, last.warned, last.used_share) == (
        pytest.approx(20 - STOPPING_S, abs=1),
        True,
        pytest.approx((80 + STOPPING_S) / 100, abs=0.01),
    )
    assert stopping_ns(run) == STOPPING_S * NS_PER_S
    assert core.scheduler.trainer().state in (WorkerState.READY, WorkerState.ASLEEP)
