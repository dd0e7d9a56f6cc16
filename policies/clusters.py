"""Whole clusters' policies by name: a placement with the other decisions that go with it."""

from collections.abc import Mapping

from elastic.core.cluster.policy import ClusterPolicies
from policies.charging import IdleAsAlone
from policies.drift import NoDrift, SloAtStake
from policies.placement import PLACEMENTS
from policies.tails import LongTail, NoTails

TAILS = {"weave": LongTail(), "ours": LongTail(done_share=0.9), "ours_without_moves": LongTail(done_share=0.9)}
"""Later than printed: moved earlier, the long contexts of turns cost more to prefill than the next job gains
(`benchmarks/multiplexing.py`)."""

CLUSTER_POLICIES: Mapping[str, ClusterPolicies] = {
    name: ClusterPolicies(
        placement=placement,
        tail=TAILS.get(name, NoTails()),
        drift=SloAtStake() if name in ("weave", "ours", "ours_without_moves") else NoDrift(),
        charging=IdleAsAlone(),
    )
    for name, placement in PLACEMENTS.items()
}
