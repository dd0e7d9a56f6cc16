"""The tickets by which machines join a pool as nodes: minted, told, and void once their nodes are drained."""

import math
from collections.abc import Collection, Mapping

import msgspec

from elastic.core.cluster.types import NodeId
from elastic.core.types import NS_PER_S
from elastic.pool.gateway import PoolTokens
from elastic.pool.journal import PoolJournal
from elastic.pool.machines import JoinTerms, NodeTicket, free_name
from elastic.protocol.endpoint import Endpoint
from elastic.system.host import here


class NodeTickets:
    """A pool's tickets. `blank` is a ticket without node and token, None if no machine joins the pool by ticket; there
    are at most so many `nodes`. If those are `asked` of a cluster, only the pool mints their tickets."""

    def __init__(
        self, journal: PoolJournal, tokens: PoolTokens, blank: NodeTicket | None, nodes: int, *, asked: bool = False
    ) -> None:
        self._journal, self._tokens, self._blank, self._nodes, self._asked = journal, tokens, blank, nodes, asked

    def mint(self, label: str, valid_s: float, there: Collection[NodeId]) -> NodeTicket:
        """Return a new ticket, which nobody can be told again. `there`: the nodes that the pool has.

        Raises `ValueError` where no machine may join.
        """
        if self._blank is None or self._asked:
            found = "'ray', whose nodes Ray starts" if self._asked else "'local', whose nodes are on the pool's machine"
            raise ValueError(f"pool.rollout.kind: found {found}; allowed for tickets: 'joined'")
        terms, now_s = self._journal.joined(), _now_s()
        taken = {name for name, its in terms.items() if self._is_taken(name, its, now_s)}
        node = free_name(self._nodes, taken | {*there})
        return self._minted(self._blank, node, JoinTerms(label, now_s + valid_s))[0]

    def renew(self, node: NodeId, label: str) -> tuple[NodeTicket, int]:
        """Return a new ticket for a node that is asked of a cluster, and its number. It is good until there is another
        one, or the node is drained."""
        assert self._blank is not None
        return self._minted(self._blank, node, JoinTerms(label, math.inf))

    def _minted(self, blank: NodeTicket, node: NodeId, terms: JoinTerms) -> tuple[NodeTicket, int]:
        number = self._journal.mint_ticket(node, terms)
        return msgspec.structs.replace(blank, node=node, token=self._tokens.ticket(node, number)), number

    def numbers(self) -> Mapping[NodeId, int]:
        """Return the numbers of the last tickets."""
        return {node: self._journal.ticket(node)[0] for node in self._journal.joined()}

    def drained(self) -> Collection[NodeId]:
        """Return the nodes whose tickets are void."""
        return [node for node, terms in self._journal.joined().items() if terms.drained]

    def want_again(self, node: NodeId) -> bool:
        """Have a node that was drained be asked for again; returns whether it is one."""
        terms = self._journal.joined().get(node)
        if not self._asked or terms is None or not terms.drained:
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


def blank_ticket(pool: str, endpoint: Endpoint, gpus: int, devices: str) -> NodeTicket:
    """Return what all tickets of a pool have in common."""
    address, fingerprint = endpoint.address, endpoint.fingerprint
    return NodeTicket(pool=pool, node="", join=address, fingerprint=fingerprint, token="", gpus=gpus, devices=devices)


def _now_s() -> float:
    return here().unix_ns() / NS_PER_S
