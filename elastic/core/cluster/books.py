"""Where every node's time went, and who pays for it.

Each nanosecond of a node is in one account. A group's cost since its membership last changed is divided among its
members by the charging policy; what they do not owe, and nodes of no group, is the pool's own. All sums are whole
numbers, in nano-dollars times nanoseconds per hour, so that bills add up exactly.
"""

from collections import deque
from collections.abc import Mapping

from elastic.core.cluster.policy import BillShare, ChargingPolicy
from elastic.core.cluster.state import ClusterState, NodeRecord
from elastic.core.cluster.types import (
    DeviceAccount,
    GroupName,
    JobId,
    Nanoseconds,
    NodeId,
    NodeTurn,
    PoolSpec,
)

TURNS_KEPT = 1000


class Books:
    def __init__(self, state: ClusterState, spec: PoolSpec, charging: ChargingPolicy) -> None:
        self._state = state
        self._kinds = spec.kinds
        self._price = {name: kind.nano_usd_per_hour for name, kind in spec.kinds.items()}
        self._charging = charging
        self.turns = deque[NodeTurn](maxlen=TURNS_KEPT)
        """The last turns that are over, of those that began here: they are no part of the state."""
        self._since_ns: dict[NodeId, Nanoseconds] = {}

    def settle(self, node: NodeRecord) -> None:
        """Bring the node's account up to now."""
        now_ns = self._state.now_ns
        passed_ns = now_ns - node.settled_ns
        if passed_ns > 0:
            node.charge(node.account, passed_ns)
            node.settled_ns = now_ns
            if node.user is not None:
                node.used_ns[node.user] = node.used_ns.get(node.user, 0) + passed_ns

    def turn_to(self, node: NodeRecord, account: DeviceAccount, user: JobId | None = None) -> None:
        """Charge the node's time from now on to another account."""
        self.settle(node)
        since_ns, now_ns = self._since_ns.pop(node.id, None), self._state.now_ns
        if since_ns is not None and node.user is not None:
            self.turns.append(NodeTurn(node.id, node.user, since_ns, now_ns))
        if user is not None:
            self._since_ns[node.id] = now_ns
        node.account, node.user = account, user

    def charge_instead(self, node: NodeRecord, account: DeviceAccount, length_ns: Nanoseconds) -> None:
        """Charge so much of the node's slices, at most all, to another account."""
        moved_ns = min(length_ns, node.accounts_ns.get(DeviceAccount.SLICE, 0))
        if moved_ns > 0:
            node.charge(DeviceAccount.SLICE, -moved_ns)
            node.charge(account, moved_ns)

    def bill(self, name: GroupName) -> None:
        """Divide a group's cost since its last bill. The group's members and nodes must not have changed since then."""
        state = self._state
        group, now_ns = state.groups[name], state.now_ns
        if now_ns > state.billed_ns[name]:
            for node in (*group.rollout, *group.train):
                self.settle(state.nodes[node])
            bills, cost = self.owed(name, now_ns)
            for node in (*group.rollout, *group.train):
                state.nodes[node].used_ns = {}
            for job, owed in bills.items():
                state.jobs[job].billed += owed
            state.pool_billed += cost - sum(bills.values())
        state.billed_ns[name] = now_ns

    def owed(self, name: GroupName, now_ns: Nanoseconds) -> tuple[Mapping[JobId, int], int]:
        """Return what each member owes of the group's cost since its last bill, and that cost. Settles nothing."""
        state = self._state
        group, since_ns = state.groups[name], state.billed_ns[name]
        cost, used = 0, dict.fromkeys(group.members, 0)
        for node_id in (*group.rollout, *group.train):
            node = state.nodes[node_id]
            price = self._price[node.kind]
            cost += price * (now_ns - since_ns)
            for job, used_ns in node.used_ns.items():
                if job in used:
                    used[job] += price * used_ns
            if node.user in used:
                used[node.user] += price * (now_ns - node.settled_ns)
        alone = {job: self.price_alone(name, job) * (now_ns - since_ns) for job in used}
        shares = [BillShare(job=job, used=used[job], alone=alone[job]) for job in used]
        return self._charging.bills(shares, cost), cost

    def price_alone(self, name: GroupName, job: JobId) -> int:
        """Return the price of an hour of the rollout nodes that a member has, and of as many training nodes as it asks
        for, of the group's kind, if they were its own."""
        group, price = self._state.groups[name], self._node_price
        rollout = sum(map(price, group.members[job].nodes))
        train = self._kinds[self._state.nodes[group.train[0]].kind]
        return rollout + self._state.jobs[job].request.train_nodes_of(train) * price(group.train[0])

    def _node_price(self, node: NodeId) -> int:
        return self._price[self._state.nodes[node].kind]

    def own(self, node: NodeRecord) -> None:
        """Charge a node's time outside of any group, which ends now, to the pool."""
        self.settle(node)
        passed_ns = self._state.now_ns - node.own_since_ns
        node.own_ns += passed_ns
        self._state.pool_billed += self._price[node.kind] * passed_ns

    def paid(self, now_ns: Nanoseconds) -> int:
        """Return what the pool has paid for all nodes until now, in nano-dollars times nanoseconds per hour."""
        nodes = self._state.nodes.values()
        return self._state.lost_cost + sum(self._price[node.kind] * (now_ns - node.opened_ns) for node in nodes)

    def lost(self, node: NodeRecord) -> None:
        self._since_ns.pop(node.id, None)
        self._state.lost_cost += self._price[node.kind] * (self._state.now_ns - node.opened_ns)
