"""Keeps a pool's requests for nodes as they are to be: looks at the cluster, and carries out what follows."""

import asyncio
from collections.abc import Mapping

import structlog

from elastic.core.cluster.types import NodeId
from elastic.pool.node_requests import (
    AskNode,
    GiveNodeBack,
    LoseNode,
    NodeCluster,
    NodeClusterSilent,
    NodeRequestCommand,
    NodeRequests,
    PoolNodesSeen,
)
from elastic.pool.node_tickets import NodeTickets
from elastic.pool.shell import PoolShell
from elastic.system.isolation import IsolatedLoop

log = structlog.get_logger(__name__)


class NodeSupply:
    """The nodes that a pool asks of a `cluster`. While that does not answer, nodes go on, and none is asked for.

    `faults` counts what nobody expected; one look at a time fails by it.
    """

    def __init__(
        self, cluster: NodeCluster, requests: NodeRequests, shell: PoolShell, tickets: NodeTickets, faults: IsolatedLoop
    ) -> None:
        self._cluster, self._requests, self._shell, self._tickets = cluster, requests, shell, tickets
        self._isolated = faults
        self._silent = ""
        """What the cluster's last silence was, as long as it lasts."""

    def told(self) -> Mapping[NodeId, str]:
        """Return of each node that is asked for and is not up what is known of it."""
        found = self._requests.told(self._seen(), self._shell.now_ns())
        return {node: f"{words}; {self._silent}" if self._silent else words for node, words in found.items()}

    async def run(self) -> None:
        """Look and act until cancelled."""
        await self._isolated.repeat(self._look, self._cluster.look_s)

    async def _look(self) -> None:
        try:
            await self._act(asks=not self._shell.stopping)
        except NodeClusterSilent as error:
            if not self._silent:
                log.warning("nodes go on, and none is asked for", cluster=self._cluster.name, cause=str(error))
            self._silent = str(error)
        else:
            if self._silent:
                log.info("the cluster answers again", cluster=self._cluster.name)
            self._silent = ""

    async def _act(self, *, asks: bool) -> None:
        found = await self._cluster.look()
        for command in self._requests.decide(found, self._seen(), self._shell.now_ns(), asks=asks):
            await self._carry_out(command)

    async def _carry_out(self, command: NodeRequestCommand) -> None:
        match command:
            case AskNode(node=node):
                ticket, number = self._tickets.renew(node, self._cluster.name)
                log.info("a node is asked for", node=node, cluster=self._cluster.name)
                await self._cluster.ask(ticket, number)
            case LoseNode(node=node, how=how):
                log.warning("a node that was asked for is lost", node=node, cause=how)
                self._shell.requested_node_lost(node, how)
            case GiveNodeBack(request=request):
                log.info("a node is given back", node=request.node, cluster=self._cluster.name)
                await self._cluster.give_back(request)

    def _seen(self) -> PoolNodesSeen:
        nodes = {name: node for name, node in self._shell.nodes.items() if name in self._requests.nodes}
        return PoolNodesSeen(
            tickets=self._tickets.numbers(),
            there=tuple(nodes),
            up=tuple(name for name, node in nodes.items() if node.connected),
            drained=self._tickets.drained(),
        )

    async def give_all_back(self, within_s: float) -> None:
        """Give every request back, once the pool has been stopped, or say what may be left."""
        try:
            async with asyncio.timeout(within_s):
                for request in await self._cluster.look():
                    await self._cluster.give_back(request)
        except (NodeClusterSilent, TimeoutError) as error:
            log.error(
                "what the pool had may be left there until it is started and stopped again",
                cluster=self._cluster.name,
                cause=str(error) or f"it took longer than {within_s:g} s",
            )
