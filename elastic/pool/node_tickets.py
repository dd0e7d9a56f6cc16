"""The tickets by which machines join a pool as nodes: minted, told, and void once their nodes are drained."""

import math
from collections.abc import Collection, Mapping

import msgspec

from elastic.core.cluster.types import KindName, NodeId
from elastic.core.types import NS_PER_S
from elastic.pool.gateway import PoolTokens
from elastic.pool.journal import PoolJournal
from elastic.pool.machines import JoinRules, JoinTerms, NodeBeside, NodeTicket, free_names, kind_of_node
from elastic.protocol.endpoint import Endpoint
from elastic.system.host import here


class NodeTickets:
    """The tickets of a pool that is called so and listens there, for the kinds of nodes whose machines `join`.
    Of kinds that are `asked` of a cluster, only the pool mints tickets."""

    def __init__(
        self,
        journal: PoolJournal,
        tokens: PoolTokens,
        pool: str,
        endpoint: Endpoint,
        joins: Mapping[KindName, JoinRules],
        *,
        asked: Collection[KindName] = (),
    ) -> None:
        self._journal, self._tokens = journal, tokens
        self._pool, self._endpoint, self._joins, self._asked = pool, endpoint, joins, asked

    def mint(
        self, label: str, valid_s: float, there: Collection[NodeId], kind: KindName = "", count: int = 1
    ) -> NodeTicket:
        """Return a new ticket, which nobody can be told again, for `count` nodes of this kind, or of the only one that
        may join, on one machine. `there`: the nodes that the pool has.

        Raises `ValueError` where no machine may join, or not as so many nodes.
        """
        by_ticket = {name: rules for name, rules in self._joins.items() if name not in self._asked}
        if not by_ticket:
            found = "'ray', whose nodes Ray starts" if self._asked else "'local', whose nodes are on the pool's machine"
            raise ValueError(f"pool.rollout.kind: found {found}; allowed for tickets: 'joined'")
        if not kind and len(by_ticket) == 1:
            (kind,) = by_ticket
        if kind not in by_ticket:
            raise ValueError(f"a ticket's kind of node: found {kind!r}; allowed: {', '.join(by_ticket)}")
        terms, now_s = self._journal.joined(), _now_s()
        taken = {name for name, its in terms.items() if self._is_taken(name, its, now_s)}
        names = free_names(kind, by_ticket[kind].kind.nodes, taken | {*there}, count)
        first, *others = (self._minted(node, JoinTerms(label, now_s + valid_s))[0] for node in names)
        beside = tuple(NodeBeside(other.node, other.token) for other in others)
        return msgspec.structs.replace(first, beside=beside)

    def renew(self, node: NodeId, label: str) -> tuple[NodeTicket, int]:
        """Return a new ticket for a node that is asked of a cluster, and its number. It is good until there is another
        one, or the node is drained."""
        return self._minted(node, JoinTerms(label, math.inf))

    def _minted(self, node: NodeId, terms: JoinTerms) -> tuple[NodeTicket, int]:
        number, rules = self._journal.mint_ticket(node, terms), self._joins[kind_of_node(node)]
        ticket = NodeTicket(
            pool=self._pool,
            node=node,
            join=self._endpoint.address,
            fingerprint=self._endpoint.fingerprint,
            token=self._tokens.ticket(node, number),
            gpus=rules.kind.gpus,
            devices=rules.devices,
            site=rules.kind.site,
        )
        return ticket, number

    def numbers(self) -> Mapping[NodeId, int]:
        """Return the numbers of the last tickets."""
        return {node: self._journal.ticket(node)[0] for node in self._journal.joined()}

    def drained(self) -> Collection[NodeId]:
        """Return the nodes whose tickets are void."""
        return [node for node, terms in self._journal.joined().items() if terms.drained]

    def want_again(self, node: NodeId) -> bool:
        """Have a node that was drained be asked for again; returns whether it is one."""
        terms = self._journal.joined().get(node)
        if kind_of_node(node) not in self._asked or terms is None or not terms.drained:
            return False
        self._journal.change_terms(node, msgspec.structs.replace(terms, drained=False))
        return True

    def _is_taken(self, node: NodeId, terms: JoinTerms, now_s: float) -> bool:
        _, spent = self._journal.ticket(node)
        return not terms.drained and (spent or now_s < terms.expires_s)

    def void(self, node: NodeId) -> None:
        """Have a node's ticket and session count no more once the pool has not got the node.

        Raises `ValueError` for a node that does not join by ticket.
        """
        terms = self._journal.joined()
        if node not in terms or terms[node].drained:
            there = ", ".join(name for name, one in terms.items() if not one.drained) or "none"
            raise ValueError(f"node {node!r} is no node of another machine; those are: {there}")
        self._journal.change_terms(node, msgspec.structs.replace(terms[node], drained=True))


def _now_s() -> float:
    return here().unix_ns() / NS_PER_S
