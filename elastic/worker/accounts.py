"""The device's accounts from the birth of the worker's process, to the nanosecond."""

import os
import threading
from collections.abc import Callable, Mapping

from elastic.core.types import NS_PER_S, Account, Nanoseconds
from elastic.engine.meter import AccountMeter
from elastic.system.host import here
from elastic.system.processes import identity


def process_start_ns() -> Nanoseconds:
    """Return when this process started, on the monotonic clock, so that imports and set-up count as the worker's time.

    The system knows this to one tick (usually 10 ms) since its own start, so steps of the wall clock have no effect.
    """
    own = identity(os.getpid())
    assert own is not None
    started_ns = own.start_ticks * NS_PER_S // os.sysconf("SC_CLK_TCK")
    age_ns = here().boottime_ns() - started_ns
    return here().monotonic_ns() - age_ns


class DeviceAccounts:
    """The engine's accounts, preceded by BOOTING since `start_ns`, with periods that are devoted to other work.

    Their sum is a constant plus the engine's age, which its meter holds exactly. Any thread may call.
    """

    def __init__(self, start_ns: Nanoseconds) -> None:
        self._lock = threading.Lock()
        self._before = AccountMeter(start_ns, Account.BOOTING)
        self._read: Callable[[], Mapping[Account, Nanoseconds]] | None = None
        self._seen_ns: Mapping[Account, Nanoseconds] = {}
        """The part of the engine's accounts that `_total_ns` has."""
        self._total_ns: dict[Account, Nanoseconds] = {}
        self._devoted: Account | None = None
        self._instead_of: Account | None = None

    def engine_started(self, read: Callable[[], Mapping[Account, Nanoseconds]], now_ns: Nanoseconds) -> None:
        """Let the engine's meter `read` take over at `now_ns`. Its time before that counts as booting."""
        with self._lock:
            self._total_ns, self._seen_ns, self._read = self._before.read(now_ns), read(), read

    def devote(self, account: Account, instead_of: Account | None = None) -> None:
        """Book the device's time to `account` from now on, whatever the engine books, or only what it books as
        `instead_of`."""
        self._switch(account, instead_of)

    def leave_to_engine(self) -> None:
        """Book the device's time as the engine does from now on, or as booting while there is no engine."""
        self._switch(None, None)

    def total(self, accounts_ns: Mapping[Account, Nanoseconds]) -> dict[Account, Nanoseconds]:
        """Return all accounts, given the engine's. They add up to the process's age, and never shrink between calls."""
        with self._lock:
            self._settle(accounts_ns)
            return {account: ns for account, ns in self._total_ns.items() if ns}

    def _switch(self, account: Account | None, instead_of: Account | None) -> None:
        with self._lock:
            if self._read is None:
                self._before.switch(here().monotonic_ns(), {account or Account.BOOTING: 1.0})
            else:
                self._settle(self._read())
            self._devoted, self._instead_of = account, instead_of

    def _settle(self, accounts_ns: Mapping[Account, Nanoseconds]) -> None:
        """Book the new time of a reading. A reading older than what is booked has none."""
        if sum(accounts_ns.values()) <= sum(self._seen_ns.values()):
            return
        for account, ns in accounts_ns.items():
            devoted = self._devoted is not None and self._instead_of in (None, account)
            spent_on = self._devoted if devoted and self._devoted is not None else account
            self._total_ns[spent_on] = self._total_ns.get(spent_on, 0) + ns - self._seen_ns.get(account, 0)
        self._seen_ns = accounts_ns
