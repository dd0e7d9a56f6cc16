"""When the last responses of a rollout move together, so that the next job may begin."""

from dataclasses import dataclass

from elastic.core.cluster.policy import SliceView
from elastic.core.cluster.types import NodeId


@dataclass(frozen=True, slots=True)
class NoTails:
    """A rollout keeps its nodes until its last response is done."""

    def keeps(self, rollout: SliceView) -> tuple[NodeId, ...] | None:
        return None


@dataclass(frozen=True, slots=True)
class LongTail:
    """Once a share of the responses is done, the rest moves to the fewest nodes that hold it without slowing it, first
    to those for which the next job does not wait.

    The tail moves if a waiting job gains more than the tail loses. A freed node that it waits for is worth its share of
    the waiting job's planned rollout, as far as it shortens the group's cycle. A move costs one more prefill of the
    tail, taken to be `cost_share` of the planned rollout. Source: Weave §4.3, whose threshold is 80 %.
    """

    done_share: float = 0.8
    cost_share: float = 0.1

    def keeps(self, rollout: SliceView) -> tuple[NodeId, ...] | None:
        if not rollout.waiting_ns or rollout.of <= 0 or rollout.done < self.done_share * rollout.of:
            return None
        nodes = len(rollout.nodes)
        left = rollout.of - rollout.done
        first = sorted(rollout.nodes, key=rollout.wanted.__contains__)[: max(1, -(-left * nodes // rollout.of))]
        freed = sum(node not in first for node in rollout.wanted)
        gained_ns = min(rollout.waiting_ns * freed // rollout.waiting_nodes, rollout.shortens_ns)
        if gained_ns <= self.cost_share * rollout.planned_ns:
            return None
        return tuple(node for node in rollout.nodes if node in first)
