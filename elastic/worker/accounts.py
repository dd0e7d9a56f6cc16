"""The device's accounts from the birth of the worker's process, to the nanosecond."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from elastic.core.types import NS_PER_S, Account, Nanoseconds


def process_start_ns() -> Nanoseconds:
    """When this process started, on the monotonic clock: imports and set-up count as the worker's time.

    The system knows it to one of its ticks, 10 ms as a rule, and counts from its own start: no step of the wall clock
    enters.
    """
    # The second field is the program's name in brackets, which may have spaces; the start is the 22nd.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_ns = int(fields[19]) * NS_PER_S // os.sysconf("SC_CLK_TCK")
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns
    return time.monotonic_ns() - age_ns


class DeviceAccounts:
    """The engine's accounts, with BOOTING since `start_ns` before them, and TRAINING taken out of its ASLEEP.

    The sum is a constant plus the engine's age, which its meter holds exactly.
    """

    def __init__(self, start_ns: Nanoseconds) -> None:
        self._start_ns = start_ns
        self._booting_ns = 0
        self._before_ns: Mapping[Account, Nanoseconds] = {}
        self._trained_ns = 0
        self._asleep_before_ns: Nanoseconds | None = None

    def engine_started(self, accounts_ns: Mapping[Account, Nanoseconds], now_ns: Nanoseconds) -> None:
        """The engine's meter takes over at `now_ns`; what it shows until then, `accounts_ns`, was booting too."""
        self._booting_ns = now_ns - self._start_ns
        self._before_ns = accounts_ns

    def training_began(self, accounts_ns: Mapping[Account, Nanoseconds]) -> None:
        """The device trains from here on, while the engine believes that it is asleep."""
        self._asleep_before_ns = accounts_ns.get(Account.ASLEEP, 0)

    def training_ended(self, accounts_ns: Mapping[Account, Nanoseconds]) -> None:
        self._trained_ns = self._training_ns(accounts_ns)
        self._asleep_before_ns = None

    def total(self, accounts_ns: Mapping[Account, Nanoseconds]) -> dict[Account, Nanoseconds]:
        """All accounts, given the engine's; they add up to the process's age."""
        total = {a: ns - self._before_ns.get(a, 0) for a, ns in accounts_ns.items()}
        total[Account.BOOTING] = total.get(Account.BOOTING, 0) + self._booting_ns
        if training_ns := self._training_ns(accounts_ns):
            total[Account.TRAINING] = total.get(Account.TRAINING, 0) + training_ns
            total[Account.ASLEEP] -= training_ns
        return {account: ns for account, ns in total.items() if ns}

    def _training_ns(self, accounts_ns: Mapping[Account, Nanoseconds]) -> Nanoseconds:
        before_ns = self._asleep_before_ns
        asleep_ns = accounts_ns.get(Account.ASLEEP, 0)
        now_ns = 0 if before_ns is None else max(0, asleep_ns - before_ns)
        # A reading from just before `training_ended` may know of less sleep than was trained in.
        return min(self._trained_ns + now_ns, asleep_ns)
