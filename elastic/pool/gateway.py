"""Admission to a pool's process: keepers by one-time tickets and sessions, jobs by the token of their placement.

- Every token is derived from the secret in the pool's directory. So a restarted process knows all tokens, and none is
  stored or logged.
- A newer connection replaces an older one of the same keeper or job.
- The number of connections without a hello is bounded, and so is their time.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from elastic.core.cluster.types import JobId, NodeId
from elastic.pool import messages as w
from elastic.pool.connection import ATTEMPT_TIMEOUT_S, STRANGERS_MAX, FromDialler, LinkLost, PoolLink, listen
from elastic.protocol.sockets import address_of
from elastic.protocol.tls import Certificate, TlsServer
from elastic.system.isolation import IsolatedLoop

log = structlog.get_logger(__name__)

CLOSE_S = 1.0


class KeeperTickets(Protocol):
    """Says which tickets of keepers are valid."""

    def ticket(self, node: NodeId) -> tuple[int, bool]: ...

    def spend_ticket(self, node: NodeId) -> None: ...


class PoolListener(Protocol):
    """Receives the messages: the pool's shell."""

    def keeper_joined(self, hello: w.KeeperHello) -> str: ...

    def keeper_left(self, name: NodeId) -> None: ...

    def keeper_heard(self, name: NodeId, message: w.FromKeeper) -> None: ...

    def job_joined(self, hello: w.JobHello) -> w.JobWelcome | w.PoolRefused: ...

    def settle(self) -> None:
        """Called after a peer was welcomed. The shell may now send it messages."""
        ...

    def job_left(self, job: JobId) -> None: ...

    def job_heard(self, job: JobId, message: w.FromJob) -> None: ...


class PoolTokens:
    """Tokens of keepers and jobs, all derived from one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def ticket(self, node: NodeId, number: int) -> str:
        return self._derived("ticket", node, str(number))

    def session(self, node: NodeId, number: int) -> str:
        return self._derived("session", node, str(number))

    def job(self, job: JobId, placement: int) -> str:
        return self._derived("job", job, str(placement))

    def _derived(self, *what: str) -> str:
        return hmac.new(self._secret, "\0".join(what).encode(), hashlib.sha256).hexdigest()


class KeeperTimes(msgspec.Struct, frozen=True):
    """Times that keepers are told, in seconds."""

    silence_s: float
    orphan_s: float
    measure_s: float


class PoolGateway:
    """Serves connections for `listener` while it is open."""

    def __init__(self, tokens: PoolTokens, tickets: KeeperTickets, times: KeeperTimes, isolated: IsolatedLoop) -> None:
        self._tokens, self._tickets, self._times = tokens, tickets, times
        self._isolated = isolated
        self._server: asyncio.Server | TlsServer | None = None
        self._listener: PoolListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[PoolLink[FromDialler], None] = {}
        self._keepers: dict[NodeId, PoolLink[FromDialler]] = {}
        self._jobs: dict[JobId, PoolLink[FromDialler]] = {}

    async def start(self, host: str, port: int, certificate: Certificate | None) -> str:
        """Listen; returns `host:port`. No peer is let in before `serve`. Raises `OSError`."""
        self._server = await listen(host, port, certificate, self._connected)
        return str(address_of(self._server.sockets[0]))

    def serve(self, listener: PoolListener) -> None:
        self._listener = listener

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._listener = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell_keeper(self, node: NodeId, message: w.ToKeeper) -> None:
        if node in self._keepers:
            self._keepers[node].send(message)

    def tell_job(self, job: JobId, message: msgspec.Struct) -> None:
        if job in self._jobs:
            self._jobs[job].send(message)

    def cut_job(self, job: JobId) -> None:
        link = self._jobs.pop(job, None)
        if link is not None:
            link.abort()

    def cut_keeper(self, node: NodeId) -> None:
        link = self._keepers.pop(node, None)
        if link is not None:
            link.abort()

    def _connected(self, link: PoolLink[FromDialler]) -> None:
        self._strangers[link] = None
        if len(self._strangers) > STRANGERS_MAX:
            next(iter(self._strangers)).abort()
        task = asyncio.create_task(self._attend(link), name="pool connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, link: PoolLink[FromDialler]) -> None:
        try:
            with self._isolated.attempt("connection"):
                try:
                    async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                        hello = await link.receive()
                    self._strangers.pop(link, None)
                    match hello:
                        case w.KeeperHello():
                            await self._attend_keeper(link, hello)
                        case w.JobHello():
                            await self._attend_job(link, hello)
                        case _:
                            await self._refuse(link, "the first message is a hello", retry=False)
                except (LinkLost, TimeoutError):
                    pass
        finally:
            self._strangers.pop(link, None)
            link.abort()

    async def _attend_keeper(self, link: PoolLink[FromDialler], hello: w.KeeperHello) -> None:
        listener, name = self._listener, hello.node
        number, spent = self._tickets.ticket(name)
        session = self._tokens.session(name, number)
        by_ticket = _same(hello.token, self._tokens.ticket(name, number))
        if listener is None:
            await self._refuse(link, "the pool's process is not ready yet", retry=True)
        elif hello.protocol_version != w.POOL_PROTOCOL_VERSION:
            await self._refuse(link, _other_version(hello.protocol_version), retry=False)
        elif not (by_ticket and not spent) and not _same(hello.token, session):
            await self._refuse(link, "unknown node or wrong token", retry=False)
        else:
            if by_ticket:
                self._tickets.spend_ticket(name)
            former = self._keepers.get(name)
            if former is not None:
                former.abort()
                listener.keeper_left(name)
            self._keepers[name] = link
            times = self._times
            link.send(w.KeeperWelcome(session, times.silence_s, times.orphan_s, times.measure_s))
            if refused := listener.keeper_joined(hello):
                self._keepers.pop(name, None)
                await self._refuse(link, refused, retry=False)
                return
            link.watch(times.silence_s)
            await self._hear(
                link, self._keepers, name, lambda message: listener.keeper_heard(name, message), listener.keeper_left
            )

    async def _attend_job(self, link: PoolLink[FromDialler], hello: w.JobHello) -> None:
        listener, job = self._listener, hello.job
        if listener is None:
            await self._refuse(link, "the pool's process is not ready yet", retry=True)
            return
        if hello.protocol_version != w.POOL_PROTOCOL_VERSION:
            await self._refuse(link, _other_version(hello.protocol_version), retry=False)
            return
        if not _same(hello.token, self._tokens.job(job, hello.placement)):
            await self._refuse(link, "unknown job or wrong token", retry=False)
            return
        answer = listener.job_joined(hello)
        if isinstance(answer, w.PoolRefused):
            await self._refuse(link, answer.reason, retry=answer.retry)
            return
        former = self._jobs.get(job)
        if former is not None:
            former.abort()
        self._jobs[job] = link
        link.send(answer)
        link.watch(answer.silence_s)
        listener.settle()
        await self._hear(link, self._jobs, job, lambda message: listener.job_heard(job, message), listener.job_left)

    async def _hear(
        self,
        link: PoolLink[FromDialler],
        links: dict[str, PoolLink[FromDialler]],
        key: str,
        hear: Callable[[Any], None],
        left: Callable[[str], None],
    ) -> None:
        try:
            while True:
                message = await link.receive()
                if links.get(key) is not link:
                    return
                with self._isolated.attempt(f"message of {key}"):
                    hear(message)
        except LinkLost as loss:
            log.info("connection lost", who=key, cause=str(loss))
        finally:
            if links.get(key) is link:
                del links[key]
                left(key)

    async def _refuse(self, link: PoolLink[FromDialler], reason: str, *, retry: bool) -> None:
        link.send(w.PoolRefused(reason, retry))
        await link.aclose()


def _other_version(found: int) -> str:
    return f"it speaks version {found} of the pool's protocol; allowed: {w.POOL_PROTOCOL_VERSION}"


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), token.encode())
