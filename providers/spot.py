"""A spot market: instances come and go as in a recorded trace, with a real process on each that is leased.

An *add* of the trace makes an instance available. A lease takes the one that has been available longest; the
lease is granted, and billed, at once, and its worker starts `boot_delay_s` later. A *remove* of a leased
instance gives notice of `notice_s`, where that is more than 0, and then kills the worker. Given back before
that, an instance is available again. When the trace ends without `repeat`, the market stays as it is then.
The market goes by the run's time, so it has gone on when the run does after a crash.
"""

from typing import ClassVar

from providers.markets import SpotMarket, SpotSettings
from providers.processes import LocalProvider


class SpotProvider(LocalProvider):
    """Leases one instance each. `expected_life_s` is the mean life that the trace has shown so far."""

    Settings: ClassVar[type[SpotSettings]] = SpotSettings
    market_type = SpotMarket
