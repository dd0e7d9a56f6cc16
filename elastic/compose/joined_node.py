"""A pool's nodes on another machine: their node agents, which join by a ticket and come back by their sessions."""

import asyncio
import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import structlog

from elastic.compose.processes import run_loop
from elastic.compose.runs import claimed
from elastic.compose.site_relay import SiteMembership
from elastic.config import ConfigError
from elastic.pool.machines import NodeTicket, check_site
from elastic.pool.messages import NodeMachine
from elastic.pool.node_agent import RESIDENTS, NodeAgent, NodeAgentTicket
from elastic.pool.node_files import NodeFiles
from elastic.protocol.endpoint import Address, Endpoint
from elastic.system.cores import cores
from elastic.system.devices import DeviceKind, DeviceName, devices_here, kind_of, machine_gpus, model_of
from elastic.system.files import write_whole
from elastic.system.host import here
from elastic.system.interfaces import interfaces
from elastic.system.processes import OF_SITE
from elastic.system.signals import TERMINATION, act_on
from elastic.system.supervision import RecordedProcesses, end_left_over
from elastic.worker.notices import watch_instance

log = structlog.get_logger(__name__)

END_TIMEOUT_S = 30.0
BYTES_PER_GB = 1_000_000_000


def run_joined_nodes(
    ticket: NodeTicket, join: str, devices: Sequence[DeviceName], directory: Path, site: str, files_gb: float
) -> int:
    """Be the node agents of the ticket's nodes on this machine, which dial `join` if that is given; returns the exit
    code once all have ended. The machine is at this `site`, else at that of the ticket. Jobs' files take at most
    `files_gb` of it.

    A node has a directory of its own in `directory`, with its files, and the session by which it comes back once the
    ticket is spent, also after it was killed or its machine has started anew. Lost, or given up by the pool, it comes
    again without residents. Raises `ConfigError` for an address, devices or a directory that cannot be.
    """
    address = join or ticket.join
    try:
        Address.to_dial(address)
    except ValueError as error:
        raise ConfigError(f"elastic pool join: {error}") from error
    try:
        at_site = check_site(site or ticket.site)
    except ValueError as error:
        raise ConfigError(f"--site: {error}") from error
    its = node_devices(ticket, devices)
    machine, bytes_each = this_machine(its, at_site), round(files_gb * BYTES_PER_GB / len(ticket.nodes))
    staying: list[tuple[NodeAgentTicket, NodeSession]] = []
    with contextlib.ExitStack() as claims:
        for number, one in enumerate(ticket.nodes):
            place = directory / f"{ticket.pool}-{one.node}"
            try:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--directory: {place} cannot be made ({error.strerror})") from error
            claims.enter_context(claimed(place, what="node"))
            known = NodeAgentTicket(
                endpoint=Endpoint(address, fingerprint=ticket.fingerprint),
                pool=ticket.pool,
                node=one.node,
                token=one.token,
                records=place.resolve() / "leases",
                devices=tuple(its[number * ticket.gpus : (number + 1) * ticket.gpus]),
                machine=machine,
                directory=place.resolve(),
            )
            staying.append((known, NodeSession(place / "session", one.token)))
        return run_loop(_stay_all(staying, bytes_each))


def node_devices(ticket: NodeTicket, named: Sequence[DeviceName]) -> Sequence[DeviceName]:
    """Return the devices that the ticket's nodes take: those `named`, or the first that suit. Raises `ConfigError`.
    Blocks."""
    needed = ticket.gpus * len(ticket.nodes)
    there = devices_here(ticket.devices, needed)
    if named:
        if wrong := [name for name in named if re.fullmatch(r"[a-z]+:[0-9]{1,9}", name) is None]:
            raise ConfigError(f"--devices: found {', '.join(wrong)}; allowed: names such as cuda:2")
        try:
            arenas = kind_of(named) is DeviceKind.CPU and ticket.devices in ("auto", DeviceKind.CPU)
        except ValueError as error:
            raise ConfigError(f"--devices: {error}") from error
        if len(named) != needed or not (arenas or {*named} <= {*there}):
            found, allowed = ", ".join(named), ", ".join(there) or "none, for there are none"
            raise ConfigError(f"--devices: found {found}; allowed: {needed} of {allowed}")
        return named
    if len(there) < needed:
        whose = (
            f"{len(ticket.nodes)} nodes of pool {ticket.pool} have"
            if ticket.beside
            else f"a node of pool {ticket.pool} has"
        )
        raise ConfigError(
            f"{whose} {needed} devices ({ticket.devices}); found {len(there)} here: {', '.join(there) or 'none'}"
        )
    return there[:needed]


def this_machine(devices: Sequence[DeviceName], site: str = "") -> NodeMachine:
    """Return what a node's machine says of itself. Blocks."""
    gpus = () if kind_of(devices) is DeviceKind.CPU else machine_gpus()
    return NodeMachine(
        host=socket.gethostname(),
        boot=here().boot_id(),
        device=model_of(devices),
        count=len(gpus) or max(cores(), len(devices)),
        memory_bytes=psutil.virtual_memory().total,
        site=site,
        relay=os.environ.get(OF_SITE[0], ""),
        interfaces=tuple(interfaces()),
    )


class NodeSession:
    """The token by which a node comes back, kept in a file for its user alone. It is of one ticket."""

    def __init__(self, path: Path, ticket: str) -> None:
        self._path, self._ticket = path, hashlib.sha256(ticket.encode()).hexdigest()

    def token(self) -> str:
        """Return the kept token; empty if there is none of this ticket."""
        try:
            ticket, _, token = self._path.read_text().partition(" ")
        except (OSError, UnicodeDecodeError):
            return ""
        return token if ticket == self._ticket else ""

    def keep(self, token: str) -> None:
        write_whole(self._path, f"{self._ticket} {token}".encode())


async def _stay_all(nodes: Sequence[tuple[NodeAgentTicket, NodeSession]], files_bytes: int) -> int:
    """Be all nodes until the pool lets them go, or a signal; returns the largest of their exit codes."""
    tasks = [asyncio.create_task(_stay(known, session, files_bytes), name=known.node) for known, session in nodes]

    def end() -> None:
        for task in tasks:
            task.cancel()

    act_on(TERMINATION, end)
    return max(await asyncio.gather(*tasks))


async def _stay(known: NodeAgentTicket, session: NodeSession, files_bytes: int) -> int:
    """Be the node until the pool lets it go, or it is cancelled. Nothing of it lives on."""
    assert known.records is not None
    known.records.mkdir(exist_ok=True)
    try:
        while True:
            found = RecordedProcesses.found(known.records, known.pool, f"{RESIDENTS} {known.node}")
            await end_left_over(found, END_TIMEOUT_S)
            ticket = msgspec.structs.replace(known, token=session.token() or known.token)
            its = SiteMembership(known.directory / "site", known.records, known.pool, known.node)
            files = NodeFiles(known.directory, files_bytes)
            node_agent = NodeAgent(ticket, let_in=session.keep, site=its, files=files)
            watching = asyncio.create_task(watch_instance(node_agent.notice), name="notices of the machine's end")
            try:
                end = await node_agent.run()
            finally:
                watching.cancel()
            if end.how in ("refused", "dismissed") or not session.token():
                log.info("node ends", node=known.node, cause=end.reason)
                return 0 if end.how == "dismissed" else 1
            log.warning("node comes again without its residents", node=known.node, cause=end.reason)
    except asyncio.CancelledError:
        log.info("node ends", node=known.node, cause="it was told to")
    return 0
