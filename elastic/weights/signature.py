"""Whose versions are on a relay: of which run, and since which start of its trainer.

A trainer that is resumed publishes versions again under their old numbers, so a copy of them that somebody else keeps
is of use only as long as the signature is the same.
"""

import uuid
from collections.abc import Iterable

import xxhash

from elastic.weights.relay import Relay

_PREFIX = "versions/publisher-"
"""It is seen by whoever lists the versions."""


def sign(relay: Relay, run: str) -> None:
    """Everything that is published from now on is by another publisher of `run` than what was before."""
    for key in relay.list_keys(_PREFIX):
        relay.delete(key)
    relay.put(f"{_PREFIX}{xxhash.xxh3_64_hexdigest(run.encode())}-{uuid.uuid4().hex}")


def signature_of(keys: Iterable[str]) -> tuple[str, str] | None:
    """Run and publisher, as segments of keys, of the versions that were listed; None where nobody signed them."""
    for key in keys:
        if key.startswith(_PREFIX):
            run, _, publisher = key.removeprefix(_PREFIX).partition("-")
            return run, publisher
    return None
