"""An engine's account book: every nanosecond since its creation, in exactly one account.

Source: docs/design.md, "A GPU-second": a mixed iteration splits by profiled cost, and the accounts add up to the
engine's age to the nanosecond.
"""

from collections.abc import Mapping

from elastic.core.types import Account, Nanoseconds


class AccountMeter:
    """Pure: the caller brings the time. No account ever shrinks from one reading to the next."""

    def __init__(self, now_ns: Nanoseconds, account: Account) -> None:
        self._accounts_ns: dict[Account, Nanoseconds] = {}
        self._costs: Mapping[Account, float] = {account: 1.0}
        self._settled_ns = now_ns

    def switch(self, now_ns: Nanoseconds, costs: Mapping[Account, float]) -> None:
        """From `now_ns` on time is shared out in proportion to `costs` (positive, any unit, not empty)."""
        self._settle(now_ns)
        self._costs = costs

    def settle(self, now_ns: Nanoseconds, costs: Mapping[Account, float]) -> None:
        """The time since the last reading or switch was spent on `costs`, as turns out only now."""
        self._costs = costs
        self._settle(now_ns)

    def read(self, now_ns: Nanoseconds) -> dict[Account, Nanoseconds]:
        self._settle(now_ns)
        return dict(self._accounts_ns)

    def _settle(self, now_ns: Nanoseconds) -> None:
        elapsed_ns = left_ns = now_ns - self._settled_ns
        self._settled_ns = now_ns
        total = sum(self._costs.values())
        *others, last = self._costs
        for account in others:
            share_ns = min(left_ns, int(elapsed_ns * self._costs[account] / total))
            self._add(account, share_ns)
            left_ns -= share_ns
        # The last takes the rest, so that nothing is lost in rounding.
        self._add(last, left_ns)

    def _add(self, account: Account, ns: Nanoseconds) -> None:
        self._accounts_ns[account] = self._accounts_ns.get(account, 0) + ns
