"""How much is asked of whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.leases import LeaseTable
from elastic.core.types import Offer, WorkerRole
from policies.provisioning import MarginalValue, TakeWhatIsOffered, working_usd_per_hour

D, T, E = WorkerRole.DEDICATED, WorkerRole.TRAINER, WorkerRole.ELASTIC


def offer(provider: str = "spot", available: int = 4, usd: float = 2.0, role: WorkerRole = E, **more: float) -> Offer:
    return Offer(provider=provider, role=role, available=available, usd_per_gpu_hour=usd, **more)  # type: ignore[arg-type]


def market(*offers: Offer, held: dict[str, int] | None = None, bound: int | None = None) -> LeaseTable:
    """The trainer's device is held, and what `held` says."""
    table = LeaseTable()
    table.worker_bound = bound
    for one in (offer("trainer", 1, 10.0, T), *offers):
        table.offers[one.provider] = one
    for provider, count in {"trainer": 1, **(held or {})}.items():
        for _ in range(count):
            lease = table.request(provider)
            table._asked[lease.provider] -= 1
    return table


def wanted(policy: MarginalValue, *offers: Offer, **more) -> int:
    return policy.leases_wanted(offers[0], market(*offers, **more))


@pytest.mark.parametrize(("available", "count"), [(0, 0), (3, 3), (-1, 0)])
def test_all_that_is_offered_is_taken(available: int, count: int) -> None:
    one = offer(available=available)
    assert TakeWhatIsOffered().leases_wanted(one, market(one)) == count


def test_what_is_asked_for_is_not_asked_for_again() -> None:
    table = market(offer(available=3))
    table.request("spot")
    assert TakeWhatIsOffered().leases_wanted(table.offers["spot"], table) == 2
    assert MarginalValue().leases_wanted(table.offers["spot"], table) == 2


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


@pytest.mark.parametrize(
    ("bound", "held", "count"), [(None, {}, 4), (9, {}, 4), (3, {}, 3), (3, {"spot": 2}, 1), (3, {"spot": 5}, 0)]
)
def test_bound_is_kept(bound: int | None, held: dict[str, int], count: int) -> None:
    assert wanted(MarginalValue(), offer(), bound=bound, held=held) == count


def test_under_a_bound_cheaper_providers_come_first() -> None:
    cheap, dear = offer("serving", 2, 0.0), offer("spot", 4, 2.0)
    assert wanted(MarginalValue(), dear, cheap, bound=5) == 3
    assert wanted(MarginalValue(), cheap, dear, bound=5) == 2


@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 20), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_bound_is_never_passed_by_more_than_a_lease(offers: list[tuple[int, float, int]], bound: int) -> None:
    all_ = [offer(f"p{n}", a, usd, workers_per_lease=w) for n, (a, usd, w) in enumerate(offers)]
    table = market(*all_, bound=bound)
    for one in all_:
        for _ in range(MarginalValue().leases_wanted(one, table)):
            table.request(one.provider)
    held = sum(table.held(one.provider) * one.workers_per_lease for one in all_)
    assert held < bound + max(one.workers_per_lease for one in all_)
