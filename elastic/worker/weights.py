"""Completes the orchestrator's weights source with the machine's own cache (`ELASTIC_SITE`)."""

import os

from elastic.protocol import wire
from elastic.weights.source import RelaySource

SITE_VARIABLE, SITE_TOKEN_VARIABLE = "ELASTIC_SITE", "ELASTIC_SITE_TOKEN"
"""A relay (directory or URL) that all workers of a site reach fast, where one copy of the weights crosses to them."""


def source_of(welcome: wire.Welcome, order: wire.PullWeights) -> RelaySource:
    return RelaySource(
        run=welcome.run,
        version=order.version,
        relay=welcome.relay,
        relay_token=welcome.relay_token,
        relay_anchor=welcome.relay_anchor,
        publisher=order.publisher,
        cache=os.environ.get(SITE_VARIABLE, ""),
        cache_token=os.environ.get(SITE_TOKEN_VARIABLE, ""),
    )
