"""Ends of a connection to a pool's process: what arrives, what does not, and how an end learns that it is alone."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import FROM_DIALLER, POOL, TO_JOB, FromDialler, PoolLink
from elastic.protocol.connection import ConnectionLost, Greeting, SessionRefused, dial, over_socket
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.frames import framed
from tests.pool.model import listen_as_pool

HELLO = w.JobHello(w.POOL_PROTOCOL_VERSION, "a", "token", 1)
WELCOME = w.JobWelcome(("rollout-1",), ("train-1",), 1.0, 2.0, 1, 1, 60.0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Endpoint, "asyncio.Queue[PoolLink[FromDialler]]"]]:
    connected: asyncio.Queue[PoolLink[FromDialler]] = asyncio.Queue()
    server = await listen_as_pool(connected.put_nowait)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield Endpoint(f"{host}:{port}"), connected
    finally:
        server.close()
        while not connected.empty():
            connected.get_nowait().abort()


async def welcomes(connected: "asyncio.Queue[PoolLink[FromDialler]]", *answers: msgspec.Struct) -> None:
    for answer in answers:
        link = await connected.get()
        assert isinstance(await link.receive(), w.JobHello)
        link.send(answer)
        if not isinstance(answer, w.RefusedFrame):
            connected.put_nowait(link)


async def test_a_job_joins_and_both_hear_each_other_in_order():
    async with served() as (endpoint, connected), asyncio.timeout(20):
        answering = asyncio.create_task(welcomes(connected, WELCOME))
        link, welcome = await dial(endpoint, POOL, TO_JOB, Greeting(lambda: HELLO, w.JobWelcome), 10.0)
        await answering
        assert welcome == WELCOME
        other = connected.get_nowait()
        sent = [w.PhaseProgress(1, done, 5000) for done in range(5000)]  # More than wait unread.
        for message in sent:
            link.send(message)
        assert [await other.receive() for _ in sent] == sent
        other.send(w.Granted(7, PhaseKind.ROLLOUT, ("rollout-1",), 3.0))
        assert await link.receive() == w.Granted(7, PhaseKind.ROLLOUT, ("rollout-1",), 3.0)
        await link.aclose()
        with pytest.raises(ConnectionLost, match="closed"):
            await other.receive()


async def test_who_is_refused_for_good_does_not_dial_again_and_who_may_does():
    async with served() as (endpoint, connected), asyncio.timeout(20):
        answering = asyncio.create_task(
            welcomes(connected, w.RefusedFrame("later", retry=True), w.RefusedFrame("an older process", retry=False))
        )
        with pytest.raises(SessionRefused, match="older"):
            await dial(endpoint, POOL, TO_JOB, Greeting(lambda: HELLO, w.JobWelcome), 10.0)
        await answering


async def test_a_peer_that_falls_silent_is_lost_and_one_that_only_beats_is_not():
    ours, theirs = socket.socketpair()
    async with asyncio.timeout(20):
        one = await over_socket(ours, TO_JOB, "the pool")
        other = await over_socket(theirs, FROM_DIALLER, "the job")
        one.watch(0.3)
        other.watch(0.3)
        waiting = asyncio.create_task(one.receive())
        done, _ = await asyncio.wait([waiting], timeout=1.2)
        assert not done
        other.take_over("the job", lambda _: None)  # Beats are over.
        with pytest.raises(ConnectionLost, match=r"silent for 0\.3 s"):
            await waiting
        with pytest.raises(ConnectionLost):
            await other.receive()


async def test_a_peer_that_does_not_read_is_cut_and_one_that_breaks_the_protocol_too():
    ours, theirs = socket.socketpair()
    async with asyncio.timeout(20):
        link = await over_socket(ours, TO_JOB, "the pool")
        while link.open:
            link.send(w.PermitOver(1, "x" * 100_000))
            await asyncio.sleep(0)
        with pytest.raises(ConnectionLost, match="does not read"):
            await link.receive()
        theirs.close()
        ours, theirs = socket.socketpair()
        link = await over_socket(ours, TO_JOB, "the pool")
        theirs.send(framed(b"\x93nothing"))
        with pytest.raises(ConnectionLost, match="broke the protocol"):
            await link.receive()
        theirs.close()
