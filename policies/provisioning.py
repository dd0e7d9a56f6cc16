"""How much capacity to ask a provider for."""

from elastic.core.types import Offer


class TakeWhatIsOffered:
    """Lease all that a provider offers; its settings bound how much that is."""

    def leases_wanted(self, offer: Offer, held: int) -> int:
        return max(0, offer.available)
