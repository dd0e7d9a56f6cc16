"""Completes the orchestrator's weights source with a relay of the machine's site.

That is the one of `ELASTIC_SITE`, or else the one that a pool's node agent names in a file, from pull to pull.
"""

import os
from pathlib import Path

import msgspec

from elastic.pool.messages import SITE_FILE_VARIABLE, SiteRelay
from elastic.protocol import wire
from elastic.weights.source import RelaySource

SITE_VARIABLE, SITE_TOKEN_VARIABLE = "ELASTIC_SITE", "ELASTIC_SITE_TOKEN"
"""A relay (directory or URL) that all workers of a site reach fast, where one copy of the weights crosses to them."""


def source_of(welcome: wire.Welcome, order: wire.PullWeights) -> RelaySource:
    site = _site()
    return RelaySource(
        run=welcome.run,
        version=order.version,
        relay=welcome.relay,
        relay_token=welcome.relay_token,
        relay_anchor=welcome.relay_anchor,
        publisher=order.publisher,
        cache=site.place,
        cache_token=site.token,
        cache_anchor=site.anchor,
    )


def _site() -> SiteRelay:
    """Return the relay that workers here use; without a place if there is none."""
    if place := os.environ.get(SITE_VARIABLE, ""):
        return SiteRelay(place, os.environ.get(SITE_TOKEN_VARIABLE, ""))
    file = os.environ.get(SITE_FILE_VARIABLE, "")
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=SiteRelay) if file else SiteRelay("")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return SiteRelay("")
