"""How much capacity to ask a provider for. Source: RLBoost §4.1 (N_prem) for the bound; the prices are ours."""

import msgspec

from elastic.core.policy import MarketView
from elastic.core.types import Nanoseconds, Offer, WorkerRole

LEAST_WORKING_SHARE = 0.1
"""The share of its expected life that a lease is assumed to work for at least, if leases of its provider ever got
ready: a bad hour makes a provider expensive, not worthless, so that its recovery is noticed."""


class TakeWhatIsOffered(msgspec.Struct, frozen=True):
    """Lease all that a provider offers; its settings bound how much that is."""

    def leases_wanted(self, offer: Offer, market: MarketView) -> int:
        return market.available(offer.provider)


class MarginalValue(msgspec.Struct, frozen=True):
    """Lease what makes the run cheaper, or faster at a fair price: the cheapest first, up to N_prem workers.

    While rollouts are what a step waits for, n devices that cost B dollars an hour take time in proportion to 1/n.
    One more at price p takes it from n to n + 1, so it pays as long as p < (B + v)/n, where v is what an hour of
    the run's time is worth to its owner. The price of a lease counts the time that it does not work: of its
    expected life it boots for a part. Dedicated workers are paid for anyway and always taken; they are among the
    workers that N_prem bounds.
    """

    usd_per_hour_saved: float = 100.0

    def leases_wanted(self, offer: Offer, market: MarketView) -> int:
        available = market.available(offer.provider)
        if offer.role is not WorkerRole.ELASTIC:
            return available
        usd = working_usd_per_hour(offer, market.ready_s(offer.provider))
        if usd is None:
            return 0
        workers, bill_usd = _held(market)
        wanted, most = 0, min(available, self._fitting(offer, market))
        while wanted < most and usd / offer.workers_per_lease < (bill_usd + self.usd_per_hour_saved) / max(1, workers):
            wanted += 1
            workers += offer.workers_per_lease
            bill_usd += usd
        return wanted

    def _fitting(self, offer: Offer, market: MarketView) -> int:
        """Return the leases that the bound leaves to this offer after better offers."""
        if market.worker_bound is None:
            return market.available(offer.provider)
        own, taken = _rank(offer, market), 0
        for other in market.offers.values():
            if other.role is not WorkerRole.TRAINER:
                reserved = market.available(other.provider) if _rank(other, market) < own else 0
                taken += (market.held(other.provider) + reserved) * other.workers_per_lease
        return max(0, -(-(market.worker_bound - taken) // offer.workers_per_lease))


class HoldForRollouts(msgspec.Struct, frozen=True):
    """Hold leases only while there are rollouts.

    Between the rollouts of two steps leases are given back for as long as the last pause, less the time to get ready,
    so that they are back in time. A lease is kept if giving it back is not known to save anything. Without `foreseen`,
    leases are given back in every pause and requested when rollouts begin; a turn on a shared pool likewise.
    """

    foreseen: bool = True

    def pause_ns(
        self, offer: Offer, foreseen_ns: Nanoseconds | None, ready_ns: Nanoseconds | None
    ) -> Nanoseconds | None:
        if not self.foreseen or offer.grant_within_ns:
            return None
        return max(0, (foreseen_ns or 0) - (offer.boot_ns if ready_ns is None else ready_ns))


def working_usd_per_hour(offer: Offer, ready_s: float | None = None) -> float | None:
    """Return the dollars for an hour of a lease's work, boot time included; None if it ends before it can work.

    `ready_s` is the measured mean time until the provider's workers are ready; it replaces the declared boot time.
    """
    usd, life_s = offer.usd_per_gpu_hour * offer.gpus_per_worker * offer.workers_per_lease, offer.expected_life_s
    if life_s is None:
        return usd
    working_s = life_s - offer.boot_s if ready_s is None else max(life_s - ready_s, LEAST_WORKING_SHARE * life_s)
    return usd * life_s / working_s if working_s > 0 else None


def _rank(offer: Offer, market: MarketView) -> tuple[bool, float, float, str]:
    """Return the rank of an offer; lower ranks are leased first: dedicated workers, then cheaper work, then longer
    lives.

    Leases that would end before they can work rank last, and are never taken.
    """
    usd = working_usd_per_hour(offer, market.ready_s(offer.provider))
    usd_per_worker = float("inf") if usd is None else usd / offer.workers_per_lease
    life_s = float("inf") if offer.expected_life_s is None else offer.expected_life_s
    return offer.role is WorkerRole.ELASTIC, usd_per_worker, -life_s, offer.provider


def _held(market: MarketView) -> tuple[int, float]:
    """Return the number of devices that roll out, with the trainer's, and their cost per hour."""
    workers, usd = 0, 0.0
    for offer in market.offers.values():
        held = market.held(offer.provider) * offer.workers_per_lease
        workers += held
        usd += held * offer.gpus_per_worker * offer.usd_per_gpu_hour
    return workers, usd
