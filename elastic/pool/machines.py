"""Nodes on other machines: which machines may join a pool as one, and under which tickets. Pure.

A ticket is for one node, whose name it has. Who has spent it comes back by the session that it was given.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from elastic.core.cluster.types import KindName, NodeId, NodeKind
from elastic.pool import messages as w
from elastic.protocol.tickets import TicketRefused
from elastic.system.devices import DeviceName, kind_of

_PlainName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Of a pool or a node: a part of a directory's name."""
SITE = r"^([A-Za-z0-9][A-Za-z0-9._/:-]{0,63})?$"
"""What sites are called."""


def check_site(site: str) -> str:
    """Return the name of a site. Raises `ValueError` for what is none."""
    if re.fullmatch(SITE, site) is None:
        raise ValueError(
            f"found {site!r}; allowed: up to 64 letters, digits and . _ / : -, the first of them a letter or digit"
        )
    return site


class NodeBeside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A further node of a ticket's machine, and the token by which it joins."""

    node: _PlainName
    token: str


class NodeTicket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine needs to join a pool as a node, or as several, as its ticket file has it. Never log it.

    `join` (host:port) is where to dial, `fingerprint` that of the certificate there; empty for plain text on loopback.
    Each node takes `gpus` devices of its machine, of the kind that `devices` names as `pool.devices` does. It is at
    this `site`, if the pool says where. `beside`: the machine's nodes besides `node`.
    """

    pool: _PlainName
    node: _PlainName
    join: str
    fingerprint: str
    token: str
    gpus: Annotated[int, msgspec.Meta(ge=1, le=w.NODES_MAX)]
    devices: str
    site: str = ""
    beside: tuple[NodeBeside, ...] = ()

    @property
    def nodes(self) -> Sequence[NodeBeside]:
        """All nodes that the machine joins as."""
        return (NodeBeside(self.node, self.token), *self.beside)


class JoinTerms(msgspec.Struct, frozen=True):
    """What the pool keeps of a node that joins by ticket. `expires_s` is Unix time by the clock of the pool's machine,
    until which the ticket must be spent. A node that was `drained` does not come back."""

    label: str
    expires_s: float
    drained: bool = False


def read_node_ticket(content: bytes) -> NodeTicket:
    """Raises `TicketRefused` for what is no ticket."""
    try:
        return msgspec.json.decode(content, type=NodeTicket)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TicketRefused(f"not a ticket as `elastic pool ticket` writes it: {error}") from error


def kind_of_node(name: NodeId) -> KindName:
    """Return the name of a node's kind."""
    return name.rpartition("-")[0]


def node_names(kind: KindName, most: int) -> Sequence[NodeId]:
    """Return the names of at most so many nodes of a kind on other machines."""
    return [f"{kind}-{number}" for number in range(1, most + 1)]


def free_names(kind: KindName, most: int, taken: Collection[NodeId], count: int = 1) -> Sequence[NodeId]:
    """Return the names of the next `count` nodes of a kind of at most so many. Raises `ValueError` if fewer are
    free."""
    names = node_names(kind, most)
    free = [name for name in names if name not in taken]
    if len(free) >= count:
        return free[:count]
    held = [name for name in names if name in taken]
    wanted = f"{count} more are asked for" if count > 1 else "each has a machine or a ticket that waits for one"
    raise ValueError(
        f"pool.{kind}.nodes: found {most}, and {wanted}: taken are {', '.join(held) or 'none'}; allowed: "
        "`elastic pool drain NODE` first, or a pool of more nodes"
    )


class JoinRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine must have that joins as a node of this kind: so many devices, such as `pool.devices` names, and
    memory, at its site, and this network `interface`, if one is named."""

    kind: NodeKind
    devices: str = "auto"
    interface: str = ""

    def refusal(self, hello: w.NodeAgentHello, others: Mapping[NodeId, w.NodeAgentHello]) -> str:
        """Return why a machine does not suit as this node; empty if it does. `others`: what those said who are in."""
        machine = hello.machine
        if machine is None:
            return "it does not say which machine it is on"
        try:
            check_site(machine.site)
        except ValueError as error:
            return f"its site: {error}"
        gpus, site, its = self.kind.gpus, self.kind.site, kind_of_node(hello.node)
        if site and machine.site != site:
            return f"pool.{its}.site: it is at site {machine.site!r}; allowed: {site!r}"
        if self.interface and self.interface not in machine.interfaces:
            there = ", ".join(machine.interfaces) or "none"
            return (
                f"pool.{its}.interface: node {hello.node}, on {machine.host}, has no network interface "
                f"{self.interface!r} with an IPv4 address; it has: {there}"
            )
        found = f"{len(hello.devices)} devices ({', '.join(hello.devices) or 'none'})"
        if len(hello.devices) != gpus or len(set(hello.devices)) != gpus:
            return f"pool.{its}.gpus: it has {found}; allowed: {gpus}"
        try:
            kind = kind_of(hello.devices)
        except ValueError as error:
            return str(error)
        kinds = {self.devices}
        if self.devices == "auto":
            kinds = {kind_of(other.devices) for name, other in others.items() if kind_of_node(name) == its}
        if kinds and kind not in kinds:
            return f"pool.devices: it has {found}; allowed: {' or '.join(sorted(kinds))}"
        if machine.count < gpus:
            return f"its machine has {machine.count} devices; allowed: the {gpus} that it says it has, at least"
        here = {name: other for name, other in others.items() if other.machine and other.machine.boot == machine.boot}
        for name, other in here.items():
            if both := sorted({*other.devices} & {*hello.devices}):
                return f"{', '.join(both)} of its machine is node {name}'s; allowed: others, named by --devices"
        needed = (1 + len(here)) * self.kind.memory_bytes
        if machine.memory_bytes < needed:
            return (
                f"pool.{its}.memory_gb: its machine has {machine.memory_bytes} bytes of memory for {1 + len(here)} "
                f"nodes; allowed: at least {needed}"
            )
        return ""


def devices_on(node: NodeId, devices: Sequence[DeviceName]) -> list[DeviceName]:
    """Return the names by which the pool tells devices of another machine from its own."""
    return [f"{device}@{node}" for device in devices]
