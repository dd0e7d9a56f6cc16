"""A pool's node on another machine: its node agent, which joins by a ticket and comes back by its session."""

import asyncio
import hashlib
import os
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
from elastic.system.processes import OF_SITE
from elastic.system.signals import TERMINATION, act_on
from elastic.system.supervision import RecordedProcesses, end_left_over
from elastic.worker.notices import watch_instance

log = structlog.get_logger(__name__)

END_TIMEOUT_S = 30.0
BYTES_PER_GB = 1_000_000_000


def run_joined_node(
    ticket: NodeTicket, join: str, devices: Sequence[DeviceName], directory: Path, site: str, files_gb: float
) -> int:
    """Be the node agent of the ticket's node on this machine, which dials `join` if that is given; returns the exit
    code. The machine is at this `site`, else at that of the ticket. Jobs' files take at most `files_gb` of it.

    Its files are in `directory`, and the session by which it comes back once the ticket is spent, also after it was
    killed or its machine has started anew. Lost, or given up by the pool, it comes again without residents. Raises
    `ConfigError` for an address, devices or a directory that cannot be.
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
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--directory: {directory} cannot be made ({error.strerror})") from error
    known = NodeAgentTicket(
        endpoint=Endpoint(address, fingerprint=ticket.fingerprint),
        pool=ticket.pool,
        node=ticket.node,
        token=ticket.token,
        records=directory.resolve() / "leases",
        devices=tuple(its),
        machine=this_machine(its, at_site),
        directory=directory.resolve(),
    )
    with claimed(directory, what="node"):
        return run_loop(_stay(known, NodeSession(directory / "session", ticket.token), round(files_gb * BYTES_PER_GB)))


def node_devices(ticket: NodeTicket, named: Sequence[DeviceName]) -> Sequence[DeviceName]:
    """Return the devices that the node takes: those `named`, or the first that suit. Raises `ConfigError`. Blocks."""
    there = devices_here(ticket.devices, ticket.gpus)
    if named:
        try:
            arenas = kind_of(named) is DeviceKind.CPU and ticket.devices in ("auto", DeviceKind.CPU)
        except ValueError as error:
            raise ConfigError(f"--devices: {error}") from error
        if len(named) != ticket.gpus or not (arenas or {*named} <= {*there}):
            found, allowed = ", ".join(named), ", ".join(there) or "none, for there are none"
            raise ConfigError(f"--devices: found {found}; allowed: {ticket.gpus} of {allowed}")
        return named
    if len(there) < ticket.gpus:
        raise ConfigError(
            f"a node of pool {ticket.pool} has {ticket.gpus} devices ({ticket.devices}); found {len(there)} here: "
            f"{', '.join(there) or 'none'}"
        )
    return there[: ticket.gpus]


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


async def _stay(known: NodeAgentTicket, session: NodeSession, files_bytes: int) -> int:
    """Be the node until the pool lets it go, or a signal. Nothing of it lives on."""
    task = asyncio.current_task()
    assert task is not None
    assert known.records is not None
    act_on(TERMINATION, task.cancel)
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
