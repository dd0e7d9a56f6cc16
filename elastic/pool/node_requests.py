"""Which nodes a pool asks of a cluster that has machines to give, such as Ray's, and which it gives back. Pure.

A request is for one node. It waits as long as the cluster has no room, which is what tells the cluster's autoscaler to
add a machine; then the node's agent is started there with the request's ticket, and joins the pool. A request whose
node agent has ended, or whose machine is lost, is given back, and another one takes its place.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from elastic.core.cluster.types import Nanoseconds, NodeId
from elastic.core.types import NS_PER_S
from elastic.pool.machines import NodeTicket
from elastic.system.outages import Outage


class NodeRequest(msgspec.Struct, frozen=True):
    """A request as the cluster tells of it. `number` is that of its ticket. `waits`: for what, until it has a machine.
    `ended`: why it is of no use any more."""

    node: NodeId
    number: int
    waits: str = ""
    ended: str = ""


class AskNode(msgspec.Struct, frozen=True):
    """Ask for this node, with a new ticket."""

    node: NodeId


class GiveNodeBack(msgspec.Struct, frozen=True):
    """End what there is of a request, and leave its resources to the cluster."""

    request: NodeRequest


class LoseNode(msgspec.Struct, frozen=True):
    """The node, if there is one, is gone with its machine or its node agent."""

    node: NodeId
    how: str


NodeRequestCommand: TypeAlias = AskNode | GiveNodeBack | LoseNode


class NodeClusterSilent(Outage):
    """The cluster cannot be asked now. The message names it, and says what may help."""


class NodeCluster(Protocol):
    """A cluster that has machines to give. All but `name` and `look_s` raise `NodeClusterSilent`."""

    @property
    def name(self) -> str:
        """Which cluster it is, in words."""
        ...

    @property
    def look_s(self) -> float:
        """How long to wait between two looks."""
        ...

    async def look(self) -> Sequence[NodeRequest]:
        """Return all requests of this pool that the cluster knows, whichever process has made them."""
        ...

    async def ask(self, ticket: NodeTicket, number: int) -> None:
        """Ask for the ticket's node. Returns as soon as the cluster has the request."""
        ...

    async def give_back(self, request: NodeRequest) -> None:
        """Return once the cluster knows the request no more."""
        ...

    async def aclose(self) -> None:
        """Leave the cluster. Requests stay."""
        ...


class PoolNodesSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool knows of the nodes that it may ask for: the `tickets` that count, by number; which it has
    (`there`), which of those are heard (`up`), and which were `drained` and are not to come again."""

    tickets: Mapping[NodeId, int]
    there: Collection[NodeId] = ()
    up: Collection[NodeId] = ()
    drained: Collection[NodeId] = ()


class NodeRequests:
    """The requests of a pool for these nodes. `retry_ns` says how long to wait after so many failures in a row."""

    def __init__(self, nodes: Iterable[NodeId], retry_ns: Callable[[int], Nanoseconds]) -> None:
        self.nodes = tuple(nodes)
        self._retry_ns = retry_ns
        self._failures = Counter[NodeId]()
        self._due_ns: dict[NodeId, Nanoseconds] = {}
        self._last: dict[NodeId, str] = {}
        """Why the last request for a node has ended."""
        self._living: dict[NodeId, NodeRequest] = {}

    def decide(
        self, found: Iterable[NodeRequest], pool: PoolNodesSeen, now_ns: Nanoseconds, *, asks: bool = True
    ) -> Sequence[NodeRequestCommand]:
        """Return what is to be done, in this order, now that the cluster has told all requests that it knows.

        Call it with all that was `found` after the last commands were carried out, or have failed. Without `asks` the
        pool wants no further node.
        """
        for node in pool.up:
            self._failures.pop(node, None)
        commands: list[NodeRequestCommand] = []
        self._living = {}
        wanted = {node for node in self.nodes if node not in pool.drained or node in pool.there}
        for request in found:
            node = request.node
            if node in wanted and request.number == pool.tickets.get(node):
                if not request.ended:
                    self._living[node] = request
                    continue
                commands.append(self._lost(node, request.ended, now_ns))
            commands.append(GiveNodeBack(request))
        lost = {command.node for command in commands if isinstance(command, LoseNode)}
        gone = [node for node in pool.there if node in wanted and node not in self._living and node not in lost]
        commands += [self._lost(node, "the cluster knows no request for it any more", now_ns) for node in gone]
        commands += [AskNode(node) for node in self.nodes if asks and self._is_due(node, pool, now_ns)]
        return commands

    def _is_due(self, node: NodeId, pool: PoolNodesSeen, now_ns: Nanoseconds) -> bool:
        return node not in self._living and node not in pool.drained and self._due_ns.get(node, 0) <= now_ns

    def _lost(self, node: NodeId, how: str, now_ns: Nanoseconds) -> LoseNode:
        failures = self._failures[node]
        self._failures[node] += 1
        self._due_ns[node] = now_ns + (self._retry_ns(failures) if failures else 0)
        self._last[node] = how
        return LoseNode(node, how)

    def told(self, pool: PoolNodesSeen, now_ns: Nanoseconds) -> dict[NodeId, str]:
        """Return of each node that is asked for and is not up what is known of it."""
        return {
            node: self._told_of(node, now_ns) for node in self.nodes if node not in pool.up and node not in pool.drained
        }

    def _told_of(self, node: NodeId, now_ns: Nanoseconds) -> str:
        request, last = self._living.get(node), self._last.get(node, "")
        since = f"; the last one: {last}" if last else ""
        if request is not None:
            return f"{f'it waits for {request.waits}' if request.waits else 'its node agent starts'}{since}"
        left_s = max(0, self._due_ns.get(node, 0) - now_ns) / NS_PER_S
        return f"it is asked for {f'in {left_s:.0f} s' if left_s else 'now'}{since}"
