"""The device's accounts: they add up, whatever the engine's meter shows and whenever it is read."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.types import NS_PER_S, Account
from elastic.worker.accounts import DeviceAccounts

pytestmark = pytest.mark.alone

increments = st.dictionaries(st.sampled_from(list(Account)), st.integers(0, 10**12))


@given(boot_ns=st.integers(0, 10**12), before=increments, steps=st.lists(st.tuples(increments, st.booleans())))
def test_the_sum_is_the_age_whatever_happens(
    boot_ns: int, before: dict[Account, int], steps: list[tuple[dict[Account, int], bool]]
) -> None:
    """`steps`: what the engine's meter gains, and whether training begins or ends then."""
    accounts = DeviceAccounts(start_ns=0)
    engine = dict(before)
    age_ns = boot_ns + sum(before.values())
    accounts.engine_started(dict(engine), age_ns)
    assert accounts.total(engine) == ({Account.BOOTING: age_ns} if age_ns else {})
    training = False
    for gained, toggles in steps:
        for account, ns in gained.items():
            engine[account] = engine.get(account, 0) + ns
            age_ns += ns
        total = accounts.total(engine)
        assert sum(total.values()) == age_ns
        assert min(total.values(), default=0) >= 0
        if toggles:
            training = not training
            (accounts.training_began if training else accounts.training_ended)(dict(engine))
            assert sum(accounts.total(engine).values()) == age_ns


def test_sleep_during_training_is_training_and_other_sleep_is_not() -> None:
    accounts = DeviceAccounts(start_ns=0)
    accounts.engine_started({}, 0)
    accounts.training_began({Account.ASLEEP: 5})
    assert accounts.total({Account.ASLEEP: 12}) == {Account.ASLEEP: 5, Account.TRAINING: 7}
    accounts.training_ended({Account.ASLEEP: 15, Account.APPLYING: 4})
    assert accounts.total({Account.ASLEEP: 20, Account.APPLYING: 4}) == {
        Account.ASLEEP: 10,
        Account.TRAINING: 10,
        Account.APPLYING: 4,
    }


def test_a_reading_older_than_the_end_of_training_still_adds_up() -> None:
    accounts = DeviceAccounts(start_ns=0)
    accounts.engine_started({}, 0)
    accounts.training_began({})
    accounts.training_ended({Account.ASLEEP: 15})
    assert accounts.total({Account.ASLEEP: 12}) == {Account.TRAINING: 12}


def test_the_process_began_between_its_being_asked_for_and_its_first_word() -> None:
    source = (
        "import time; print(time.monotonic_ns()); from elastic.worker.accounts import process_start_ns as s; print(s())"
    )
    before_ns = time.monotonic_ns()
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    first_word_ns, started_ns = map(int, done.stdout.split())
    tick_ns = NS_PER_S // os.sysconf("SC_CLK_TCK")
    assert before_ns - tick_ns <= started_ns <= first_word_ns
