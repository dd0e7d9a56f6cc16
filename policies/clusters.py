"""Whole clusters' policies by name: a placement with the other decisions that go with it."""

from collections.abc import Mapping
from typing import Any

from elastic.core.cluster.policy import ClusterPolicies
from policies.charging import IdleAsAlone
from policies.drift import NoDrift, SloAtStake
from policies.placement import PLACEMENTS
from policies.tails import LongTail, NoTails

TAILS: Mapping[str, Mapping[str, Any]] = {
    "weave": {},
    "ours": {"done_share": 0.9},
    "ours_without_moves": {"done_share": 0.9},
}
"""The placements whose rollouts' tails move, with the settings of `LongTail`. Later than printed: moved earlier, the
long contexts of turns cost more to prefill than the next job gains (`benchmarks/multiplexing.py`)."""
PLACED_ANEW = frozenset(TAILS)
"""The placements whose jobs are placed anew as they drift."""

CLUSTER_POLICIES: Mapping[str, ClusterPolicies] = {
    name: ClusterPolicies(
        placement=placement,
        tail=LongTail(**TAILS[name]) if name in TAILS else NoTails(),
        drift=SloAtStake() if name in PLACED_ANEW else NoDrift(),
        charging=IdleAsAlone(),
    )
    for name, placement in PLACEMENTS.items()
}
