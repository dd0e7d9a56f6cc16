"""Whole clusters' policies by name: a placement with the other decisions that go with it."""

from collections.abc import Mapping

from elastic.cluster.policy import ClusterPolicies
from policies.charging import IdleAsAlone
from policies.drift import NoDrift, SloAtStake
from policies.placement import PLACEMENTS
from policies.tails import LongTail, NoTails

CLUSTER_POLICIES: Mapping[str, ClusterPolicies] = {
    name: ClusterPolicies(
        placement=placement,
        tail=LongTail() if name in ("weave", "ours", "ours_without_moves") else NoTails(),
        drift=SloAtStake() if name in ("weave", "ours", "ours_without_moves") else NoDrift(),
        charging=IdleAsAlone(),
    )
    for name, placement in PLACEMENTS.items()
}
