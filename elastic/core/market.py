"""What a provisioning policy sees: the providers' offers, and the leases held of each."""

from collections import Counter
from collections.abc import Callable, Mapping

from elastic.core.leases import Lease, LeaseTable
from elastic.core.timers import Timers
from elastic.core.types import NS_PER_S, Offer


class LeaseMarket:
    """The lease table as an `elastic.core.policy.MarketView`.

    With `ending`, the view asks about that lease's replacement: the lease counts as over, like all leases that have a
    replacement, and its provider offers only replacements.
    `room` says how many more leases of an offer the run may hold, None for any number.
    """

    def __init__(
        self,
        table: LeaseTable,
        timers: Timers,
        ending: Lease | None = None,
        room: Callable[[Offer], int | None] = lambda _: None,
    ) -> None:
        self._table = table
        self._timers = timers
        self._room = room
        self._ending = ending
        self._over = Counter[str]()
        if ending is not None:
            self._over.update(table.leases[lease].provider for lease in table.replaced() | {ending.id})

    @property
    def worker_bound(self) -> int | None:
        return self._table.worker_bound

    @property
    def offers(self) -> Mapping[str, Offer]:
        return self._table.offers

    def available(self, provider: str) -> int:
        table = self._table
        if self._timers.waiting("back-off", provider) or provider in table.paused or provider in table.stopped:
            return 0
        if self._ending is not None and provider == self._ending.provider:
            offered = max(0, self._table.replacements_left(provider))
        else:
            offered = self._table.available(provider)
        room = self._room(self._table.offers[provider]) if offered else None
        return offered if room is None else min(offered, room)

    def held(self, provider: str) -> int:
        return self._table.held(provider) - self._over[provider]

    def ready_s(self, provider: str) -> float | None:
        ready_ns = self._table.mean_ready_ns(provider)
        return None if ready_ns is None else ready_ns / NS_PER_S
