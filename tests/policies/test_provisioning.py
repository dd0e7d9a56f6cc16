"""How much is asked of whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.leases import LeaseState, LeaseTable
from elastic.core.market import LeaseMarket
from elastic.core.timers import Timers
from elastic.core.types import NS_PER_S, Offer, WorkerRole
from policies.provisioning import MarginalValue, TakeWhatIsOffered, working_usd_per_hour

D, T, E = WorkerRole.DEDICATED, WorkerRole.TRAINER, WorkerRole.ELASTIC


def offer(provider: str = "spot", available: int = 4, usd: float = 2.0, role: WorkerRole = E, **more: float) -> Offer:
    return Offer(provider=provider, role=role, available=available, usd_per_gpu_hour=usd, **more)  # type: ignore[arg-type]


def leases(*offers: Offer, held: dict[str, int] | None = None, bound: int | None = None) -> LeaseTable:
    """The trainer's device is held, and what `held` says."""
    table = LeaseTable()
    table.worker_bound = bound
    for one in (offer("trainer", 1, 10.0, T), *offers):
        table.offers[one.provider] = one
    for provider, count in {"trainer": 1, **(held or {})}.items():
        for _ in range(count):
            table.move(table.request(provider), LeaseState.GRANTED, 0, "granted")
    for one in (offer("trainer", 1, 10.0, T), *offers):
        table.offers[one.provider] = one
    return table


def market(table: LeaseTable, backing_off: tuple[str, ...] = (), ready_s: dict[str, tuple[float, ...]] | None = None):
    """The table as it is with these providers left alone, and others' workers ready after so many seconds each."""
    timers = Timers()
    for provider in backing_off:
        timers.set("back-off", provider, 0, NS_PER_S)
    for provider, times_s in (ready_s or {}).items():
        for time_s in times_s:
            table.took_to_get_ready(f"{provider}-1", provider, round(time_s * NS_PER_S))
    return LeaseMarket(table, timers)


def wanted(
    policy: MarginalValue,
    *offers: Offer,
    backing_off: tuple[str, ...] = (),
    ready_s: dict[str, tuple[float, ...]] | None = None,
    **more,
) -> int:
    return policy.leases_wanted(offers[0], market(leases(*offers, **more), backing_off, ready_s))


@pytest.mark.parametrize(("available", "count"), [(0, 0), (3, 3), (-1, 0)])
def test_all_that_is_offered_is_taken(available: int, count: int) -> None:
    one = offer(available=available)
    assert TakeWhatIsOffered().leases_wanted(one, market(leases(one))) == count


def test_what_is_asked_for_is_not_asked_for_again() -> None:
    table = leases(offer(available=3))
    table.request("spot")
    assert TakeWhatIsOffered().leases_wanted(table.offers["spot"], market(table)) == 2
    assert MarginalValue().leases_wanted(table.offers["spot"], market(table)) == 2


def test_who_has_just_failed_is_left_alone() -> None:
    one = offer()
    assert TakeWhatIsOffered().leases_wanted(one, market(leases(one), backing_off=("spot",))) == 0
    assert wanted(MarginalValue(), one, backing_off=("spot",)) == 0


def test_cheap_workers_are_taken_as_they_come_and_dear_ones_while_they_pay() -> None:
    thrifty = MarginalValue(usd_per_hour_saved=0.0)
    assert wanted(thrifty, offer(usd=2.0)) == 4
    assert wanted(thrifty, offer(usd=9.0)) == 4
    assert wanted(thrifty, offer(usd=10.5)) == 0
    assert wanted(MarginalValue(usd_per_hour_saved=2.0), offer(usd=11.0)) == 4


def test_the_more_there_are_the_less_another_one_is_worth() -> None:
    thrifty, cheap = MarginalValue(usd_per_hour_saved=0.0), offer("serving", 0, 0.0)
    assert wanted(thrifty, offer(usd=4.0), cheap) == 4
    assert wanted(thrifty, offer(usd=4.0), cheap, held={"serving": 3}) == 0
    assert wanted(thrifty, offer(usd=2.0), cheap, held={"serving": 3}) == 4


def test_dedicated_workers_are_always_taken() -> None:
    assert wanted(MarginalValue(usd_per_hour_saved=0.0), offer(usd=99.0, role=D), bound=1) == 4


def test_lease_that_dies_before_it_works_is_worth_nothing() -> None:
    assert wanted(MarginalValue(), offer(boot_s=60.0, expected_life_s=50.0)) == 0
    assert working_usd_per_hour(offer(usd=2.0, boot_s=30.0, expected_life_s=60.0)) == 4.0
    assert working_usd_per_hour(offer(usd=2.0, gpus_per_worker=2, boot_s=30.0)) == 4.0


def test_what_getting_ready_took_counts_rather_than_what_is_declared() -> None:
    thrifty, one = MarginalValue(usd_per_hour_saved=0.0), offer(usd=6.0, boot_s=1.0, expected_life_s=60.0)
    assert wanted(thrifty, one) == 4
    assert wanted(thrifty, one, ready_s={"spot": (5.0, 15.0)}) == 4
    assert wanted(thrifty, one, ready_s={"spot": (20.0, 40.0)}) == 0
    slow, steady = offer(usd=2.0, boot_s=1.0, expected_life_s=60.0), offer("serving", usd=3.0)
    assert wanted(MarginalValue(), steady, slow, bound=4) == 0
    assert wanted(MarginalValue(), steady, slow, bound=4, ready_s={"spot": (40.0,)}) == 4


def test_a_bad_hour_makes_a_provider_dear_and_not_worthless() -> None:
    one = offer(usd=2.0, expected_life_s=60.0)
    assert working_usd_per_hour(one, 90.0) == pytest.approx(20.0)
    assert wanted(MarginalValue(usd_per_hour_saved=100.0), one, ready_s={"spot": (90.0,)}) == 4


@pytest.mark.parametrize(
    ("bound", "held", "count"), [(None, {}, 4), (9, {}, 4), (3, {}, 3), (3, {"spot": 2}, 1), (3, {"spot": 5}, 0)]
)
def test_bound_is_kept(bound: int | None, held: dict[str, int], count: int) -> None:
    assert wanted(MarginalValue(), offer(), bound=bound, held=held) == count


def test_under_a_bound_cheaper_providers_come_first() -> None:
    cheap, dear = offer("serving", 2, 0.0), offer("spot", 4, 2.0)
    assert wanted(MarginalValue(), dear, cheap, bound=5) == 3
    assert wanted(MarginalValue(), cheap, dear, bound=5) == 2


def test_nothing_is_kept_free_for_a_cheaper_provider_that_does_not_deliver() -> None:
    cheap, dear = offer("serving", 2, 0.0), offer("spot", 4, 2.0)
    assert wanted(MarginalValue(), dear, cheap, bound=2) == 0
    assert wanted(MarginalValue(), dear, cheap, bound=2, backing_off=("serving",)) == 2


def test_dedicated_workers_are_among_those_that_the_bound_counts() -> None:
    reserved, spot = offer("reserved", 0, 99.0, D), offer()
    assert wanted(MarginalValue(), spot, reserved, bound=3, held={"reserved": 2}) == 1
    assert wanted(MarginalValue(), spot, reserved, bound=3, held={"reserved": 4}) == 0


def test_dedicated_workers_that_are_still_to_come_have_their_share_of_the_bound() -> None:
    reserved, spot = offer("reserved", 2, 99.0, D), offer(usd=0.0)
    assert wanted(MarginalValue(), spot, reserved, bound=3) == 1
    assert wanted(MarginalValue(), spot, reserved, bound=3, backing_off=("reserved",)) == 3


@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 20), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_bound_is_never_passed_by_more_than_a_lease(offers: list[tuple[int, float, int]], bound: int) -> None:
    all_ = [offer(f"p{n}", a, usd, workers_per_lease=w) for n, (a, usd, w) in enumerate(offers)]
    table = leases(*all_, bound=bound)
    for one in all_:
        for _ in range(MarginalValue().leases_wanted(one, market(table))):
            table.request(one.provider)
    held = sum(table.held(one.provider) * one.workers_per_lease for one in all_)
    assert held < bound + max(one.workers_per_lease for one in all_)
