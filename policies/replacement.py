"""When to ask for the lease that takes over from one that ends by time."""

import msgspec

from elastic.core.types import NS_PER_S, Nanoseconds, Offer


class EarlyReplacement(msgspec.Struct, frozen=True):
    """Asks for a replacement so early that it is ready when the turns must move, so that they move without a gap.

    `margin` times what booting and loading have taken with this provider; what it declares, before that is known.
    """

    margin: float = 1.5

    def lead_ns(self, offer: Offer, ready_ns: Nanoseconds | None) -> Nanoseconds:
        declared_ns = round(offer.boot_s * NS_PER_S)
        return round(self.margin * max(declared_ns, ready_ns or 0))
