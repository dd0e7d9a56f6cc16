"""The device's accounts: they add up, whatever the engine's meter shows and whenever it is read."""

import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.types import NS_PER_S, Account
from elastic.worker.accounts import DeviceAccounts

increments = st.dictionaries(st.sampled_from(list(Account)), st.integers(0, 10**12))


USES = (None, Account.TRAINING, Account.PARKED, Account.SWITCHING)


class Meter:
    """An engine's."""

    def __init__(self, accounts_ns: dict[Account, int]) -> None:
        self.accounts_ns = dict(accounts_ns)

    def read(self) -> dict[Account, int]:
        return dict(self.accounts_ns)


def devote(accounts: DeviceAccounts, use: Account | None) -> None:
    if use is None:
        accounts.leave_to_engine()
    else:
        accounts.devote(use, Account.ASLEEP if use is Account.TRAINING else None)


@given(boot_ns=st.integers(0, 10**12), before=increments, steps=st.lists(st.tuples(increments, st.sampled_from(USES))))
def test_the_sum_is_the_age_whatever_happens(
    boot_ns: int, before: dict[Account, int], steps: list[tuple[dict[Account, int], Account | None]]
) -> None:
    """`steps`: what the engine's meter gains, and what the device is devoted to from then on."""
    accounts, engine = DeviceAccounts(start_ns=0), Meter(before)
    age_ns = boot_ns + sum(before.values())
    accounts.engine_started(engine.read, age_ns)
    last = accounts.total(engine.read())
    assert last == ({Account.BOOTING: age_ns} if age_ns else {})
    use: Account | None = None
    for gained, then in steps:
        stale = engine.read()
        for account, ns in gained.items():
            engine.accounts_ns[account] = engine.accounts_ns.get(account, 0) + ns
            age_ns += ns
        total = accounts.total(engine.read())
        assert sum(total.values()) == age_ns
        assert all(total.get(account, 0) >= ns for account, ns in last.items()), "an account has shrunk"
        if use is not None and use is not Account.TRAINING:
            assert total.get(use, 0) - last.get(use, 0) == sum(gained.values())
        devote(accounts, use := then)
        assert accounts.total(stale) == accounts.total(engine.read()) == total
        last = total


def test_sleep_during_training_is_training_and_other_sleep_is_not() -> None:
    accounts, engine = DeviceAccounts(start_ns=0), Meter({})
    accounts.engine_started(engine.read, 0)
    engine.accounts_ns = {Account.ASLEEP: 5}
    devote(accounts, Account.TRAINING)
    engine.accounts_ns = {Account.ASLEEP: 15, Account.APPLYING: 4}
    accounts.leave_to_engine()
    assert accounts.total({Account.ASLEEP: 20, Account.APPLYING: 4}) == {
        Account.ASLEEP: 10,
        Account.TRAINING: 10,
        Account.APPLYING: 4,
    }


def test_time_without_the_device_before_there_is_an_engine_is_no_boot() -> None:
    began_ns = time.monotonic_ns()
    accounts = DeviceAccounts(began_ns)
    accounts.devote(Account.PARKED)
    while time.monotonic_ns() == began_ns:
        pass
    accounts.leave_to_engine()
    now_ns = time.monotonic_ns()
    accounts.engine_started(dict, now_ns)
    total = accounts.total({})
    assert total[Account.PARKED] > 0
    assert sum(total.values()) == now_ns - began_ns


def test_the_process_began_between_its_being_asked_for_and_its_first_word() -> None:
    source = (
        "import time; print(time.monotonic_ns()); from elastic.worker.accounts import process_start_ns as s; print(s())"
    )
    before_ns = time.monotonic_ns()
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    first_word_ns, started_ns = map(int, done.stdout.split())
    tick_ns = NS_PER_S // os.sysconf("SC_CLK_TCK")
    assert before_ns - tick_ns <= started_ns <= first_word_ns
