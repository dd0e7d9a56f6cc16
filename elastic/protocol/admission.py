"""The accepting end of connections: who may come in, and what unauthenticated peers may cost.

An unauthenticated peer has a few seconds to introduce itself, in its first message. Unauthenticated peers are few:
where there are too many, the address with the most loses its oldest. Before that, `elastic.protocol.tls` bounds
handshakes and dials in the same way.
"""

import asyncio
import hmac
from collections.abc import Callable
from typing import Generic

import msgspec

from elastic.protocol.connection import CLOSE_GRACE_S, Connection, HearsT, MessageCodec, SaysT, SessionRefused
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.sockets import address_of, listening_socket
from elastic.protocol.tls import Certificate, TlsServer, oldest_of_crowd

BACKLOG = 1024
"""Connections that wait to be accepted. Where they do not fit, the kernel lets a peer wait a second."""


class UnauthenticatedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """At most `most` peers may be without a Hello at once, each for `hello_timeout_s`; or as many as are expected,
    where these are more: a fleet may come back all at once."""

    most: int = 256
    hello_timeout_s: float = 5.0


def is_secret(shown: str, secret: str) -> bool:
    """Compare what a peer shows with a secret, in a time that tells nothing of it."""
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), secret.encode())


async def listen(
    host: str,
    port: int,
    certificate: Certificate | None,
    protocol: Callable[[], asyncio.Protocol],
    limits: UnauthenticatedLimits | None = None,
    refused: Callable[[str], None] = lambda reason: None,
    expected: Callable[[], int] = lambda: 0,
) -> asyncio.Server | TlsServer:
    """Accept connections, on a free port if `port` is 0, with TLS if there is a certificate. Each gets a `protocol`.

    `refused` hears why there was no handshake with a peer; `expected` says how many peers may come at once. Raises
    `OSError`.
    """
    if certificate is None:
        return await asyncio.get_running_loop().create_server(protocol, host, port, backlog=BACKLOG)
    limits, listener = limits or UnauthenticatedLimits(), listening_socket(host, port, BACKLOG)
    return TlsServer(
        listener,
        certificate,
        protocol,
        limits.most,
        limits.hello_timeout_s,
        lambda address, reason: refused(reason),
        expected=expected,
    )


class Admission(Generic[SaysT, HearsT]):
    """Listens, and has `greet` let peers in by their first messages.

    `greet` takes the connection over, or raises `SessionRefused` or `WireError`, which the peer is told. `refused`
    hears the reasons of all refusals. `expected` says how many peers are known that may come at once.
    """

    def __init__(
        self,
        codec: MessageCodec[SaysT, HearsT],
        greet: Callable[[Connection[SaysT, HearsT], HearsT], None],
        limits: UnauthenticatedLimits | None = None,
        refused: Callable[[str], None] = lambda reason: None,
        expected: Callable[[], int] = lambda: 0,
    ) -> None:
        self.connections: set[Connection[SaysT, HearsT]] = set()
        """All that are open, authenticated or not."""
        self._codec = codec
        self._greet = greet
        self._limits = limits or UnauthenticatedLimits()
        self._refused = refused
        self._expected = expected
        self._unauthenticated: dict[Connection[SaysT, HearsT], asyncio.TimerHandle] = {}
        """In the order in which they came, with the ends of their time."""
        self._server: asyncio.Server | TlsServer | None = None

    async def start(self, host: str, port: int, certificate: Certificate | None) -> str:
        """Listen, on a free port if `port` is 0; returns the `host:port`. Raises `OSError`."""
        self._server = await listen(
            host, port, certificate, self._connection, self._limits, self._refused, self._expected
        )
        return str(address_of(self._server.sockets[0]))

    async def aclose(self) -> None:
        """Stop listening and end every connection. Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self.connections:
            connection.close()
        if self.connections:
            await asyncio.wait([connection.lost for connection in self.connections], timeout=2 * CLOSE_GRACE_S)

    def refuse(self, connection: Connection[SaysT, HearsT], reason: str, *, retry: bool = False) -> None:
        """Tell a peer why it is not let in, and close its connection."""
        self._refused(reason)
        connection.close(RefusedFrame(reason, retry))
        self._forget(connection)

    def _connection(self) -> Connection[SaysT, HearsT]:
        return Connection(self._codec, "the peer", self._connected)

    def _connected(self, connection: Connection[SaysT, HearsT]) -> None:
        """Let a new connection stay for its Hello; where there are too many, another one goes for it."""
        self.connections.add(connection)
        connection.lost.add_done_callback(lambda _: self._lost(connection))
        connection.take_over(
            connection.peer,
            lambda messages: self._hear(connection, messages),
            broken=lambda error: self.refuse(connection, str(error)),
        )
        within_s = self._limits.hello_timeout_s
        late = f"no Hello within {within_s} s"
        loop = asyncio.get_running_loop()
        self._unauthenticated[connection] = loop.call_later(within_s, lambda: self.refuse(connection, late, retry=True))
        if len(self._unauthenticated) > max(self._limits.most, self._expected()):
            oldest = oldest_of_crowd((peer, peer.address) for peer in self._unauthenticated)
            self.refuse(oldest, "too many connections are waiting to be let in", retry=True)

    def _hear(self, connection: Connection[SaysT, HearsT], messages: list[HearsT]) -> None:
        hello, *rest = messages
        try:
            self._greet(connection, hello)
        except SessionRefused as error:
            self.refuse(connection, str(error), retry=error.retry)
        else:
            self._forget(connection)
            if rest and connection.open:
                connection.hear(rest)

    def _lost(self, connection: Connection[SaysT, HearsT]) -> None:
        self.connections.discard(connection)
        self._forget(connection)

    def _forget(self, connection: Connection[SaysT, HearsT]) -> None:
        """The peer of the connection is authenticated."""
        timer = self._unauthenticated.pop(connection, None)
        if timer is not None:
            timer.cancel()
