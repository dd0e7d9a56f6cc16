"""The key of the tests' trainer, who believes it, and what they ask of pullers."""

from typing import Any

from torch import Tensor

from elastic.weights.peer_cache import PeerCacheRelay
from elastic.weights.puller import Puller
from elastic.weights.relay import Relay
from elastic.weights.resident import StagedVersion
from elastic.weights.signing import SigningKey, Trust

KEY = SigningKey()
TRUST = KEY.trust("run")


def pull(relay: Relay, trust: Trust, version: int, timeout_s: float = 30.0, **options: Any) -> dict[str, Tensor]:
    """From a keyframe on, holding nothing before."""
    return Puller(relay, trust, **options).pull(version, timeout_s)


def put_in_force(puller: Puller, version: int, *args: Any, **options: Any) -> StagedVersion:
    """As `Puller.pull`; which way it took, and what."""
    staged = puller.stage(version, *args, **options)
    puller.apply(staged)
    return staged


def sharing(cache: PeerCacheRelay, trust: Trust = TRUST) -> Puller:
    """A puller that reads by way of a site."""
    return Puller(cache, trust, another_copy=cache.refuse)
