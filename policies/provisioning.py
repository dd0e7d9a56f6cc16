"""How much capacity to ask a provider for. Source: RLBoost §4.1 (N_prem) for the bound; the prices are ours."""

from collections.abc import Iterable

import msgspec

from elastic.core.policy import MarketView
from elastic.core.types import Offer, WorkerRole


class TakeWhatIsOffered:
    """Lease all that a provider offers; its settings bound how much that is."""

    def leases_wanted(self, offer: Offer, market: MarketView) -> int:
        return market.available(offer.provider)


class MarginalValue(msgspec.Struct, frozen=True):
    """Lease what makes the run cheaper, or faster at a fair price: the cheapest first, up to N_prem workers.

    While rollouts are what a step waits for, n devices that cost B dollars an hour take time in proportion to 1/n.
    One more at price p takes it from n to n + 1, so it pays as long as p < (B + v)/n, where v is what an hour of
    the run's time is worth to its owner. The price of a lease counts the time that it does not work: of its
    expected life it boots for a part. Dedicated workers are paid for anyway and always taken.
    """

    usd_per_hour_saved: float = 100.0

    def leases_wanted(self, offer: Offer, market: MarketView) -> int:
        available = market.available(offer.provider)
        if offer.role is not WorkerRole.ELASTIC:
            return available
        usd = working_usd_per_hour(offer)
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
        """Leases that the bound leaves to this offer, once better ones have had their share."""
        if market.worker_bound is None:
            return market.available(offer.provider)
        elastic = [o for o in market.offers.values() if o.role is WorkerRole.ELASTIC]
        taken = sum(market.held(o.provider) * o.workers_per_lease for o in elastic)
        taken += sum(market.available(o.provider) * o.workers_per_lease for o in _better(offer, elastic))
        return max(0, -(-(market.worker_bound - taken) // offer.workers_per_lease))


def working_usd_per_hour(offer: Offer) -> float | None:
    """What an hour of a lease's work costs, boot time included; None for one that dies before it can work."""
    usd = offer.usd_per_gpu_hour * offer.gpus_per_worker * offer.workers_per_lease
    if offer.expected_life_s is None:
        return usd
    working_s = offer.expected_life_s - offer.boot_s
    return usd * offer.expected_life_s / working_s if working_s > 0 else None


def _better(offer: Offer, others: Iterable[Offer]) -> list[Offer]:
    """Offers whose work is cheaper, or as cheap and longer lived."""

    def rank(candidate: Offer) -> tuple[float, float, str] | None:
        usd = working_usd_per_hour(candidate)
        life_s = float("inf") if candidate.expected_life_s is None else candidate.expected_life_s
        return None if usd is None else (usd / candidate.workers_per_lease, -life_s, candidate.provider)

    own = rank(offer)
    ranked = [(rank(other), other) for other in others]
    return [other for key, other in ranked if key is not None and own is not None and key < own]


def _held(market: MarketView) -> tuple[int, float]:
    """Devices that roll out, the trainer's among them, and what all of it costs an hour."""
    workers, usd = 0, 0.0
    for offer in market.offers.values():
        held = market.held(offer.provider) * offer.workers_per_lease
        workers += held
        usd += held * offer.gpus_per_worker * offer.usd_per_gpu_hour
    return workers, usd
