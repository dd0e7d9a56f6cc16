"""Serverless GPU functions: each lease is one call of a function, which ends by timeout whatever happens.

A call starts cold: its lease is granted, and billed, at once, and its worker starts `cold_start_s` later. `lease_s`
after the grant its processes are killed, unless it was given back before. Calls beyond `max_workers` are to be had
only in place of ones that end soon, `overlap` of them, so that a replacement can be warm by then. Source: RollArt,
mechanism 3; docs/design.md, "A lease".
"""

from typing import ClassVar

from providers.markets import ServerlessMarket, ServerlessSettings
from providers.processes import LocalProvider


class ServerlessProvider(LocalProvider):
    """Leases one worker each, of which none outlives `lease_s`."""

    Settings: ClassVar[type[ServerlessSettings]] = ServerlessSettings
    market_type = ServerlessMarket
