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


def test_successors_are_those_offered_and_not_asked_for_yet(table: LeaseTable) -> None:
    assert table.successors_left("spot") == 0
    assert table.successors_left("nobody") == 0
    offer = table.offers["spot"]
    table.offers["spot"] = Offer(provider="spot", role=offer.role, available=1, usd_per_gpu_hour=1.0, successors=2)
    first = table.request("spot")
    assert table.successors_left("spot") == 2
    successor = table.request("spot", succeeds=first.id)
    assert table.successors_left("spot") == 1
    table.move(successor, LeaseState.GRANTED, 0, "")
    assert table.successors_left("spot") == 2
