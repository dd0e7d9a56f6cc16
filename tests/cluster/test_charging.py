"""Bills: whole numbers that sum to what the group costs, and never more for anybody than alone."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.cluster.policy import BillShare
from policies.charging import IdleAsAlone

AMOUNT = st.integers(0, 10**24)


@st.composite
def shares(draw: st.DrawFn) -> list[BillShare]:
    found: list[BillShare] = []
    for i in range(draw(st.integers(1, 6))):
        alone = draw(AMOUNT)
        found.append(BillShare(job=f"j{i}", used=draw(st.integers(0, alone)), alone=alone))
    return found


@given(shares(), st.data())
def test_bills_sum_to_the_cost_of_a_group_that_is_no_dearer_than_its_members_apart(
    found: list[BillShare], data: st.DataObject
) -> None:
    used, alone = sum(share.used for share in found), sum(share.alone for share in found)
    cost = data.draw(st.integers(used, alone))
    bills = IdleAsAlone().bills(found, cost)
    assert sum(bills.values()) == cost
    for share in found:
        assert share.used <= bills[share.job] <= share.alone


@given(shares(), AMOUNT)
def test_nobody_pays_more_than_alone_whatever_the_group_costs(found: list[BillShare], more: int) -> None:
    alone = sum(share.alone for share in found)
    bills = IdleAsAlone().bills(found, alone + more)
    assert {share.job: share.alone for share in found} == bills


def test_idle_time_is_divided_as_each_would_have_paid_for_it_alone() -> None:
    found = [BillShare(job="a", used=60, alone=100), BillShare(job="b", used=20, alone=100)]
    assert IdleAsAlone().bills(found, 110) == {"a": 70, "b": 40}


def test_the_odd_nano_dollar_goes_to_the_largest_remainder() -> None:
    found = [BillShare(job=job, used=0, alone=10) for job in "abc"]
    assert IdleAsAlone().bills(found, 10) == {"a": 4, "b": 3, "c": 3}
    # 2 × 1/3 leaves more than 2 × 2/3.
    assert IdleAsAlone().bills([BillShare(job="a", used=0, alone=1), BillShare(job="b", used=0, alone=2)], 2) == {
        "a": 1,
        "b": 1,
    }


def test_idle_time_of_one_nano_dollar_and_of_none_and_slices_beyond_the_cost() -> None:
    found = [BillShare(job="a", used=60, alone=100), BillShare(job="b", used=20, alone=100)]
    assert IdleAsAlone().bills(found, 81) == {"a": 60, "b": 21}
    assert IdleAsAlone().bills(found, 80) == {"a": 60, "b": 20}
    assert IdleAsAlone().bills(found, 40) == {"a": 30, "b": 10}


def test_what_was_used_beyond_alone_is_the_pools() -> None:
    # A job that trains on more nodes than it asked for.
    assert IdleAsAlone().bills([BillShare(job="a", used=150, alone=100)], 160) == {"a": 100}
    assert IdleAsAlone().bills([BillShare(job="a", used=0, alone=0)], 5) == {"a": 0}
