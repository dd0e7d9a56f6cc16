"""The lease table's counts, ids and transitions."""

import pytest

from elastic.core.leases import LeaseTable
from elastic.core.transitions import IllegalTransition
from elastic.core.types import LeaseState, Offer, WorkerRole


@pytest.fixture
def table() -> LeaseTable:
    table = LeaseTable()
    for name in ("spot", "spot-eu"):
        table.offers[name] = Offer(provider=name, role=WorkerRole.ELASTIC, available=1, usd_per_gpu_hour=1.0)
    return table


def test_counts_follow_a_lease_through_its_life(table: LeaseTable) -> None:
    lease = table.request("spot")
    other = table.request("spot")
    assert (table.asked("spot"), table.held("spot")) == (2, 2)
    table.move(other, LeaseState.REFUSED, 0, "full")
    table.move(lease, LeaseState.GRANTED, 0, "")
    assert (table.asked("spot"), table.held("spot"), lease.live) == (0, 1, True)
    table.move(lease, LeaseState.RELEASING, 0, "")
    assert (table.held("spot"), lease.live) == (1, True)
    table.move(lease, LeaseState.ENDED, 0, "")
    assert (table.held("spot"), lease.live, table.leases) == (0, False, {})


def test_what_is_granted_is_on_offer_no_more(table: LeaseTable) -> None:
    lease = table.request("spot")
    assert table.available("spot") == 0
    table.move(lease, LeaseState.GRANTED, 0, "")
    assert table.available("spot") == 0


def test_replacements_are_granted_besides_what_is_on_offer(table: LeaseTable) -> None:
    replacement = table.request("spot", replaces="spot-0")
    table.move(replacement, LeaseState.GRANTED, 0, "")
    assert table.available("spot") == 1


def test_mean_time_to_get_ready_is_that_of_the_last_workers(table: LeaseTable) -> None:
    assert table.mean_ready_ns("spot") is None
    for duration_ns in (900, *range(8)):
        table.took_to_get_ready("spot-1", "spot", duration_ns)
    assert (table.mean_ready_ns("spot"), table.ready_ns("spot")) == (3.5, 7)
    assert table.mean_ready_ns("spot-eu") is None


def test_lease_is_succeeded_while_both_are_there(table: LeaseTable) -> None:
    lease = table.request("spot")
    assert table.replaced() == set()
    replacement = table.request("spot", replaces=lease.id)
    assert table.replaced() == {lease.id}
    table.move(replacement, LeaseState.REFUSED, 0, "full")
    assert table.replaced() == set()
    table.request("spot", replaces=lease.id)
    table.move(lease, LeaseState.GRANTED, 0, "")
    table.move(lease, LeaseState.ENDED, 0, "")
    assert table.replaced() == set()


def test_ids_are_never_used_twice_and_name_their_provider(table: LeaseTable) -> None:
    first = table.request("spot")
    table.move(first, LeaseState.REFUSED, 0, "full")
    second = table.request("spot")
    table.request("spot-eu")
    assert first.id != second.id
    assert table.issuer(first.id) == table.issuer(second.id) == "spot"
    assert table.issuer("spot-eu-1") == "spot-eu"
    assert [table.issuer(name) for name in ("spot-3", "spot-0", "spot--1", "spot-x", "other-1", "")] == [None] * 6


def test_lease_under_way_back_cannot_be_granted_again(table: LeaseTable) -> None:
    lease = table.request("spot")
    table.move(lease, LeaseState.GRANTED, 0, "")
    table.move(lease, LeaseState.RELEASING, 0, "of no use")
    with pytest.raises(IllegalTransition, match="of no use"):
        table.move(lease, LeaseState.GRANTED, 0, "")


def test_replacements_are_those_offered_and_not_asked_for_yet(table: LeaseTable) -> None:
    assert table.replacements_left("spot") == 0
    assert table.replacements_left("nobody") == 0
    offer = table.offers["spot"]
    table.offers["spot"] = Offer(provider="spot", role=offer.role, available=1, usd_per_gpu_hour=1.0, replacements=2)
    first = table.request("spot")
    assert table.replacements_left("spot") == 2
    replacement = table.request("spot", replaces=first.id)
    assert table.replacements_left("spot") == 1
    table.move(replacement, LeaseState.GRANTED, 0, "")
    assert table.replacements_left("spot") == 2
