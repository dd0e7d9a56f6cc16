"""When the last responses of a rollout move together, so that the next job may begin."""

from dataclasses import dataclass

from elastic.cluster.policy import SliceView
from elastic.cluster.types import NodeId


@dataclass(frozen=True, slots=True)
class NoTails:
    """A rollout keeps its nodes until its last response is done."""

    def keeps(self, rollout: SliceView) -> tuple[NodeId, ...] | None:
        return None


@dataclass(frozen=True, slots=True)
class LongTail:
    """Once so much of the responses is done, the rest moves to the fewest nodes that hold it without slowing it.

    It moves where somebody waits, and where a node that is given up is worth more to them (its share of their planned
    rollout) than to the tail. Source: Weave §4.3, whose threshold is 80 %.
    """

    done_share: float = 0.8

    def keeps(self, rollout: SliceView) -> tuple[NodeId, ...] | None:
        if not rollout.waiting_ns or rollout.of <= 0 or rollout.done < self.done_share * rollout.of:
            return None
        nodes = len(rollout.nodes)
        left = rollout.of - rollout.done
        kept = max(1, -(-left * nodes // rollout.of))
        gained_ns = rollout.waiting_ns * (nodes - kept) // nodes
        if gained_ns <= 0:
            return None
        return rollout.nodes[:kept]
