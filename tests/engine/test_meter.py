from hypothesis import given
from hypothesis import strategies as st

from elastic.core.types import Account
from elastic.engine.meter import AccountMeter

costs = st.dictionaries(st.sampled_from(list(Account)), st.floats(1e-9, 1e9, allow_nan=False), min_size=1, max_size=4)
steps = st.lists(st.tuples(st.integers(0, 10**13), costs | st.none()), max_size=30)


@given(steps)
def test_accounts_sum_to_the_age_and_never_shrink(steps):
    start = now = 12_345
    meter = AccountMeter(start, Account.IDLE)
    last: dict[Account, int] = {}
    for elapsed_ns, switch in steps:
        now += elapsed_ns
        if switch is not None:
            meter.switch(now, switch)
        accounts = meter.read(now)
        assert sum(accounts.values()) == now - start
        assert all(accounts[account] >= ns for account, ns in last.items())
        last = accounts


def test_a_mixed_interval_splits_by_cost():
    meter = AccountMeter(0, Account.IDLE)
    meter.switch(100, {Account.DECODE: 0.003, Account.PREFILL: 0.001})
    meter.switch(4_100, {Account.IDLE: 1.0})
    assert meter.read(4_105) == {Account.IDLE: 105, Account.DECODE: 3_000, Account.PREFILL: 1_000}
