"""Whatever workers report, and whenever: accounts sum to the time, to the nanosecond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.ledger import NANO_USD_PER_USD, NS_PER_HOUR, Ledger, overhead_share
from elastic.core.types import Account

REPORT = st.dictionaries(st.sampled_from(list(Account)), st.integers(0, 10**12), max_size=4)
ACTION = st.one_of(
    st.tuples(st.just("report"), REPORT, st.integers(0, 10**6)),
    st.tuples(st.just("lose"), st.just({}), st.integers(-5, 10**7)),
)


@given(st.lists(st.tuples(ACTION, st.integers(0, 10**11)), max_size=30), st.integers(0, 10**9), st.booleans())
def test_accounts_sum_exactly_under_any_reports(actions, opened_ns: int, clean: bool) -> None:
    ledger, now_ns = Ledger(), opened_ns
    ledger.open("lease", "w", "spot", 2, 3.5, opened_ns)
    book = ledger.books["w"]
    for (action, accounts_ns, tokens), passed_ns in actions:
        now_ns += passed_ns
        if action == "report":
            ledger.report("w", accounts_ns, tokens, now_ns)
        else:
            ledger.lose("w", tokens)
        assert sum(book.accounts_ns.values()) == book.cursor_ns - opened_ns
        assert book.cursor_ns <= now_ns
        assert min(book.accounts_ns.values(), default=0) >= 0
    ledger.close("w", now_ns, clean=clean)
    assert sum(book.accounts_ns.values()) == now_ns - opened_ns
    assert ledger.imbalance_ns() == 0


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20), st.integers(0, 10**9))
def test_honest_reports_are_credited_in_full(uptimes_ns: list[int], boot_ns: int) -> None:
    """A worker that reports all of its uptime leaves nothing unattributed but the time since its last report."""
    ledger, uptime_ns = Ledger(), 0
    ledger.open("lease", "w", "spot", 1, 1.0, 0)
    for ns in uptimes_ns:
        uptime_ns += ns
        ledger.report("w", {Account.DECODE: uptime_ns}, 0, boot_ns + uptime_ns)
    ledger.close("w", boot_ns + uptime_ns + 7, clean=False)
    accounts_ns = {account: ns for account, ns in ledger.books["w"].accounts_ns.items() if ns}
    booting = {Account.BOOTING: boot_ns} if boot_ns else {}
    assert accounts_ns == booting | {Account.DECODE: uptime_ns, Account.UNATTRIBUTED: 7}


def test_report_that_does_not_fit_is_carried_to_the_next() -> None:
    ledger = Ledger()
    ledger.open("lease", "w", "spot", 1, 1.0, 0)
    ledger.report("w", {Account.IDLE: 10}, 0, 10)
    ledger.report("w", {Account.IDLE: 40}, 0, 20)
    assert ledger.books["w"].accounts_ns[Account.IDLE] == 20
    ledger.report("w", {Account.IDLE: 45}, 0, 45)
    assert ledger.books["w"].accounts_ns == {Account.BOOTING: 0, Account.IDLE: 45}


@pytest.mark.parametrize(
    ("reported", "clean", "account"),
    [(False, False, Account.BOOTING), (True, True, Account.DRAINING), (True, False, Account.UNATTRIBUTED)],
)
def test_last_stretch_goes_by_how_the_lease_ended(reported: bool, clean: bool, account: Account) -> None:
    ledger = Ledger()
    ledger.open("lease", "w", "spot", 1, 1.0, 0)
    if reported:
        ledger.report("w", {Account.IDLE: 5}, 0, 5)
    ledger.close("w", 9, clean=clean)
    assert ledger.books["w"].accounts_ns[account] == (4 if reported else 9)


def test_closed_book_takes_nothing_more() -> None:
    ledger = Ledger()
    ledger.open("lease", "w", "spot", 1, 1.0, 0)
    ledger.close("w", 9, clean=True)
    ledger.report("w", {Account.IDLE: 5}, 0, 20)
    ledger.close("w", 30, clean=False)
    assert ledger.books["w"].closed_ns == 9
    assert ledger.imbalance_ns() == 0


def test_lost_tokens_take_their_share_of_decoding() -> None:
    ledger = Ledger()
    ledger.open("lease", "w", "spot", 1, 1.0, 0)
    ledger.report("w", {Account.DECODE: 1000}, 10, 1000)
    ledger.lose("w", 3)
    assert ledger.books["w"].accounts_ns[Account.DECODE] == 700
    assert ledger.books["w"].accounts_ns[Account.LOST] == 300


def test_bill_is_price_times_gpus_times_time() -> None:
    ledger = Ledger()
    ledger.open("a", "w", "spot", 2, 3.0, 0)
    ledger.open("b", "v", "spot", 1, 1.0, 0)
    ledger.close("w", NS_PER_HOUR, clean=True)
    assert ledger.bill_nano_usd(2 * NS_PER_HOUR) == {"spot": (2 * 3 + 2) * NANO_USD_PER_USD}


def test_what_a_provider_says_it_charges_is_the_bill_and_the_accounts_stay() -> None:
    ledger = Ledger()
    ledger.open("a", "w", "modal", 2, 3.0, 0)
    ledger.close("w", NS_PER_HOUR, clean=True, charged_ns=2 * NS_PER_HOUR)
    assert ledger.bill_nano_usd(5 * NS_PER_HOUR) == {"modal": 2 * 2 * 3 * NANO_USD_PER_USD}
    assert ledger.closed_nano_usd_max == 2 * 2 * 3 * NANO_USD_PER_USD
    assert ledger.imbalance_ns() == 0


def test_overhead_is_what_a_fixed_device_would_not_have_spent() -> None:
    assert overhead_share({}) == 0.0
    assert overhead_share({Account.DECODE: 3, Account.BOOTING: 1}) == 0.25
