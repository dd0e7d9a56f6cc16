"""Which relay the nodes of a site share, so that of each version of weights one copy crosses to the site. Pure.

Nodes on other machines than the pool's are of the site that their machine names. Where a site has several, one of them
has a relay in its machine's memory, which workers of all of them use: on that machine as a directory, elsewhere by
HTTPS. If that relay fails, workers read from the trainer's relay alone.
Source: Weave §5.2.
"""

from collections.abc import Iterator, Mapping

import msgspec

from elastic.core.cluster.types import NodeId
from elastic.pool import messages as w


class SiteNode(msgspec.Struct, kw_only=True):
    """A node, and what it was told of its site's relay since it dialled last. `served` is its own answer."""

    machine: w.NodeMachine
    asked: w.ServeSite | None = None
    served: w.SiteServed | None = None
    told: w.UseSite = w.UseSite(None)

    def serves(self, *, beyond: bool) -> bool:
        its = self.served
        return its is not None and its.near is not None and (its.far is not None or not beyond)


def site_orders(nodes: Mapping[NodeId, SiteNode]) -> Iterator[tuple[NodeId, w.ServeSite | w.UseSite]]:
    """Return what nodes are to be told now.

    A node whose machine names a relay of its own (`NodeMachine.relay`) is told nothing. A node that could not start a
    relay is not asked again.
    """
    sites: dict[str, dict[NodeId, SiteNode]] = {}
    for name, node in sorted(nodes.items()):
        if not node.machine.relay:
            sites.setdefault(node.machine.site, {})[name] = node
    for members in sites.values():
        yield from _of_site(members)


def _of_site(members: Mapping[NodeId, SiteNode]) -> Iterator[tuple[NodeId, w.ServeSite | w.UseSite]]:
    beyond = len({_machine(node) for node in members.values()}) > 1
    able = [name for name, node in members.items() if node.served is None or node.served.near is not None]
    if len(members) < 2 or not able:
        for name, node in members.items():
            if node.told.relay is not None:
                yield name, w.UseSite(None)
        return
    server = max(able, key=lambda name: (members[name].serves(beyond=beyond), members[name].serves(beyond=False)))
    its = members[server]
    if not its.serves(beyond=beyond) or its.served is None:
        if its.asked != w.ServeSite(beyond):
            yield server, w.ServeSite(beyond)
        return
    for name, node in members.items():
        use = w.UseSite(its.served.near if _machine(node) == _machine(its) else its.served.far)
        if node.told != use:
            yield name, use


def _machine(node: SiteNode) -> tuple[str, str]:
    """Containers of one machine have files of their own, and names."""
    return node.machine.boot, node.machine.host
