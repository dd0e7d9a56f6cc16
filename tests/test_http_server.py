"""What an unauthenticated peer can cost an HTTP server: real sockets, real floods, and a client that must be served
meanwhile."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address, ip_network
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from elastic.protocol.http_server import HEAD_BYTES_MAX, BodyLimits, CallerLimits, PeerLimits, serving, too_many
from elastic.protocol.sockets import network_of
from elastic.system.machine import CpuSampler, raise_descriptor_limit

PATIENCE_S = 20.0
BODY_BYTES_MAX = 100_000
SHORT = PeerLimits(connections_max=8, head_timeout_s=0.2, unread_timeout_s=0.2, linger_timeout_s=0.2)
PATIENT = PeerLimits(connections_max=8)


class Peer:
    """A connection on which anything can be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> bytes:
        """All that the server says until it ends the connection; it must do so by itself."""
        said = b""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while part := await self.reader.read(65_536):
                    said += part
        return said


class Target:
    def __init__(self, url: str, released: asyncio.Event, dropped: asyncio.Event) -> None:
        self.url = url
        self.released = released
        self.dropped = dropped
        self.client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False)
        self._peers: list[Peer] = []

    async def peer(self, sending: bytes = b"") -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2])))
        self._peers.append(peer)
        await peer.send(sending)
        return peer

    async def aclose(self) -> None:
        await self.client.aclose()
        for peer in self._peers:
            peer.writer.close()


Open = Callable[[PeerLimits], contextlib.AbstractAsyncContextManager[Target]]


@pytest.fixture
def target() -> Open:
    released, dropped = asyncio.Event(), asyncio.Event()

    async def echo(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def slow(_: Request) -> Response:
        await released.wait()
        return PlainTextResponse("at last")

    async def refused(_: Request) -> Response:
        return PlainTextResponse("no", 401)

    async def endless(_: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(1 << 20)
                    await asyncio.sleep(0)
            finally:
                dropped.set()

        return StreamingResponse(pieces())

    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["GET", "POST"]),
            Route("/slow", slow),
            Route("/refused", refused, methods=["POST"]),
            Route("/endless", endless),
        ]
    )
    bounded = BodyLimits(app, BODY_BYTES_MAX, timeout_s=0.2, bytes_per_s_min=1e6)

    @contextlib.asynccontextmanager
    async def opened(limits: PeerLimits) -> AsyncIterator[Target]:
        async with serving(bounded, socket.create_server(("127.0.0.1", 0)), limits) as url:
            under_test = Target(url, released, dropped)
            try:
                yield under_test
            finally:
                released.set()
                await under_test.aclose()

    return opened


HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


async def test_a_client_that_leaves_within_its_body_is_no_error(target: Open, caplog: pytest.LogCaptureFixture) -> None:
    async with target(PATIENT) as server:
        peer = await server.peer(HEAD + b"Content-Length: 10\r\n\r\nhalf")
        peer.writer.close()
        await peer.writer.wait_closed()
    assert "ASGI" not in caplog.text


async def test_a_head_without_end_is_refused_after_little(target: Open) -> None:
    async with target(PATIENT) as server:
        peer = await server.peer(HEAD)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not peer.reader.at_eof() and sent < 64 * HEAD_BYTES_MAX:
                await peer.send(b"X-Filler: " + b"x" * 1000 + b"\r\n")
                sent += 1012
                await asyncio.sleep(0)
        assert sent < 64 * HEAD_BYTES_MAX
        await peer.answer()
        assert (await server.client.get("/echo")).text == "0"


@pytest.mark.parametrize("begun", [b"", b"POST", HEAD, HEAD + b"Content-Length: 5\r\n"])
async def test_who_does_not_come_to_the_point_is_cut(target: Open, begun: bytes) -> None:
    async with target(SHORT) as server:
        assert await (await server.peer(begun)).answer() == b""


async def test_a_head_that_trickles_after_an_answer_is_cut_too(target: Open) -> None:
    """A byte now and then puts off a keep-alive timeout for ever; the head's is counted from its first byte."""
    async with target(SHORT) as server:
        peer = await server.peer(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        await peer.reader.readuntil(b"0")
        closed = asyncio.create_task(peer.answer())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                for letter in b"GET /" + b"x" * 10_000:
                    if closed.done():
                        break
                    await peer.send(bytes([letter]))
                    await asyncio.sleep(0.01)
        await closed


async def test_a_body_that_does_not_come_is_408(target: Open) -> None:
    async with target(PATIENT) as server:
        peer = await server.peer(HEAD + b"Content-Length: 10\r\n\r\nhalf")
        assert b"408" in await peer.reader.readline()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_too_large_is_413(target: Open, chunked: bool) -> None:
    content = bytes(BODY_BYTES_MAX + 1)

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    async with target(PATIENT) as server:
        answer = await server.client.post("/echo", content=pieces() if chunked else content)
        assert answer.status_code == 413
        assert str(BODY_BYTES_MAX) in answer.text
        assert (await server.client.post("/echo", content=content[1:])).text == str(BODY_BYTES_MAX)


async def test_a_body_that_nobody_wants_does_not_go_on_for_ever(target: Open) -> None:
    async with target(SHORT) as server:
        peer = await server.peer(b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        answer = asyncio.create_task(peer.answer())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while not answer.done():
                    await peer.send(bytes(65_536))
                    await asyncio.sleep(0)
        assert (await answer).startswith(b"HTTP/1.1 401")


async def test_an_answer_that_nobody_reads_is_dropped(target: Open) -> None:
    async with target(SHORT) as server:
        peer = await server.peer(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        transport = peer.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()
        async with asyncio.timeout(PATIENCE_S):
            await server.dropped.wait()
        transport.resume_reading()
        await peer.answer()


async def test_a_crowd_of_silent_unauthenticated_peers_keeps_nobody_out(target: Open) -> None:
    """And costs nobody who is being served the connection; the oldest unauthenticated peer goes."""
    async with target(PATIENT) as server:
        waiting = asyncio.create_task(server.client.get("/slow"))
        crowd = [await server.peer() for _ in range(20 * PATIENT.connections_max)]
        assert await crowd[0].answer() == b""
        assert (await server.client.get("/echo")).text == "0"
        server.released.set()
        assert (await waiting).text == "at last"


async def test_no_piece_of_an_answer_waits_for_an_acknowledgement(target: Open) -> None:
    async with target(PATIENT) as server:
        peer = await server.peer(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await peer.reader.readline()).startswith(b"HTTP/1.1 200")
        (accepted,) = sockets_to(peer.writer.get_extra_info("sockname"))
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def sockets_to(address: tuple[str, int]) -> list[socket.socket]:
    """This process' sockets whose peer is at an address."""
    known = [one for one in psutil.Process().net_connections() if one.raddr == address]
    return [socket.socket(fileno=os.dup(one.fd)) for one in known]


def test_as_many_descriptors_as_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_look_at_the_processors_survives_without_descriptors() -> None:
    sampler = CpuSampler()
    sampler.share()
    last = sampler.share()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        assert sampler.share() == last
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


FEW = PeerLimits(connections_max=8, bearer_share=0.25, address_share=0.5)
"""Two requests in work for one bearer, four for one address."""


@contextlib.asynccontextmanager
async def pending_workerss(limits: PeerLimits) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server whose answers wait, but for the one on its health."""
    released = asyncio.Event()

    async def slow(_: Request) -> Response:
        await released.wait()
        return PlainTextResponse("at last")

    async def health(_: Request) -> Response:
        return PlainTextResponse("well")

    app = Starlette(routes=[Route("/slow", slow), Route("/health", health)])
    bounded = CallerLimits(app, too_many, limits, health=["/health"], cookie="session")
    async with serving(bounded, socket.create_server(("127.0.0.1", 0)), limits) as url:
        yield url, released


def _from(address: str, proxied: str = "") -> httpx.AsyncClient:
    headers = {"x-forwarded-for": proxied} if proxied else {}
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address=address), headers=headers, timeout=30)


async def _ask(client: httpx.AsyncClient, url: str, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return (await client.get(f"{url}/slow", headers=headers)).status_code


async def _until_done(answers: list[asyncio.Task[int]], count: int) -> None:
    for _, done in zip(range(count), asyncio.as_completed(answers), strict=False):
        await done


async def test_one_bearer_and_one_address_have_so_many_requests_in_work() -> None:
    """And others have theirs, and health is told, whatever is in work."""
    async with pending_workerss(FEW) as (url, released), _from("127.0.0.2") as one, _from("127.0.0.3") as other:
        asked = [(one, "a"), (one, "a"), (one, "a"), (one, "b"), (one, "b"), (one, "c"), (other, "a"), (other, "c")]
        answers = [asyncio.create_task(_ask(client, url, token)) for client, token in asked]
        await _until_done(answers, 3)
        assert (await one.get(f"{url}/health")).text == "well"
        released.set()
        found = await asyncio.gather(*answers)
        assert sorted(found) == [200] * 5 + [429] * 3
        assert found[7] == 200, "another bearer elsewhere has its place"
        assert await _ask(one, url, "a") == 200, "what is answered counts no more"


KEYS = [{"authorization": said} for said in ("Bearer k", "bearer  k", "Basic YTpr", "Basic Yjpr")] + [
    {"x-api-key": "k"}
]
SESSIONS = [
    {"cookie": said} for said in ("session=s", "a=b; session=s", "session=s; c=d", "a=e; session=s", "session=s;")
]
PROXIED = [[("x-forwarded-for", f"10.0.0.{n}"), ("x-forwarded-for", f"9.9.9.9:{n}")] for n in range(5)]


@pytest.mark.parametrize(("spellings", "places"), [(KEYS, 2), (SESSIONS, 2), (PROXIED, 4)])
async def test_one_caller_by_any_spelling_is_one(spellings: list[Any], places: int) -> None:
    limits = msgspec.structs.replace(FEW, address_share=1.0 if places == 2 else 0.5)
    limits = msgspec.structs.replace(limits, proxies=(ip_network("127.0.0.2/32"),))
    async with pending_workerss(limits) as (url, released), _from("127.0.0.2") as client:

        async def ask(headers: Any) -> int:
            return (await client.get(f"{url}/slow", headers=headers)).status_code

        answers = [asyncio.create_task(ask(headers)) for headers in spellings]
        await _until_done(answers, 5 - places)
        released.set()
        assert sorted(await asyncio.gather(*answers)) == [200] * places + [429] * (5 - places)


async def test_behind_a_trusted_proxy_the_header_counts() -> None:
    trusting = msgspec.structs.replace(FEW, proxies=(ip_network("127.0.0.2/32"),))
    for limits, refused in ((FEW, 1), (trusting, 0)):
        async with pending_workerss(limits) as (url, released), contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(_from("127.0.0.2", f"10.0.0.{n}")) for n in range(5)]
            answers = [asyncio.create_task(_ask(client, url, "")) for client in clients]
            await _until_done(answers, refused)
            released.set()
            assert sorted(await asyncio.gather(*answers)) == [200] * (5 - refused) + [429] * refused


async def test_who_dials_without_end_keeps_nobody_else_out() -> None:
    """The crowded address loses: whether it keeps what it has, or dials again as it is hung up on."""
    limits = PeerLimits(connections_max=8, dials_per_s=50.0)
    async with pending_workerss(limits) as (url, released), _from("127.0.0.3") as other:
        released.set()
        port, over, dials = int(url.rpartition(":")[2]), False, 0

        async def redial() -> None:
            nonlocal dials
            while not over:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
                    dials += 1
                    try:
                        await reader.read()
                    finally:
                        writer.transport.abort()

        crowd = [asyncio.create_task(redial()) for _ in range(24)]
        for _ in range(10):
            assert await _ask(other, url, "x") == 200
            await other.get(f"{url}/health", headers={"connection": "close"})
        over = True
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        assert dials > 24


@given(st.integers(0, 2**64 - 1))
def test_one_subscribers_addresses_count_as_one(host: int) -> None:
    found = network_of(str(ip_address((0x2001_0DB8 << 96) + host)))
    assert found == "2001:db8::/64" != network_of("2001:db8:0:1::1")
    assert network_of("1.2.3.4") == "1.2.3.4"
