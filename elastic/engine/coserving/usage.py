"""How long serving and rollouts had a shared device, in all and while it was lent. Pure: the caller brings the time."""

from collections import Counter

import msgspec

from elastic.core.types import Nanoseconds


class DeviceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Up to now. Rollouts compute only while the device is lent; `lent_serving_ns` is serving's part of `lent_ns`."""

    serving_ns: Nanoseconds
    rollout_ns: Nanoseconds
    lent_ns: Nanoseconds
    lent_serving_ns: Nanoseconds


class UsageMeter:
    """Told at the moments at which the device changes hands."""

    def __init__(self, now_ns: Nanoseconds) -> None:
        self._user: str | None = None
        self._lent = False
        self._settled_ns = now_ns
        self._spent_ns: Counter[tuple[str | None, bool]] = Counter()

    def hand_to(self, user: str | None, now_ns: Nanoseconds) -> None:
        """Counts time from `now_ns` on for "serving", for "rollout", or for neither (None)."""
        self._settle(now_ns)
        self._user = user

    def lend(self, lent: bool, now_ns: Nanoseconds) -> None:
        """Lend the device to a run from now on, or to none."""
        self._settle(now_ns)
        self._lent = lent

    def read(self, now_ns: Nanoseconds) -> DeviceUsage:
        self._settle(now_ns)
        spent_ns = self._spent_ns
        return DeviceUsage(
            serving_ns=spent_ns["serving", True] + spent_ns["serving", False],
            rollout_ns=spent_ns["rollout", True] + spent_ns["rollout", False],
            lent_ns=sum(ns for (_, lent), ns in spent_ns.items() if lent),
            lent_serving_ns=spent_ns["serving", True],
        )

    def _settle(self, now_ns: Nanoseconds) -> None:
        self._spent_ns[self._user, self._lent] += now_ns - self._settled_ns
        self._settled_ns = now_ns
