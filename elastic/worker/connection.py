"""How a worker dials its orchestrator: by its ticket at first, and then by its session's key."""

import contextlib
from typing import TypeAlias

import msgspec

from elastic.core.types import WorkerId
from elastic.protocol import connection, wire
from elastic.protocol.connection import Connection, Greeting, LostInWaiting, MessageCodec, Peer
from elastic.protocol.endpoint import Endpoint
from elastic.system.host import here

JOIN_TIMEOUT_S = 30.0
"""Limit for the first welcome if the ticket sets none."""

OrchestratorLink: TypeAlias = Connection[wire.FromWorker, wire.FromOrchestrator]
"""The worker's end."""
CODEC = MessageCodec[wire.FromWorker, wire.FromOrchestrator](
    wire.encode, wire.decode_from_orchestrator, wire.MAX_FRAME_BYTES, unread_bytes=4 * wire.MAX_FRAME_BYTES
)
ORCHESTRATOR = Peer(
    "the orchestrator",
    unresolved="; advertise another (run.advertise), or name an address that reaches it (--join HOST:PORT)",
    not_tls="; is there a run at this port?",
    not_believed="; take a ticket of the run that is there now",
    in_plain_text="this was plain text: a run beyond loopback speaks TLS, and its tickets have a fingerprint",
)


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The run and worker for which a process dials, and where. `token` is valid for one session; it dials for
    `wait_s`."""

    endpoint: Endpoint
    run: str
    worker: WorkerId
    token: str
    wait_s: float = JOIN_TIMEOUT_S
    ticket: str = ""
    """The name of the ticket, for workers that join by one. The orchestrator then assigns the `worker` name."""


async def dial(ticket: Ticket, key: str, within_s: float) -> tuple[OrchestratorLink, wire.Welcome]:
    """Dial until welcomed: with a session's `key` to resume it, else with the ticket's token.

    Raises as `elastic.protocol.connection.dial`. The time in which the worker waited for a lease does not count.
    """
    who = wire.PROTOCOL_VERSION, ticket.worker, key or ticket.token, bool(key), here().pid(), here().name()
    hello = wire.Hello(*who, ticket.run, "" if key else ticket.ticket)
    greeting = Greeting[wire.FromWorker](lambda: hello, wire.Welcome, wire.Waiting, wire.StillThere())
    peer = ORCHESTRATOR._replace(changes=bool(key))
    while True:
        with contextlib.suppress(LostInWaiting):
            return await connection.dial(ticket.endpoint, peer, CODEC, greeting, within_s)
